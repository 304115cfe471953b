"""Multiplexed plans on actors with emulated GPUs: measured against predicted, ours against others.

One actor per GPU; modules sleep for as long as the performance model says (scaling surface and
interference on their GPU), tiny tensors are really routed, gradients really summed. What is
measured beside the sleeping is what the runtime itself takes. All plans of a model run in the same
processes, iterations in turn.

    python -m benchmarks.multiplexed --json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping as ByModule
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks._common import console, emit, local_ray, machine, parser
from benchmarks._multiplexed_models import SHAPES, Shape
from benchmarks.emulated_gpu import SurfaceSeconds
from benchmarks.emulation import ENTRY, emulate
from raymm.actors.multiplexed.group import GpuGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.draw import draw_timelines
from raymm.runtime.multiplexed_dag import MultiplexedModule
from raymm.scheduler.baselines.mappings import distmm, megatron, spindle
from raymm.scheduler.multiplex.mapped_plan import mapped_plan
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.program.program import Instruction, Op
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.step_graph import full_step

SAMPLES, WIDTH = 16, 8


def plans(shape: Shape, problem: MappingProblem) -> dict[str, Mapping]:
    """Ours and the baselines'; Spindle's slices are whole layers."""
    return {
        "raymm": solve(problem), "megatron": megatron(problem), "distmm": distmm(problem),
        "spindle": spindle(problem, layers=shape.layers),
    }


def started(
    shape: Shape, problem: MappingProblem, mapping: Mapping, lockstep: bool,
    group: GpuGroup | None,
) -> MultiplexedModule:
    """A plan on emulated GPUs, in the processes of the one before."""
    made = emulate(problem, mapping, shape.contrastive)
    return MultiplexedModule(
        made.dag, made.mapping, lockstep=lockstep, backend=made.backend, group=group,
        resources=RankResources(cpus=1.0),
    )


def iteration_seconds(running: MultiplexedModule, count: int) -> list[float]:
    """Seconds of training iterations, all submitted ahead: from end to end."""
    batch = {ENTRY: torch.randn(SAMPLES, WIDTH)}
    under_way = [running.submit(batch) for _ in range(count + 1)]  # the first tells layouts
    ends = [one.result().end for one in under_way]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def simulated(shape: Shape, problem: MappingProblem, mapping: Mapping) -> Timeline:
    """The simulator's timeline of an iteration in which GPUs go on as soon as they can."""
    made = emulate(problem, mapping, shape.contrastive)
    plan = mapped_plan(made.dag.graph, made.mapping)
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
    program = lower(plan, full_step(plan), samples=[SAMPLES])
    return simulate(program, whole, group_seconds=on_quota)


def measure(model: str, iterations: int, pictures: Path | None) -> dict[str, Any]:
    """All plans of a model: predicted and median measured seconds, in lockstep and running free;
    a picture of the first plan's timelines, if a folder for it is named."""
    shape = SHAPES[model]
    problem = shape.problem()
    rows: dict[str, Any] = {}
    group = None
    for name, mapping in plans(shape, problem).items():
        row: dict[str, Any] = {"predicted": mapping.seconds, "stages": len(mapping.stages)}
        timeline = simulated(shape, problem, mapping)
        row["simulated"] = timeline.makespan
        for mode, lockstep in (("lockstep", True), ("free", False)):
            running = started(shape, problem, mapping, lockstep, group)
            group = running.group
            seconds = iteration_seconds(running, iterations)
            row[mode] = statistics.median(seconds)
            row[f"{mode}_spread"] = max(seconds) / min(seconds) - 1
            row[f"{mode}_overhead_ms"] = (
                1e3 * (row[mode] - mapping.seconds) / len(mapping.stages)
            )
        row["simulated_error"] = abs(row["free"] / row["simulated"] - 1)
        if pictures is not None and name == "raymm":
            ran = running.train_step({ENTRY: torch.randn(SAMPLES, WIDTH)}).timeline
            draw_timelines(
                [("predicted", timeline), ("measured", ran)], pictures / f"{model}.png",
                rank_names={gpu: f"GPU {gpu}" for gpu in range(mapping.gpus)},
                title=f"{model}: a mapping, predicted and run with emulated modules",
            )
        rows[name] = row
    group.shutdown()
    return rows


def table(model: str, rows: dict[str, Any]) -> Table:
    """A model's plans, to read."""
    shown = Table("plan", "stages", "predicted s", "lockstep s", "error", "ms per stage",
                  "simulated s", "free s", "error", "raymm faster", title=model)  # fmt: skip
    for name, row in rows.items():
        shown.add_row(
            name, str(row["stages"]), f"{row['predicted']:.3f}", f"{row['lockstep']:.3f}",
            f"{row['lockstep'] / row['predicted'] - 1:+.1%}",
            f"{row['lockstep_overhead_ms']:.1f}", f"{row['simulated']:.3f}",
            f"{row['free']:.3f}", f"{row['free'] / row['simulated'] - 1:+.1%}",
            f"{row['free'] / rows['raymm']['free']:.2f}x",
        )
    return shown


def arguments() -> argparse.Namespace:
    """Command line."""
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--iterations", type=int, default=2, help="measured, per plan and mode")
    found.add_argument("--draw", type=Path, help="folder for pictures of timelines")
    found.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return found.parse_args()


def main() -> None:
    """Measure, print, emit."""
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
        result[f"error_{model}"] = abs(ours["lockstep"] / ours["predicted"] - 1)
        result[f"overhead_ms_per_stage_{model}"] = ours["lockstep_overhead_ms"]
        for name, row in rows.items():
            if name != "raymm":
                result[f"over_{name}_{model}"] = row["free"] / ours["free"]
                result[f"predicted_over_{name}_{model}"] = row["predicted"] / ours["predicted"]
    result["error_max"] = max(result[f"error_{model}"] for model in found)
    result["error_any_plan"] = max(
        abs(row["lockstep"] / row["predicted"] - 1)
        for rows in found.values() for row in rows.values()
    )
    result["simulated_error_max"] = max(
        row["simulated_error"] for rows in found.values() for row in rows.values()
    )
    result |= {"plans": found, "machine": before}
    emit(result, options.json)


if __name__ == "__main__":
    main()
