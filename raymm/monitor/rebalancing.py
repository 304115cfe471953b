"""Steps planned anew, while a run goes on, with what its modules were measured to cost.

At a look the steps to come are simulated as they are planned and as trial plans would have them:
the simulator decides, since what spares a slow replica may starve another module. A decision holds
from the first step that the loader has not asked for. Replicas that share every microbatch by
samples are spared by the order of its samples, others by what is in it. A resume with another
number of replicas, or with ones that share microbatches in another way, forgets their factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raymm.data import Decision, RebalanceConfig, RebalancedSampler
from raymm.data.sampling.group_sampler import Groups
from raymm.errors import RunFileError
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.monitor.decision_log import DecisionLog
from raymm.scheduler.minibatch.cost_fit import CostFit
from raymm.scheduler.minibatch.measured_costs import (
    MeasuredCosts,
    efficiency,
    group_units,
    of_modules,
)
from raymm.scheduler.minibatch.metrics import dist_ratio
from raymm.scheduler.minibatch.step_forecast import StepForecast
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.timeline import Timeline

FILE = "rebalancing.jsonl"
TEXT = "text"
# The first steps after every start, which allocate, compile and connect, say nothing of costs.
WARM_UP_STEPS = 2
# Steps after which what was measured counts half: relative to those between looks, and at least.
# So what was before a drift counts little at the second look after it.
HALF_LIFE, LEAST_HALF_LIFE = 0.25, 5.0
# Steps to come that are simulated to compare ways to plan them.
AHEAD = 32


class Rebalancing:
    """Learns costs from every step of a run, and plans the steps to come anew where that pays.

    Looks are made every so many steps. Each ends up in :data:`FILE` with what was decided, before
    that is acted on; a run that goes on repeats what was decided before it was interrupted, and
    decides nothing new up to the last look of that time.

    Args:
        config: when to look, and what must be gained.
        sampler: of the training data; must not have handed out a step yet.
        plan: of the run.
        packed: whether the language model's rows are packed.
        folder: of the run.
        step: steps that were taken.
        say: prints a line.
    """

    def __init__(
        self, config: RebalanceConfig, sampler: RebalancedSampler, plan: Plan, packed: bool,
        folder: Path, step: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        names = sampler.sizes.names
        half_life = max(HALF_LIFE * config.every, LEAST_HALF_LIFE)
        self._config, self._sampler, self._packed, self._say = config, sampler, packed, say
        self._forecast = StepForecast(
            plan, {n: LANGUAGE_MODEL if n == TEXT else n for n in names}, TEXT, half_life
        )
        columns = self._forecast.columns
        self._fit = CostFit(names, self._forecast.replicas, half_life, columns)
        self._log = DecisionLog(folder / FILE, sampler.digest)
        self._first = step
        self._errors: list[float] = []
        sampler.follow(
            self._forecast.replicas, self._log.decisions,
            {column.name for column in columns if column.of > 1},
        )

    def after_step(
        self, step: int, state_after: Any, microbatches: int, complete: bool, timeline: Timeline
    ) -> dict[str, Any]:
        """Learn from a step, and look if it is time to.

        Args:
            step: its number, from 1.
            state_after: the data position after it.
            microbatches: how many it had.
            complete: whether it had all its samples; one that lacks some teaches nothing.
            timeline: what was measured.

        Returns:
            For ``metrics.jsonl``, once costs are known, under ``costs``: ``error``, how far off
            they predicted the seconds of this step's microbatches; ``efficiency`` and
            ``dist_ratio`` (per modality) of these seconds, predicted and measured; ``step_s``,
            predicted and measured, the step's seconds without its collectives.
        """
        groups = self._sampler.groups_of(state_after)
        row: dict[str, Any] = {}
        if groups is not None and complete and step - self._first > WARM_UP_STEPS:
            row = self._learn(groups, microbatches, timeline)
        if step % self._config.every == 0 and step > self._log.last_step:
            try:
                self._look(step)
            except RunFileError as error:
                self._say(f"{error}. Microbatches stay unchanged until the next check")
        return {"costs": row} if row else {}

    def _learn(
        self, groups: Groups, microbatches: int, timeline: Timeline
    ) -> dict[str, Any]:
        seconds = self._forecast.observe(timeline, microbatches)
        columns = self._forecast.columns
        units, squares = group_units(self._sampler.sizes, groups, self._packed, columns)
        costs = self._fit.costs()
        row = {}
        if costs is not None:
            expected = costs.column_seconds(columns, units, squares)
            row = self._figures(groups, expected, seconds, timeline)
        error = self._fit.observe(units, squares, seconds)
        if error is not None:
            self._errors.append(error)
            row["error"] = round(error, 4)
        return row

    def _figures(
        self, groups: Groups, expected: np.ndarray, seconds: np.ndarray, timeline: Timeline
    ) -> dict[str, Any]:
        columns, sizes = self._forecast.columns, self._sampler.sizes
        predicted, measured = (of_modules(columns, values) for values in (expected, seconds))
        compute = timeline.compute()
        took = max(s.end for s in compute) - min(s.start for s in compute) if compute else 0.0

        def both(predicted: float, measured: float) -> dict[str, float]:
            return {"predicted": round(predicted, 4), "measured": round(measured, 4)}

        return {
            "efficiency": both(efficiency(predicted.values()), efficiency(measured.values())),
            "dist_ratio": {
                name: both(dist_ratio(predicted[name][None]), dist_ratio(measured[name][None]))
                for name in sizes.names
            },
            "step_s": both(self._seconds(groups, expected), took),
        }

    def _look(self, step: int) -> None:
        costs = self._fit.costs()
        if costs is None or TEXT not in costs.modules or not self._errors:
            self._log.add({"step": step, "gain": None, "error": None}, None)
            return
        now = self._slowness(self._sampler.upcoming(AHEAD), costs)
        options = [costs]
        if costs.replicas:  # what it takes to spare a slow copy may cost more than it brings
            options.append(costs.even)
        forecasts = [
            (self._slowness(self._sampler.trial(option, AHEAD), costs), number)
            for number, option in enumerate(options)
        ]
        best, number = min(forecasts)
        gain = now / best - 1 if best > 0 else 0.0
        error = float(np.mean(self._errors))
        self._errors.clear()
        decision = None
        if gain > self._config.gain:
            decision = Decision(*self._sampler.place, options[number].to_dict())
        self._log.add(
            {"step": step, "gain": round(gain, 5), "error": round(error, 5)}, decision
        )
        if decision is not None:
            self._sampler.adopt(options[number])
            self._say(_line(step, decision, gain, error, options[number]))

    def _slowness(self, steps: Sequence[Groups], costs: MeasuredCosts) -> float:
        """Seconds that steps take, over the seconds of work in them on copies of equal speed."""
        columns = self._forecast.columns
        whole, work = 0.0, 0.0
        for groups in steps:
            units = group_units(self._sampler.sizes, groups, self._packed, columns)
            whole += self._seconds(groups, costs.column_seconds(columns, *units))
            work += float(costs.even.column_seconds(columns, *units).sum())
        return whole / work if work > 0 else 0.0

    def _seconds(self, groups: Groups, seconds: np.ndarray) -> float:
        """Of a step whose microbatches take so long, by column."""
        samples = self._forecast.samples(self._sampler.sizes, groups)
        return self._forecast.timeline(seconds, samples).makespan


def rebalancing(
    data: Any, sampler: Any, plan: Plan, packed: bool, folder: Path, step: int,
    say: Callable[[str], None],
) -> Rebalancing | None:  # fmt: skip
    """What ``data.batching.rebalance`` asks for; None if nothing. Arguments as of
    :class:`Rebalancing`."""
    if not isinstance(sampler, RebalancedSampler):
        return None
    return Rebalancing(data.batching.rebalance, sampler, plan, packed, folder, step, say)


def _line(
    step: int, decision: Decision, gain: float, error: float, costs: MeasuredCosts
) -> str:
    replicas = "".join(
        f"; replicas of {name} take {', '.join(f'{factor:.2f}' for factor in factors)} of the "
        "mean time"
        for name, factors in costs.replicas.items()
    )
    return (
        f"step {step:>5}  rebalanced: from step {decision.step} of epoch {decision.epoch} on, "
        f"microbatches are planned by measured seconds, {gain:.1%} faster by prediction (the "
        f"costs were off by {error:.1%}){replicas}"
    )
