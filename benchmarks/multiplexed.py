"""Claim: multiplexed plans run as fast as predicted, and faster than those of other systems.

Run with `python -m benchmarks.multiplexed --json`.

One actor per GPU; modules sleep for the time that the performance model predicts (scaling surface
and interference on their GPU), tiny tensors are sent and gradients are summed for real. Measured
time beyond the sleeps is the overhead of the runtime.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping as ByModule
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.baselines.mappings import distmm, megatron, spindle
from benchmarks.devices.emulated_gpu import SurfaceSeconds
from benchmarks.devices.emulation import ENTRY, emulate
from benchmarks.shared.common import console, emit, local_ray, machine, parser
from benchmarks.shared.multiplexed_models import SHAPES, Shape
from raymm.actors.rank.rank_resources import RankResources
from raymm.draw import draw_timelines
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.program.program import Instruction, Op
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.step_graph import full_step

SAMPLES, WIDTH = 16, 8


def plans(shape: Shape, problem: MappingProblem) -> dict[str, Mapping]:
    """Return raymm's mapping and the baselines'; Spindle's slices are whole layers."""
    return {
        "raymm": solve(problem), "megatron": megatron(problem), "distmm": distmm(problem),
        "spindle": spindle(problem, layers=shape.layers),
    }


def iteration_seconds(running: ParallelModel, count: int) -> list[float]:
    """Return seconds between the ends of training iterations, all submitted ahead."""
    step = running.prepare({ENTRY: torch.randn(SAMPLES, WIDTH)})
    under_way = [running.submit(step, update=True) for _ in range(count + 1)]
    ends = []
    for one in under_way:  # the first iteration transfers layouts
        one.result()
        ends.append(time.perf_counter())
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def simulated(shape: Shape, problem: MappingProblem, mapping: Mapping) -> Timeline:
    """Simulate an iteration in which GPUs continue as soon as they can."""
    made = emulate(problem, mapping, shape.contrastive)
    plan = made.plan
    gpu = made.backend
    seconds = {
        op: SurfaceSeconds(problem, gpu.slices, share)
        for op, share in ((Op.FORWARD, gpu.forward_share), (Op.BACKWARD, 1 - gpu.forward_share))
    }

    def on_quota(instruction: Instruction, quotas: ByModule[str, float]) -> float:
        module = instruction.stage.module
        others = {name: quota for name, quota in quotas.items() if name != module}
        degree = len(plan.replicas(module))
        return seconds[instruction.op](module, degree, quotas[module], others)

    whole = {
        (stage.id, op): on_quota(Instruction(op, stage.id), {stage.module: 1.0})
        for stage in plan.stages for op in seconds
    }
    program = lower(plan, full_step(plan), samples=[Samples(SAMPLES)])
    return simulate(program, whole, group_seconds=on_quota)


def measure(model: str, iterations: int, pictures: Path | None) -> dict[str, Any]:
    """Measure all plans of a model.

    Returns seconds predicted by the sum of stages (Mosaic, eq. 1) and by the simulator, and the
    measured median.

    Args:
        pictures: folder for a picture of the first plan's timelines; None for none.
    """
    shape = SHAPES[model]
    problem = shape.problem()
    rows: dict[str, Any] = {}
    for name, mapping in plans(shape, problem).items():
        timeline = simulated(shape, problem, mapping)
        made = emulate(problem, mapping, shape.contrastive)
        with ParallelModel(
            made.dag, made.plan, quota_backend=made.backend, resources=RankResources(cpus=1.0),
        ) as running:
            seconds = iteration_seconds(running, iterations)
            if pictures is not None and name == "raymm":
                ran = running.train_step({ENTRY: torch.randn(SAMPLES, WIDTH)}).timeline
                draw_timelines(
                    [("predicted", timeline), ("measured", ran)], pictures / f"{model}.png",
                    rank_names={rank: f"GPU {rank}" for rank in range(ran.num_ranks)},
                    title=f"{model}: a mapping, predicted and run with emulated modules",
                )
        median = statistics.median(seconds)
        rows[name] = {
            "stages": len(mapping.stages), "predicted": mapping.seconds,
            "simulated": timeline.makespan, "measured": median,
            "spread": max(seconds) / min(seconds) - 1,
            "error": abs(median / timeline.makespan - 1),
            "overhead_ms": 1e3 * (median - timeline.makespan) / len(mapping.stages),
        }
    return rows


def table(model: str, rows: dict[str, Any]) -> Table:
    """Return a table of a model's plans."""
    shown = Table("plan", "stages", "sum of stages s", "simulated s", "measured s", "error",
                  "ms per stage", "raymm faster", title=model)  # fmt: skip
    for name, row in rows.items():
        shown.add_row(
            name, str(row["stages"]), f"{row['predicted']:.3f}", f"{row['simulated']:.3f}",
            f"{row['measured']:.3f}", f"{row['measured'] / row['simulated'] - 1:+.1%}",
            f"{row['overhead_ms']:.1f}", f"{row['measured'] / rows['raymm']['measured']:.2f}x",
        )
    return shown


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--iterations", type=int, default=2, help="measured iterations per plan")
    found.add_argument("--draw", type=Path, help="folder for pictures of timelines")
    found.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return found.parse_args()


def main() -> None:
    """Measure, print tables and the result line."""
    options = arguments()
    before = machine()
    found: dict[str, Any] = {}
    with local_ray(max(SHAPES[name].gpus for name in options.models)):
        for model in options.models:
            found[model] = measure(model, options.iterations, options.draw)
            console().print(table(model, found[model]))
    result: dict[str, Any] = {"benchmark": "multiplexed"}
    for model, rows in found.items():
        ours = rows["raymm"]
        result[f"error_{model}"] = ours["error"]
        result[f"overhead_ms_per_stage_{model}"] = ours["overhead_ms"]
        for name, row in rows.items():
            if name != "raymm":
                result[f"over_{name}_{model}"] = row["measured"] / ours["measured"]
                result[f"predicted_over_{name}_{model}"] = row["predicted"] / ours["predicted"]
    result["error_max"] = max(result[f"error_{model}"] for model in found)
    result["error_any_plan"] = max(row["error"] for rows in found.values() for row in rows.values())
    result |= {"plans": found, "machine": before}
    emit(result, options.json)


if __name__ == "__main__":
    main()
