"""How long steps will take, from what modules were measured to cost: the simulator's answer.

Costs of modules come from :class:`raymm.scheduler.minibatch.cost_fit.CostFit`; how a module's
seconds are spread over its stages and operations is averaged here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate

# Programs kept, one per pattern of which microbatches have which modality.
PROGRAMS = 64


class StepForecast:
    """Predicts timelines of steps under a plan.

    Args:
        plan: what runs where.
        modules: modality, as of ``SampleSizes``, -> module of the plan.
        text: the modality that every microbatch has.
        half_life: steps after which what was measured counts half.
    """

    def __init__(
        self, plan: Plan, modules: Mapping[str, str], text: str, half_life: float = 50.0
    ) -> None:
        self.plan = plan
        self.modules = dict(modules)
        self._text = text
        self._keep = 0.5 ** (1.0 / half_life)
        self._spent: dict[tuple[str, int, Op], float] = defaultdict(float)
        self._programs: OrderedDict[tuple, Program] = OrderedDict()

    @property
    def replicas(self) -> dict[str, int]:
        """By modality, in how many copies its module is."""
        return {name: len(self.plan.replicas(m)) for name, m in self.modules.items()}

    def observe(self, timeline: Timeline, microbatches: int) -> np.ndarray:
        """Note a measured step; (microbatches, M) seconds of every module."""
        column = {module: number for number, module in enumerate(self.modules.values())}
        result = np.zeros((microbatches, len(column)))
        for key in self._spent:
            self._spent[key] *= self._keep
        for span in timeline.compute():
            stage = self.plan.by_id[span.stage]
            if stage.module in column and 0 <= span.microbatch < microbatches:
                seconds = span.device_seconds
                result[span.microbatch, column[stage.module]] += seconds
                self._spent[stage.module, stage.index, Op(span.op)] += seconds
        return result

    def timeline(self, seconds: np.ndarray) -> Timeline:
        """A step whose microbatches take so long.

        Args:
            seconds: (microbatches, M), 0 where a microbatch lacks a modality.
        """
        totals: dict[str, float] = defaultdict(float)
        for (module, *_), spent in self._spent.items():
            totals[module] += spent
        costs = {}
        for number, module in enumerate(self.modules.values()):
            replicas = self.plan.replicas(module)
            for (of, index, op), spent in self._spent.items():
                if of == module and totals[module]:
                    for microbatch, whole in enumerate(seconds[:, number].tolist()):
                        stage = replicas[microbatch % len(replicas)][index]
                        costs[stage.id, op, microbatch] = whole * spent / totals[module]
        names = list(self.modules)
        present = [
            tuple(sorted(n for n, s in zip(names, row, strict=True) if s > 0 and n != self._text))
            for row in seconds.tolist()
        ]
        return simulate(self._program(present), {}, microbatch_costs=costs)

    def _program(self, present: Sequence[tuple[str, ...]]) -> Program:
        key = tuple(present)
        if key not in self._programs:
            self._programs[key] = lower(self.plan, list(map(list, present)))
            if len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]
