"""Detection of plan drift: measured costs that differ from the plan's profile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raymm.costs.profile_files import save_table
from raymm.data import MicrobatchMeta
from raymm.errors import PlanError, RunFileError
from raymm.monitor.observed_run import WARM_UP_STEPS
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.plan_drift import Drift, PlanDrift

FILE = "measured_profile.json"
# Excess of the busiest rank's share of all compute over its planned share, and the number of
# consecutive steps, after which planning again is recommended.
EXCESS = 0.25
STEPS = 20


class DriftObserver:
    """Compares steps with the plan's profile, if there is one, and reports drift once per run."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._drift = None if plan.profile is None else PlanDrift(plan)
        self._losses = plan.graph.losses
        self._folder, self._say = folder, say
        self._seen, self._above, self._said = 0, 0, False

    def after_step(
        self, step: int, meta: Sequence[MicrobatchMeta], timeline: Timeline
    ) -> dict[str, Any]:
        """Return the step's entry ``plan_drift`` for ``metrics.jsonl``: the busiest ``rank``, and
        its ``measured`` and ``expected`` shares of all compute. Empty without a profile."""
        self._seen += 1
        if self._drift is None or self._seen <= WARM_UP_STEPS:
            return {}
        drift = self._drift.observe(timeline)
        if drift is None:
            return {}
        self._above = self._above + 1 if drift.excess > EXCESS else 0
        if self._above >= STEPS and not self._said:
            self._said = True
            self._report(step, drift, meta, self._drift)
        return {"plan_drift": {
            "rank": drift.rank, "measured": round(drift.measured, 4),
            "expected": round(drift.expected, 4),
        }}  # fmt: skip

    def _report(
        self, step: int, drift: Drift, meta: Sequence[MicrobatchMeta], expected: PlanDrift
    ) -> None:
        text = (
            f"step {step:>5}  plan drift: rank {drift.rank} does {drift.measured:.0%} of the "
            f"compute instead of the planned {drift.expected:.0%}; its longest stage is "
            f"{drift.stage}"
        )
        try:
            date = datetime.now(UTC).isoformat("T", "seconds")
            table = expected.profile(_samples(meta, self._losses), date)
        except PlanError as error:
            self._say(f"{text}; measure with `raymm profile` and plan again ({error})")
            return
        try:
            file = save_table(table, self._folder / FILE)
        except RunFileError as error:
            self._say(f"{text}; {error}")
            return
        self._say(f"{text}; `raymm plan CONFIG --profile {file}` plans with measured costs")


def _samples(meta: Sequence[MicrobatchMeta], losses: frozenset[str]) -> dict[str, int]:
    """Return the median number of samples (of modules that compute a loss) or of items per
    microbatch, by module."""
    counts_of = {name: [microbatch.num_samples for microbatch in meta] for name in losses}
    for microbatch in meta:
        for name, items in microbatch.items.items():
            counts_of.setdefault(name, []).append(len(items))
    return {
        name: max(1, int(statistics.median(counts))) for name, counts in counts_of.items() if counts
    }
