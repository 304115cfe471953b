"""Prediction of step times from measured module costs, by the simulator.

Costs of modules come from :class:`raymm.scheduler.minibatch.cost_fit.CostFit`. This module averages
how the seconds of a module are spread over its stages and operations.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import lcm

import numpy as np

from raymm.scheduler.minibatch.measured_costs import Column, group_units
from raymm.scheduler.minibatch.problem import SampleSizes
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.program.stage_samples import Samples, filled_samples
from raymm.scheduler.program.timeline import Timeline, spread
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate

# Number of cached programs, one per pattern of modalities over microbatches.
PROGRAMS = 64


class StepForecast:
    """Predictor of the timelines of steps under a plan.

    Args:
        modules: modality, as in ``SampleSizes``, -> module of the plan.
        text: modality that every microbatch has.
        half_life: steps after which the weight of a measurement is halved.

    Attributes:
        columns: columns of seconds: one per module, or one per replica if they split microbatches.
    """

    def __init__(
        self, plan: Plan, modules: Mapping[str, str], text: str, half_life: float = 50.0
    ) -> None:
        self.plan = plan
        self.modules = dict(modules)
        self.columns = tuple(
            Column(name, share, shares) for name, module in self.modules.items()
            for shares in [_shares(plan, module)] for share in range(shares)
        )
        self._text = text
        self._keep = 0.5 ** (1.0 / half_life)
        self._spent: dict[tuple[str, int, Op], float] = defaultdict(float)
        self._programs: OrderedDict[tuple, Program] = OrderedDict()

    @property
    def replicas(self) -> dict[str, int]:
        """Number of replicas of each module, by modality."""
        return {name: len(self.plan.replicas(m)) for name, m in self.modules.items()}

    def observe(self, timeline: Timeline, microbatches: int) -> np.ndarray:
        """Record a measured step, and return the (microbatches, C) seconds of every column."""
        number = {(self.modules[name], share): c for c, (name, share, _) in enumerate(self.columns)}
        result = np.zeros((microbatches, len(number)))
        for key in self._spent:
            self._spent[key] *= self._keep
        for span in spread(timeline, group_spans(self.plan)).compute():
            stage = self.plan.by_id[span.stage]
            share = stage.replica if stage.split == SAMPLES else 0
            column = number.get((stage.module, share))
            if column is not None and 0 <= span.microbatch < microbatches:
                seconds = span.device_seconds
                result[span.microbatch, column] += seconds
                self._spent[stage.module, stage.index, Op(span.op)] += seconds
        return result

    def samples(
        self, sizes: SampleSizes, groups: Sequence[Sequence[int]]
    ) -> tuple[Samples, ...]:
        """Return the parts of each microbatch that have data, by modality, for plans that split
        samples; empty for other plans. ``groups`` has the samples of each microbatch."""
        if not self.plan.splits_samples:
            return ()
        shares = lcm(*(column.of for column in self.columns))
        names = [name for name in self.modules if name != self._text]
        columns = [Column(name, share, shares) for name in names for share in range(shares)]
        units = group_units(sizes, groups, True, columns)[0] > 0
        return tuple(
            filled_samples(self.plan, shares, {
                self.modules[name]: tuple(accumulate(filled.tolist(), initial=0))
                for name, filled in zip(names, row, strict=True)
            })
            for row in units.reshape(len(groups), len(names), shares)
        )

    def timeline(self, seconds: np.ndarray, samples: Sequence[Samples] = ()) -> Timeline:
        """Return the predicted timeline of a step. ``seconds`` is (microbatches, C), 0 where a
        microbatch lacks a modality; ``samples`` are those of :meth:`samples`."""
        totals: dict[str, float] = defaultdict(float)
        for (module, *_), spent in self._spent.items():
            totals[module] += spent
        costs: dict[tuple[StageId, Op, int], float] = {}
        for number, (name, share, shares) in enumerate(self.columns):
            module = self.modules[name]
            replicas = self.plan.replicas(module)
            for (owner, index, op), spent in self._spent.items():
                if owner == module and totals[module]:
                    for microbatch, module_seconds in enumerate(seconds[:, number].tolist()):
                        replica = share if shares > 1 else microbatch % len(replicas)
                        stage = replicas[replica][index]
                        costs[stage.id, op, microbatch] = module_seconds * spent / totals[module]
        names = [column.name for column in self.columns]
        present = [
            tuple(sorted({
                n for n, s in zip(names, row, strict=True) if s > 0 and n != self._text
            }))
            for row in seconds.tolist()
        ]
        program = self._program(present, samples)
        return simulate(
            program, {}, microbatch_costs=costs, posted=self.plan.posted_receives,
            spans=group_spans(self.plan),
        )

    def _program(
        self, present: Sequence[tuple[str, ...]], samples: Sequence[Samples]
    ) -> Program:
        key = (tuple(present), tuple(samples))
        if key not in self._programs:
            self._programs[key] = lower(self.plan, list(map(list, present)), samples=samples)
            if len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]


def _shares(plan: Plan, module: str) -> int:
    """Return the number of replicas that split every microbatch by samples; 1 if none do."""
    replicas = plan.replicas(module)
    return len(replicas) if replicas[0][0].split == SAMPLES else 1
