"""Rebalancing: plans later steps of a run again with the measured costs of its modules.

A check simulates the next steps as currently planned and under trial plans. The simulator decides,
because relieving a slow replica may starve another module. A decision takes effect at the first
step that the loader has not requested. Replicas that split every microbatch by samples are relieved
by reordering its samples, others by its contents. If a resumed run has another number of replicas,
or distributes microbatches differently, the replicas' speed factors are reset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raymm.data import Decision, RebalanceConfig, RebalancedSampler
from raymm.data.sampling.group_sampler import Groups
from raymm.errors import RunFileError
from raymm.files.run_files import append, write_whole
from raymm.monitor.metrics import DECISIONS, read_metrics
from raymm.monitor.observed_run import WARM_UP_STEPS, ObservedRun
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


class DecisionLog:
    """Append-only log. A row is on disk before its decision takes effect.

    Rows: ``{"step": after which costs were checked, "sizes": digest, "decision": null or {"epoch",
    "step", "costs"}, ...}`` with the values that led to the decision.

    Args:
        path: the file. A line cut off by a crash is dropped.
        digest: digest of the samples' sizes. Rows with another digest are dropped.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest = path, digest
        rows = read_metrics(path) if path.is_file() else []
        self.rows = [row for row in rows if row.get("sizes") == digest]
        write_whole(path, _lines(self.rows))

    @property
    def last_step(self) -> int:
        """Last step after which costs were checked; 0 if none. All decisions up to it are made."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def decisions(self) -> list[Decision]:
        """Decisions in order."""
        rows = [row["decision"] for row in self.rows if row["decision"] is not None]
        return [Decision(row["epoch"], row["step"], row["costs"]) for row in rows]

    def add(self, row: dict[str, Any], decision: Decision | None) -> None:
        """Append a row. It is on disk when this returns. Raise a ``RunFileError`` if the row cannot
        be written, so the decision must not take effect."""
        row = {**row, "sizes": self._digest, "decision": decision and decision._asdict()}
        append(self._path, _lines([row]), durable=True)
        self.rows.append(row)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


TEXT = "text"
# Steps after which a measurement counts half: as a fraction of the steps between checks, and at
# least. Measurements before a drift thus count little at the second check after it.
HALF_LIFE, LEAST_HALF_LIFE = 0.25, 5.0
# Number of next steps that are simulated to compare plans.
AHEAD = 32


class Rebalancing:
    """Learns costs from every step, and plans later steps again if that is faster.

    Every ``config.every`` steps, costs are checked and the result is written to :data:`DECISIONS`
    before it takes effect. A resumed run repeats the decisions made before the interruption, and
    makes no new ones up to the last check.

    Args:
        sampler: sampler of the training data, which must not have yielded a step yet.
    """

    def __init__(
        self, config: RebalanceConfig, sampler: RebalancedSampler, plan: Plan, packed: bool,
        folder: Path, step: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        names = sampler.sizes.names
        (language_model,) = plan.graph.losses
        half_life = max(HALF_LIFE * config.every, LEAST_HALF_LIFE)
        self._config, self._sampler, self._packed, self._say = config, sampler, packed, say
        self._forecast = StepForecast(
            plan, {n: language_model if n == TEXT else n for n in names}, TEXT, half_life
        )
        columns = self._forecast.columns
        self._fit = CostFit(names, self._forecast.replicas, half_life, columns)
        self._log = DecisionLog(folder / DECISIONS, sampler.digest)
        self._first = step
        self._errors: list[float] = []
        sampler.follow(
            self._forecast.replicas, self._log.decisions,
            {column.name for column in columns if column.of > 1},
        )

    def after_step(
        self, step: int, state_after: Any, microbatches: int, complete: bool, timeline: Timeline
    ) -> dict[str, Any]:
        """Learn from a step, and check costs if due.

        Args:
            complete: True if no sample was skipped; incomplete steps are ignored.

        Returns:
            Entry ``costs`` for ``metrics.jsonl`` once costs are known: ``error``, the relative
            error of predicted microbatch seconds; ``efficiency`` and ``dist_ratio`` (per modality)
            of these seconds, predicted and measured; ``step_s``, seconds of the step without
            collectives, predicted and measured.
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

    def _learn(self, groups: Groups, microbatches: int, timeline: Timeline) -> dict[str, Any]:
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
        current = self._slowness(self._sampler.upcoming(AHEAD), costs)
        options = [costs]
        if costs.replicas:  # relieving a slow replica may cost more than it gains
            options.append(costs.even)
        forecasts = [
            (self._slowness(self._sampler.trial(option, AHEAD), costs), number)
            for number, option in enumerate(options)
        ]
        best, number = min(forecasts)
        gain = current / best - 1 if best > 0 else 0.0
        error = float(np.mean(self._errors))
        self._errors.clear()
        decision = None
        if gain > self._config.gain:
            decision = Decision(*self._sampler.place, options[number].to_dict())
        self._log.add({"step": step, "gain": round(gain, 5), "error": round(error, 5)}, decision)
        if decision is not None:
            self._sampler.adopt(options[number])
            self._say(_line(step, decision, gain, error, options[number]))

    def _slowness(self, steps: Sequence[Groups], costs: MeasuredCosts) -> float:
        """Return the seconds of steps over their seconds of work on replicas of equal speed."""
        columns = self._forecast.columns
        total, work = 0.0, 0.0
        for groups in steps:
            units = group_units(self._sampler.sizes, groups, self._packed, columns)
            total += self._seconds(groups, costs.column_seconds(columns, *units))
            work += float(costs.even.column_seconds(columns, *units).sum())
        return total / work if work > 0 else 0.0

    def _seconds(self, groups: Groups, seconds: np.ndarray) -> float:
        """Return the simulated seconds of a step from the seconds of its microbatches by column."""
        samples = self._forecast.samples(self._sampler.sizes, groups)
        return self._forecast.timeline(seconds, samples).makespan


def rebalancing(run: ObservedRun, plan: Plan) -> Rebalancing | None:
    """Return the rebalancing that ``data.batching.rebalance`` configures, or None."""
    sampler = run.training.sampler
    if not isinstance(sampler, RebalancedSampler):
        return None
    return Rebalancing(
        run.data.batching.rebalance, sampler, plan, run.model.packing, run.folder,
        run.parallel.steps_taken, run.say,
    )


def _line(step: int, decision: Decision, gain: float, error: float, costs: MeasuredCosts) -> str:
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
