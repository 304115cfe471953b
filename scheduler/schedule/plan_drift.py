"""Comparison of measured stage times with a plan's profile, and the corrected profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from raymm.errors import PlanError
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Instruction, Op, Program, group_end
from raymm.scheduler.program.timeline import Span, Timeline, spread
from raymm.scheduler.schedule.stage_costs import group_seconds, op_seconds

# Number of steps after which the weight of a measurement is halved.
HALF_LIFE_STEPS = 10.0


@dataclass(frozen=True)
class Drift:
    """The busiest rank, and its planned share of the work.

    Attributes:
        stage: the stage of the rank that takes longest.
        measured, expected: the rank's share of the compute of all ranks, measured and planned.
    """

    rank: int
    stage: StageId
    measured: float
    expected: float

    @property
    def excess(self) -> float:
        """Relative excess of the measured share over the expected one; 0 if as planned."""
        return self.measured / self.expected - 1 if self.expected else float("inf")


class PlanDrift:
    """Comparison of measured steps with a plan's profile; raises ``PlanError`` if it has none."""

    def __init__(self, plan: Plan) -> None:
        if plan.profile is None:
            raise PlanError("the plan has no profile to compare measured steps with")
        self._plan, self._profile = plan, plan.profile
        self._expected_of, self._on_quota = op_seconds(plan), group_seconds(plan)
        self._keep = 0.5 ** (1.0 / HALF_LIFE_STEPS)
        self._measured: dict[StageId, float] = defaultdict(float)
        self._expected: dict[StageId, float] = defaultdict(float)

    def observe(self, timeline: Timeline) -> Drift | None:
        """Add a step, and return the drift over all steps so far, weighted towards recent ones.
        Return None if the profile expects zero time of every rank that works."""
        for sums in (self._measured, self._expected):
            for stage in sums:
                sums[stage] *= self._keep
        for span in timeline.compute():
            measured, due = self._seconds(span)
            self._measured[span.stage] += measured
            # Work that a step skips, such as an encoder without items, is not expected either.
            self._expected[span.stage] += due
        measured, expected = (self._by_rank(s) for s in (self._measured, self._expected))
        if not sum(measured.values()) or not sum(expected.values()):
            return None
        rank = max(measured, key=lambda r: measured[r])
        return Drift(
            rank,
            max((s.id for s in self._plan.rank_stages(rank)), key=lambda n: self._measured[n]),
            measured[rank] / sum(measured.values()),
            expected[rank] / sum(expected.values()),
        )

    def _seconds(self, span: Span) -> tuple[float, float]:
        """Return measured and expected seconds; on a quota, the expected ones come from
        surfaces."""
        stage, op = self._plan.by_id[span.stage], Op(span.op)
        if self._on_quota is None or span.quota == 1.0:
            return span.device_seconds, self._expected_of[span.stage, op]
        quotas_there = next(
            (quotas for quotas in self._plan.quota_sets(stage.rank)
             if quotas.get(stage.module) == stage.quota),
            {stage.module: span.quota},
        )  # fmt: skip
        return span.end - span.start, self._on_quota(Instruction(op, stage.id), quotas_there)

    def _by_rank(self, sums: Mapping[StageId, float]) -> dict[int, float]:
        ratios: dict[int, float] = defaultdict(float)
        for stage, seconds in sums.items():
            ratios[self._plan.by_id[stage].rank] += seconds
        return ratios

    def profile(self, samples: Mapping[str, int], date: str = "") -> ProfileTable:
        """Return the plan's profile with the seconds of every stage's layers scaled by measured
        over expected time, for planning again. ``samples`` has sequences or items per microbatch,
        by module; ``date`` is ISO 8601. Raise ``PlanError`` if the plan's profile has no token
        counts."""
        profile = self._profile
        if lacking := sorted(set(profile.modules) - set(profile.tokens)):
            raise PlanError(f"the plan's profile has no tokens of {lacking}")
        modules = {}
        for name, layers in profile.modules.items():
            scaled = list(layers)
            for stage in self._plan.replicas(name)[0]:
                ratio = self._ratio(name, stage.index)
                for layer in range(*stage.layers):
                    cost = layers[layer]
                    scaled[layer] = replace(
                        cost, forward=cost.forward * ratio,
                        backward_input=cost.backward_input * ratio,
                        backward_weight=cost.backward_weight * ratio,
                    )
            modules[name] = (
                Measurement(int(profile.tokens[name]), samples.get(name, 1), tuple(scaled)),
            )
        return ProfileTable(
            modules, {name: int(profile.tokens[name]) for name in modules}, profile.device,
            profile.dtype, dict(profile.versions), date,
        )

    def _ratio(self, module: str, index: int) -> float:
        """Return measured over expected time of a stage, or of all stages if it has none."""
        names = [replica[index].id for replica in self._plan.replicas(module)]
        measured = sum(self._measured[name] for name in names)
        expected = sum(self._expected[name] for name in names)
        if measured and expected:
            return measured / expected
        return sum(self._measured.values()) / sum(self._expected.values())


def device_costs(
    plan: Plan, program: Program, timeline: Timeline
) -> dict[tuple[StageId, Op], float]:
    """Return the median seconds per (stage, compute op) on a whole device, from a measured step,
    for use in the simulator. Times on quotas are converted by surfaces, as in the simulator;
    without surfaces, they are scaled by the quota."""
    timeline = spread(timeline, group_spans(plan))
    on_quota = group_seconds(plan)
    if on_quota is None:
        return timeline.costs()
    nominal, in_groups = op_seconds(plan), _quotas_beside(program)
    samples: dict[tuple[StageId, Op], list[float]] = defaultdict(list)
    for span in timeline.compute():
        op = Op(span.op)
        quotas = in_groups.get((span.rank, span.stage, span.microbatch, op))
        seconds = span.end - span.start
        if quotas is not None:
            slowed = on_quota(Instruction(op, span.stage, span.microbatch), quotas)
            seconds *= nominal[span.stage, op] / slowed if slowed else span.quota
        samples[span.stage, op].append(seconds)
    return {key: median(values) for key, values in samples.items()}


def _quotas_beside(program: Program) -> dict[tuple[int, StageId, int, Op], dict[str, float]]:
    """Return the quotas of the modules of its group, for each instruction in a concurrent group."""
    result = {}
    for rank, instructions in enumerate(program.ranks):
        start = 0
        while start < len(instructions):
            end = group_end(instructions, start)
            if instructions[start].group >= 0:
                group = instructions[start:end]
                quotas = {task.stage.module: task.quota for task in group}
                result |= {(rank, t.stage, t.microbatch, t.op): quotas for t in group}
            start = end
    return result
