"""Report of a run: loss curve, schedule, trace."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.config.build import write_json
from raymm.data import MicrobatchMeta
from raymm.draw import draw_loss, draw_plan, draw_timelines
from raymm.planning.plan import rank_names
from raymm.scheduler.graph.module_graph import posted_receives
from raymm.scheduler.plan.microbatch_groups import group_spans
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op, Program
from raymm.scheduler.program.timeline import Timeline, chrome_trace
from raymm.scheduler.schedule.plan_drift import device_costs
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import group_seconds

# Number of steps whose measured costs predict the next step's timeline.
COST_STEPS = 8


class RunReport:
    """Collects timelines during a run and draws the report at its end.

    Args:
        program: returns the program of a step from the metadata of its microbatches and the name of
            its schedule.
    """

    def __init__(
        self, folder: Path, plan: Plan,
        program: Callable[[Sequence[MicrobatchMeta], str], Program],
        device: str = "cpu",
    ) -> None:
        self._folder, self._program = folder, program
        self._plan = plan
        self._posted = posted_receives(in_order=device != "cpu")
        self._recent: deque[tuple[int, Sequence[MicrobatchMeta], Timeline, str]] = deque(
            maxlen=COST_STEPS + 1
        )

    def add(
        self, step: int, meta: Sequence[MicrobatchMeta], timeline: Timeline, schedule: str
    ) -> None:
        """Add a step. The report shows the last steps."""
        self._recent.append((step, meta, timeline, schedule))

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Write plan, pictures and trace. Return the files by description."""
        folder = self._folder
        files = {"plan": folder / "plan.json", "plan picture": folder / "plan.png"}
        write_json(files["plan"], self._plan.to_dict())
        draw_plan(self._plan, files["plan picture"])
        files["metrics"] = folder / "metrics.jsonl"
        if any("loss" in row for row in history):
            files["loss curve"] = folder / "loss.png"
            draw_loss(history, files["loss curve"])
        if self._recent:
            step, meta, measured, schedule = self._recent[-1]
            costs = self._predicting_costs()
            predicted = simulate(
                self._program(meta, schedule), costs, posted=self._posted,
                group_seconds=group_seconds(self._plan, costs), spans=group_spans(self._plan),
            )
            names = rank_names(self._plan)
            timelines = [("predicted", predicted), ("measured", measured)]
            files["schedule"] = folder / "schedule.png"
            draw_timelines(timelines, files["schedule"], rank_names=names, title=f"step {step}")
            files["trace"] = folder / "trace.json"
            write_json(files["trace"], chrome_trace(timelines, names))
        return files

    def _predicting_costs(self) -> dict[tuple[StageId, Op], float]:
        """Return median costs of the steps before the shown one, so that it is predicted, not
        fitted."""
        earlier = list(self._recent)[:-1] or list(self._recent)
        samples: dict[tuple[StageId, Op], list[float]] = {}
        for _, meta, timeline, schedule in earlier:
            program = self._program(meta, schedule)
            for key, seconds in device_costs(self._plan, program, timeline).items():
                samples.setdefault(key, []).append(seconds)
        return {key: statistics.median(values) for key, values in samples.items()}
