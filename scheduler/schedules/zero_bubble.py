"""Zero bubble (Qi et al. 2024) within the memory of 1F1B."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from raymm.errors import NoPlanError
from raymm.scheduler.schedules.base import ListedSchedule
from raymm.scheduler.schedules.policy import Policy, Rules, policies

# Limits of the local search for a policy: rounds, and scheduled tasks, which bound its time.
TUNING_ROUNDS = 200
TUNED_TASKS = 200_000
# Number of best policies that the local search starts with.
TUNED_POLICIES = 2
# The local search stops this close to the lower bound.
CLOSE = 1.002


class ZeroBubble(ListedSchedule):
    """The best of several list schedules within 1F1B's activation memory.

    B_w is a separate task that fills the drain. A recomputation may start before its gradient
    arrives, which is the gain for frozen models, as they have no B_w. 1F1B is among the candidates,
    so the result is never slower. Without B_w (in evaluation) the order is that of 1F1B.
    """

    name = "zero_bubble"
    splits_backward = True
    searches_policy = True

    def listed(self, step: Any) -> Any:
        return step.run(Rules()) if step.forward_only else _best(step).schedule

    def tuned(self, step: Any) -> tuple[Policy | None, float]:
        rounds = min(TUNING_ROUNDS, TUNED_TASKS // max(1, step.num_tasks))
        schedule, policy = _best(step, rounds if step.plan.profile else 0)
        return policy, schedule.makespan


class _PolicySchedule(NamedTuple):
    """Schedule with its program's time, and the policy that made it (None for 1F1B itself)."""

    schedule: Any
    policy: Policy | None


def _makespan(result: _PolicySchedule) -> float:
    return result.schedule.makespan


def _best(step: Any, rounds: int = 0) -> _PolicySchedule:
    """Return the best schedule of the policies, after ``rounds`` rounds of local search if the plan
    has no policy."""
    plan = step.plan
    baseline = step.timed(step.run(Rules()))
    limits = plan.activation_limits or step.equal_limits(baseline)
    shared = any(len(plan.rank_stages(rank)) > 1 for rank in range(plan.num_ranks))
    recompute = any(stage.recompute for stage in plan.stages)
    tried = policies(shared, recompute) if plan.policy is None else (plan.policy,)
    schedules, stuck = [], None
    for policy in tried:
        try:
            schedules.append(_with_policy(step, policy, limits))
        except NoPlanError as error:  # stages of one rank wait for each other
            stuck = error
    schedules.sort(key=_makespan)
    best = schedules[0] if schedules else None
    if rounds and plan.policy is None:
        for start in schedules[:TUNED_POLICIES]:
            tuned = _tuned(step, start, limits, rounds // TUNED_POLICIES)
            best = min(best or tuned, tuned, key=_makespan)
    if plan.activation_limits is None and (
        best is None or baseline.makespan <= best.schedule.makespan
    ):
        return _PolicySchedule(baseline, None)
    if best is None:
        assert stuck is not None  # all policies failed
        raise stuck
    return best


def _with_policy(step: Any, policy: Policy, limits: Sequence[float]) -> _PolicySchedule:
    rules = Rules(policy, split=True, early_recompute=True, byte_limits=tuple(limits))
    return _PolicySchedule(step.timed(step.run(rules)), policy)


def _tuned(
    step: Any, best: _PolicySchedule, limits: Sequence[float], rounds: int
) -> _PolicySchedule:
    """Search locally for better numbers of held microbatches: change them by one or two for some
    consecutive stages of a module, and keep changes that are not slower. Draws depend on the plan
    only, so that results are reproducible."""
    plan = step.plan
    chosen = best.policy
    assert chosen is not None
    bound = step.lower_bound(limits)
    most, draws = plan.num_microbatches, random.Random(0)
    ahead = [
        [most if chosen.beyond_depth else min(most, plan.warm_up[s.id]) for s in stages]
        for stages in (plan.replicas(node.name)[0] for node in plan.graph.nodes)
    ]
    for _ in range(rounds):
        if best.schedule.makespan <= bound * CLOSE:
            break
        held = [list(module) for module in ahead]
        module = draws.choice(held)
        first = draws.randrange(len(module))
        last = draws.randint(first, len(module) - 1) if draws.random() < 0.5 else first
        change = draws.choice((-2, -1, 1, 2))
        for index in range(first, last + 1):
            module[index] = min(most, max(1, module[index] + change))
        policy = replace(chosen, ahead=tuple(map(tuple, held)))
        try:
            tried = _with_policy(step, policy, limits)
        except NoPlanError:
            continue
        if tried.schedule.makespan <= best.schedule.makespan:
            best, ahead = tried, held
    return best
