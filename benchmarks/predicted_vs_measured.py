"""Claim: the simulator predicts the steps of the runtime.

Run with `python -m benchmarks.predicted_vs_measured --json`.

First part: pipelines with the stage times of Cornstarch's tables (scaled down) on raymm's own Ray
actors, gloo channels and executor, with stages that sleep. A step's time is predicted from the
sleep times, plus the overheads of instructions and messages, measured once beforehand on the same
actors in other programs. Key ``max_relative_error``; with the sleep times and the message latency
alone, ``max_relative_error_without_overheads``.

Frozen-aware and frozen-unaware partitions alternate: ``aware_speedup`` has, per row, the ratio of
their step times with the partitions of the paper's table next to the paper's figure, and the ratio
for raymm's own two planners on the layers that the table implies.

Second part: a small vision-language model with real compute on two ranks, predicted from raymm's
measured profile (key ``real_model_relative_error``), and from the durations of each step's own
operations (``real_model_schedule_error``), which isolates the error of the simulator.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import real_model
from benchmarks.devices.sleeping_stages import Overheads, SleepingPipeline, op_seconds_measured
from benchmarks.shared.common import console, emit, local_ray, machine, parser
from benchmarks.shared.paper_rows import ROWS, PaperRow, own_plan, scale_of, table_plan
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import Program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs

# Milliseconds of 1F + 1B of the slowest stage after scaling the paper's rows.
BOTTLENECK_MS = 50.0
QUICK_ROWS = ("VLM-S", "MMM")
PICTURE_ROW, PICTURE_RUN = "VLM-L", "aware zero_bubble trained"
# Microbatches of runs that are not compared with the paper's.
FEW_MICROBATCHES = 12


@dataclass
class Run:
    """Pipeline of a row, its prediction and its steps.

    Attributes:
        name: e.g. ``"unaware 1f1b"``; with ``own`` for raymm's own partition, else the table's.
        without_overheads: predicted seconds without the overheads of instructions.
        load: load average of the machine after the last step (sleeping ranks add little).
    """

    name: str
    plan: Plan
    program: Program
    expected: Timeline
    without_overheads: float
    timelines: list[Timeline] = field(default_factory=list)
    load: float = 0.0

    @classmethod
    def of(cls, name: str, plan: Plan, overheads: Overheads) -> "Run":
        """Lower a plan and predict its step."""
        program = full_program(plan)
        nominal = op_seconds(plan)
        bare = simulate(program, nominal, overheads.message, posted=plan.posted_receives).makespan
        costs = overheads.added_to(nominal, program)
        expected = simulate(program, costs, overheads.latency, posted=plan.posted_receives)
        return cls(name, plan, program, expected, bare)

    @property
    def measured(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(timeline.makespan for timeline in self.timelines)

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to the measurement."""
        return self.expected.makespan / self.measured - 1

    @property
    def error_without_overheads(self) -> float:
        """Return the error of the prediction from sleep times and message latency alone."""
        return self.without_overheads / self.measured - 1

    def worst_op(self) -> float:
        """Return the largest difference in seconds between an op's median and its sleep time."""
        nominal = op_seconds(self.plan)
        return max(abs(s - nominal[k]) for k, s in op_seconds_measured(self.timelines).items())

    def stages(self) -> dict[str, int]:
        """Return the number of stages per module."""
        names = [node.name for node in self.plan.graph.nodes]
        return {name: len(self.plan.module_stages(name)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        spans = sorted(timeline.makespan for timeline in self.timelines)
        return {
            "run": self.name,
            "schedule": self.plan.schedule,
            "stages": self.stages(),
            "microbatches": self.plan.num_microbatches,
            "predicted_ms": round(self.expected.makespan * 1e3, 2),
            "without_overheads_ms": round(self.without_overheads * 1e3, 2),
            "measured_ms": round(self.measured * 1e3, 2),
            "steps_ms": [round(s * 1e3, 2) for s in spans],
            "error": round(self.error, 4),
            "error_without_overheads": round(self.error_without_overheads, 4),
            "worst_op_ms": round(self.worst_op() * 1e3, 3),
            "load_average_1min": round(self.load, 2),
        }


def plans_of(row: PaperRow, bottleneck_ms: float) -> dict[str, Plan]:
    """Return all executed pipelines of a row by name. Compared pipelines have one scale."""
    scale = scale_of(row, bottleneck_ms)
    plans = {
        "aware 1f1b": table_plan(row, scale, True, "1f1b"),
        "unaware 1f1b": table_plan(row, scale, False, "1f1b"),
        "own aware 1f1b": own_plan(row, scale, True),
        "own unaware 1f1b": own_plan(row, scale, False),
    }
    few = {"schedule": "zero_bubble", "microbatches": FEW_MICROBATCHES}
    plans["aware zero_bubble"] = table_plan(row, scale, True, **few)
    plans["aware zero_bubble recompute"] = table_plan(row, scale, True, recompute=True, **few)
    trained = {"aware": True, "trainable": True, **few}
    slowest = _bottleneck(table_plan(row, scale, **trained))
    plans["aware zero_bubble trained"] = table_plan(
        row, scale * bottleneck_ms / 1e3 / slowest, **trained
    )
    if row.table_9 is not None:
        for name, aware, counts in zip(
            ("aware", "unaware"), (True, False), row.table_9, strict=True
        ):
            if counts != row.variant(aware)[1]:
                plans[f"{name} 1f1b, Table 9"] = table_plan(row, scale, aware, "1f1b", counts)
    return plans


def _bottleneck(plan: Plan) -> float:
    costs = stage_costs(plan).values()
    return max(c.forward + c.backward_input + c.backward_weight for c in costs)


def measure(pipeline: SleepingPipeline, runs: list[Run], steps: int) -> None:
    """Run steps of all pipelines alternately, after one uncounted step each."""
    for turn in range(steps + 1):
        # Start with another run each turn, so that none always follows the same one.
        shift = turn % len(runs)
        for run in runs[shift:] + runs[:shift]:
            found = pipeline.run(run.plan, run.program, 1)
            if turn:
                run.timelines += found
    for run in runs:
        run.load = os.getloadavg()[0]


def speedups(row: PaperRow, runs: dict[str, Run]) -> dict[str, Any]:
    """Return aware over unaware: the paper's figure, the table's partitions, raymm's own.

    Both sides have the same number of ranks, except for those of Table 9, which are per rank.
    """

    def ratio(aware: str, unaware: str) -> dict[str, float]:
        one, other = runs[aware], runs[unaware]
        ranks = other.plan.num_ranks / one.plan.num_ranks
        return {
            "measured": round(other.measured / one.measured * ranks, 3),
            "predicted": round(other.expected.makespan / one.expected.makespan * ranks, 3),
        }

    result: dict[str, Any] = {
        "paper": round(row.paper_speedup, 3),
        "table_partition": ratio("aware 1f1b", "unaware 1f1b"),
        "own_partition": ratio("own aware 1f1b", "own unaware 1f1b"),
        "stages": {"aware": row.aware, "unaware": row.unaware},
        "own_stages": {
            name: tuple(runs[f"own {name} 1f1b"].stages().values()) for name in ("aware", "unaware")
        },
    }
    if row.table_9 is not None:
        names = [
            full if (full := f"{name} 1f1b, Table 9") in runs else f"{name} 1f1b"
            for name in ("aware", "unaware")
        ]
        result["table_9_per_rank"] = ratio(*names)
        result["table_9_stages"] = {"aware": row.table_9[0], "unaware": row.table_9[1]}
    return result


def run_rows(
    pipeline: SleepingPipeline, overheads: Overheads, options: argparse.Namespace
) -> list[tuple[PaperRow, dict[str, Run]]]:
    """Run the first part."""
    out = console()
    found = []
    for row in options.rows:
        runs = {
            name: Run.of(name, plan, overheads)
            for name, plan in plans_of(row, options.bottleneck_ms).items()
        }
        measure(pipeline, list(runs.values()), options.steps)
        found.append((row, runs))
        worst = max(runs.values(), key=lambda run: abs(run.error))
        speedup = runs["unaware 1f1b"].measured / runs["aware 1f1b"].measured
        out.print(f"[dim]{row.name}: worst error {worst.error:+.1%} ({worst.name}; "
                  f"load {worst.load:.1f}), "
                  f"aware speedup {speedup:.2f}, paper {row.paper_speedup:.2f}")
    return found


def error_table(found: list[tuple[PaperRow, dict[str, Run]]]) -> Table:
    """Return a table with one line per run."""
    result = Table(title="a step of sleeping stages, ms (median)")
    for heading in ("row", "run", "stages", "microbatches", "predicted", "measured", "error",
                    "error without overheads"):
        result.add_column(heading, justify="right")
    for row, runs in found:
        for run in runs.values():
            result.add_row(
                row.name, run.name, "+".join(map(str, run.stages().values())),
                str(run.plan.num_microbatches), f"{run.expected.makespan * 1e3:.1f}",
                f"{run.measured * 1e3:.1f}", f"{run.error:+.1%}",
                f"{run.error_without_overheads:+.1%}",
            )
    return result


def speedup_table(aware: dict[str, Any]) -> Table:
    """Return a table with one line per row."""
    result = Table(title="frozen-aware over frozen-unaware, 1F1B, measured")
    for heading in ("row", "paper", "table's partitions", "stages", "raymm's planners", "stages",
                    "Table 9's counts, per rank"):
        result.add_column(heading, justify="right")
    for name, one in aware.items():
        nine = one.get("table_9_per_rank")
        result.add_row(
            name, f"{one['paper']:.2f}", f"{one['table_partition']['measured']:.2f}",
            _pairs(one["stages"]), f"{one['own_partition']['measured']:.2f}",
            _pairs(one["own_stages"]), f"{nine['measured']:.2f}" if nine else "",
        )
    return result


def _pairs(stages: dict[str, tuple[int, int]]) -> str:
    return " / ".join("+".join(map(str, pair)) for pair in stages.values())


def real_table(rows: list[real_model.RealRow]) -> Table:
    """Return a table with one line per case and schedule."""
    result = Table(title="a step of a real model on two ranks, ms (median)")
    for heading in ("case", "schedule", "predicted", "measured", "error", "schedule's error"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(row.case, row.schedule, f"{row.predicted * 1e3:.0f}",
                       f"{row.measured * 1e3:.0f}", f"{row.error:+.1%}",
                       f"{row.schedule_error:+.1%}")
    return result


def run_real(latency: float, steps: int) -> list[real_model.RealRow]:
    """Run the second part."""
    out = console()
    rows = []
    for case in real_model.CASES:
        rows += real_model.run_case(case, latency, steps)
    for row in rows:
        for op, (profiled, measured) in row.ops.items():
            out.print(f"[dim]{row.case} {row.schedule} {op}: profiled {profiled * 1e3:.1f} ms, "
                      f"measured {measured * 1e3:.1f} ms")
    return rows


def real_dict(row: real_model.RealRow) -> dict[str, Any]:
    """Return a row of the second part, ready for JSON."""
    return {
        "case": row.case,
        "schedule": row.schedule,
        "predicted_ms": round(row.predicted * 1e3, 1),
        "measured_ms": round(row.measured * 1e3, 1),
        "steps_ms": [round(s * 1e3, 1) for s in row.steps],
        "error": round(row.error, 4),
        "schedule_errors": [round(error, 4) for error in row.schedule_errors],
        "ops_ms": {k: [round(a * 1e3, 2), round(b * 1e3, 2)] for k, (a, b) in row.ops.items()},
    }


def draw(found: list[tuple[PaperRow, dict[str, Run]]], path: Path) -> None:
    """Draw the predicted step above the measured step nearest to the median of one run."""
    from raymm.draw import draw_timelines

    by_name = {row.name: runs for row, runs in found}
    name = PICTURE_ROW if PICTURE_ROW in by_name else next(iter(by_name))
    run = by_name[name][PICTURE_RUN]
    nearest = min(run.timelines, key=lambda t: abs(t.makespan - run.measured))
    draw_timelines(
        [("predicted", run.expected), ("measured", nearest)], path,
        title=f"{name}, {PICTURE_RUN.replace('_', ' ')}: one step of sleeping stages",
    )


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    options = parser(__doc__.splitlines()[0])
    names = [row.name for row in ROWS]
    options.add_argument("--rows", nargs="+", default=names, metavar="ROW",
                         choices=names, help=f"rows of the tables: {', '.join(names)}")
    options.add_argument("--quick", action="store_true",
                         help=f"rows {', '.join(QUICK_ROWS)} and no real model")
    options.add_argument("--no-real", action="store_true", help="leave out the real model")
    options.add_argument("--steps", type=int, default=3, help="measured steps per run")
    options.add_argument("--bottleneck-ms", type=float, default=BOTTLENECK_MS,
                         help="1F + 1B of the slowest frozen-aware stage, scaled")
    options.add_argument("--picture", type=Path, help="draw one run's timelines (.png, .svg)")
    chosen = options.parse_args()
    if chosen.steps < 1 or not chosen.bottleneck_ms > 0:
        options.error(f"--steps {chosen.steps}, --bottleneck-ms {chosen.bottleneck_ms}: "
                      "must be at least 1 and above 0")
    if chosen.quick:
        chosen.rows, chosen.no_real = list(QUICK_ROWS), True
    chosen.rows = [row for row in ROWS if row.name in chosen.rows]
    return chosen


def main() -> int:
    """Measure, print the tables, then the result line."""
    options = arguments()
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    described = machine()
    ranks = max(
        plan.num_ranks for row in options.rows for plan in plans_of(row, 1.0).values()
    )
    with local_ray(num_cpus=ranks):
        pipeline = SleepingPipeline(ranks)
        try:
            overheads = pipeline.overheads()
            found = run_rows(pipeline, overheads, options)
            large = pipeline.overheads(real_model.message_floats()).message
        finally:
            pipeline.close()
        real = [] if options.no_real else run_real(large, options.steps)
    runs = [run for _, of_row in found for run in of_row.values()]
    aware = {row.name: speedups(row, of_row) for row, of_row in found}
    result = {
        "benchmark": "predicted_vs_measured",
        "max_relative_error": round(max(abs(run.error) for run in runs), 4),
        "median_relative_error": round(statistics.median(abs(run.error) for run in runs), 4),
        "max_relative_error_without_overheads": round(
            max(abs(run.error_without_overheads) for run in runs), 4
        ),
        "real_model_relative_error": round(max(abs(r.error) for r in real), 4) if real else None,
        "real_model_schedule_error": (
            round(max(abs(r.schedule_error) for r in real), 4) if real else None
        ),
        "aware_speedup": aware,
        "rows": [{"row": row.name, **run.to_dict()} for row, rs in found for run in rs.values()],
        "real_model": [real_dict(row) for row in real],
        "overheads_ms": {
            "message": round(overheads.message * 1e3, 3),
            "large_message": round(large * 1e3, 3),
            **{op.value: round(s * 1e3, 3) for op, s in overheads.per_op.items()},
        },
        "steps": options.steps,
        "bottleneck_ms": options.bottleneck_ms,
        "load_average_1min_after": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": described,
    }
    out = console()
    out.print(error_table(found), speedup_table(aware))
    if real:
        out.print(real_table(real))
    out.print({key: value for key, value in result.items() if key.endswith(("error", "overheads"))})
    if options.picture:
        draw(found, options.picture)
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
