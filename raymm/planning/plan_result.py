"""What came of planning a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from raymm.planning.inputs import Costs
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Proposal, evaluate, step_bound, step_timeline
from raymm.scheduler.search.options import PlanProblem


@dataclass(frozen=True)
class PlanResult:
    """A plan, and what else was tried.

    Attributes:
        plan: what to run.
        proposal: everything that was judged; a plan that was given is the only option.
        costs: what it was judged by.
        problem: what was solved; None if the plan was given.
        whole: modules that cannot be cut.
        unfit: why the plan does not fit in memory, if it does not.
        notes: remarks a person should see.
    """

    plan: Plan
    proposal: Proposal
    costs: Costs
    problem: PlanProblem | None = None
    whole: tuple[str, ...] = ()
    unfit: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def network(self) -> Network:
        """The links it was judged with."""
        return self.costs.network

    @cached_property
    def program(self) -> Program:
        """The program of a step in which every microbatch has every modality."""
        return full_program(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """That step, simulated."""
        return step_timeline(self.plan, self.network, self.program)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.makespan

    @classmethod
    def evaluated(cls, plan: Plan, costs: Costs, memory_limit: int | None = None) -> Self:
        """A plan that was given, with costs: what raymm expects of it.

        Args:
            plan: the plan; its own profile and limit, where it has them, go first.
            costs: of its model.
            memory_limit: bytes a rank may use.
        """
        costs = replace(costs, profile=plan.profile or costs.profile)
        plan = replace(
            plan, profile=costs.profile,
            memory_limit=memory_limit if plan.memory_limit is None else plan.memory_limit,
        )
        option, unfit = evaluate(plan, costs.network, "given")
        bound = step_bound(option.plan, costs.network)
        return cls(
            option.plan, Proposal((option,), (), bound, 0, 1), costs, unfit=unfit, notes=costs.notes
        )
