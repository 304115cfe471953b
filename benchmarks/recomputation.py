"""Claim: selective recomputation fits in little memory at the least cost in time.

Run with `python -m benchmarks.recomputation --json`.

Planned, on models of Cornstarch v1 (one A40 of a tensor and context parallel group of four per
rank, analytic costs): seconds of a 1F1B step over those with enough memory for all activations,
when the fullest rank has a given share of that memory, for

- *stages*: each stage recomputes entirely or not at all (and cuts take that into account);
- *layers, same cuts*: each layer recomputes or not, the fewest that are needed (OmniBal §4.3);
- *finer, same cuts*: layers may also keep some outputs, or offload;
- *finer, with cuts*: the same, and cuts take recomputation into account.

Measured, on a small vision-language model with real actors: layers are profiled, a plan is made for
a limit below the memory for all activations, and its steps alternate with those of plans that keep
all activations and that recompute every layer. Peaks are resident memory of the actors.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.table import Table
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks.shared import common, image_text
from benchmarks.valm_configs import valm_profile
from raymm.errors import NoPlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.profiling.layers import LayerMeasurement
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.recomputation import ALL
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Candidates
from raymm.scheduler.search.options import LAYERS, PlanProblem
from raymm.scheduler.search.planner import propose, within_memory
from raymm.scheduler.search.stage_space import StageSpace

# Sizes of LLM, vision and audio encoder; ranks; shares of the memory for all activations.
MODELS = (("M", "M", "S", 12), ("L", "S", "S", 24))
MICROBATCHES = 24
SHARES = (0.8, 0.6, 0.5, 0.4)
WAYS = ("stages", "layers, same cuts", "finer, same cuts", "finer, with cuts")
ONLY = {"layouts": ("modality_parallel",), "schedules": ("1f1b",)}

VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 64, "patch_size": 16,
}
LLAMA = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048,
}
ROWS, TOKENS, STEP = 2, 512, 3
LIMIT_SHARE = 0.6
# By default glibc keeps freed activations, which then count as resident.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> None:
    parser = common.parser(__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=4, help="measured steps per plan")
    parser.add_argument("--only", choices=("planned", "measured"), help="run only this part")
    args = parser.parse_args()
    console = common.console()
    result: dict = {"machine": common.machine()}
    if args.only != "measured":
        rows = result["planned"] = planned(console)
        for way in WAYS:
            values = [row[way] for row in rows if row[way] is not None]
            key = way.replace(", ", "_").replace(" ", "_")
            result[f"{key}_median"] = round(statistics.median(values), 4)
            result[f"{key}_max"] = round(max(values), 4)
            result[f"{key}_fits"] = len(values)
    if args.only != "planned":
        result |= measured(console, args.steps)
    common.emit(result, args.json)


def planned(console: common.Console) -> list[dict]:
    """Return a row per model and share of memory.

    Step times are relative to those with enough memory for all activations; None if no plan fits.
    """
    table = Table("model", "memory", *WAYS, title="step time over that with all activations kept")
    rows = []
    for llm, vision, audio, ranks in MODELS:
        graph, profile = valm_profile(llm, vision, audio, "full")
        free = propose(PlanProblem(
            graph, profile, ranks, MICROBATCHES, recompute=False, **ONLY
        )).best
        most = max(one.total for one in free.memory)
        for share in SHARES:
            found = _ways(graph, profile, ranks, int(most * share), free.plan)
            row = {way: value and round(value / free.seconds, 4) for way, value in found.items()}
            name = f"{llm}-{vision}{audio}"
            table.add_row(name, f"{share:.0%}", *(f"{v:.3f}" if v else "-" for v in row.values()))
            rows.append({"model": name, "ranks": ranks, "share": share, **row})
    console.print(table)
    return rows


def _ways(
    graph: ModuleGraph, profile: CostProfile, ranks: int, limit: int, free: Plan
) -> dict[str, float | None]:
    whole = replace(profile, modules={
        name: tuple(
            replace(c, options=tuple(o for o in c.options if o.name == ALL)) for c in costs
        )
        for name, costs in profile.modules.items()
    })

    def best(recompute: bool | str) -> float | None:
        with contextlib.suppress(NoPlanError):
            return propose(PlanProblem(
                graph, profile, ranks, MICROBATCHES, memory_limit=limit, recompute=recompute,
                **ONLY,
            )).best.seconds
        return None

    return dict(zip(WAYS, (
        best(True), _same_cuts(free, whole, limit), _same_cuts(free, profile, limit), best(LAYERS),
    ), strict=True))


def _same_cuts(free: Plan, profile: CostProfile, limit: int) -> float | None:
    """Return the seconds of a plan that has to fit with its present cuts."""
    space = within_memory(
        StageSpace(free.graph, profile, free.num_ranks, MICROBATCHES, memory_limit=limit),
        adaptive=True,
    )
    stages = []
    for node in free.graph.nodes:
        own = free.module_stages(node.name)
        ranges = tuple(stage.layers for stage in own)
        beyond = free.depth[own[-1].id] - 1
        added = space.memory.added(node.name, len(own), beyond)
        space.memory.refine(node.name, ranges, beyond)
        added = space.memory.added(node.name, len(own), beyond)
        if any(math.isinf(added[index][at]) for index, at in enumerate(ranges)):
            return None
        options = space.memory.options(node.name, ranges, beyond)
        stages += [
            replace(s, layer_options=o[: max(0, min(s.layers[1], node.num_blocks) - s.layers[0])])
            for s, o in zip(own, options, strict=True)
        ]
    plan = replace(free, stages=tuple(stages), profile=profile, memory_limit=limit)
    return Candidates(Network(), ("1f1b",)).seconds(plan)


@dataclass
class Measured:
    """Seconds, loss and peak bytes per rank of a plan's steps."""

    seconds: list[float]
    losses: list[float]
    peaks: list[tuple[int, ...]]


def build_model() -> MultimodalModule:
    """Build SigLIP, an MLP and Llama, with random weights; the encoder is frozen."""
    vision = ModalityModule(SiglipVisionConfig(**VISION), "mlp", frozen=True, seed=1)
    return MultimodalModule({"vision": vision}, ModalityModule(LlamaConfig(**LLAMA), seed=2))


def microbatches(count: int) -> list[dict]:
    """Return microbatches of :data:`ROWS` rows with one image each."""
    return image_text.microbatches(count, ROWS, TOKENS, LLAMA["vocab_size"], VISION["image_size"])


def plans(graph: ModuleGraph, profile: CostProfile, share: float) -> dict[str, Plan]:
    """Return plans on three ranks.

    They keep all activations, recompute every layer, or stay within ``share`` of the fullest rank's
    memory.
    """
    keep = propose(PlanProblem(graph, profile, 3, STEP, recompute=False, **ONLY)).best
    limit = int(share * max(one.total for one in keep.memory))
    chosen = propose(PlanProblem(
        graph, profile, 3, STEP, memory_limit=limit, recompute=LAYERS, **ONLY
    )).best.plan
    again = [
        replace(s, layer_options=(ALL,) * (s.layers[1] - s.layers[0]))
        if s.module == graph.backbone else s
        for s in keep.plan.stages
    ]
    return {
        "keep": keep.plan, "chosen": chosen, "all_again": replace(keep.plan, stages=tuple(again))
    }


def measured(console: common.Console, steps: int) -> dict:
    """Run the plans' steps alternately."""
    os.environ |= ENVIRONMENT
    with common.local_ray(10, ENVIRONMENT):
        model = build_model()
        batch = microbatches(STEP)
        profile = LayerMeasurement(model, batch[0], repeats=3).run().at()
        found = plans(module_graph(model), profile, LIMIT_SHARE)
        rows = {name: Measured([], [], []) for name in found}
        with contextlib.ExitStack() as stack:
            running = {
                name: stack.enter_context(ParallelModel(model, plan, threads=1))
                for name, plan in found.items()
            }
            for step in range(steps + 1):
                for name, parallel in running.items():
                    output = parallel.execute(batch)
                    row = rows[name]
                    row.losses.append(output.loss)
                    row.peaks.append(output.peak_bytes)
                    if step:  # the first one warms up
                        row.seconds.append(output.timeline.makespan)
    return _report(console, found, rows)


def _report(
    console: common.Console, found: Mapping[str, Plan], rows: Mapping[str, Measured]
) -> dict:
    limit = found["chosen"].memory_limit
    table = Table("plan", "seconds", "peak MiB per rank", title=f"limit {limit / 2**20:.0f} MiB")
    median = {name: statistics.median(row.seconds) for name, row in rows.items()}
    peak = {name: max(map(max, row.peaks)) for name, row in rows.items()}
    for name, row in rows.items():
        peaks = [max(of_rank) for of_rank in zip(*row.peaks, strict=True)]
        table.add_row(
            name, f"{median[name]:.3f}", " ".join(f"{one / 2**20:.0f}" for one in peaks)
        )
    console.print(table)
    for stage in found["chosen"].stages:
        console.print(stage.id, stage.layers, " ".join(stage.layer_options), highlight=False)
    return {
        "measured_seconds": {name: round(value, 4) for name, value in median.items()},
        "measured_over_keep": round(median["chosen"] / median["keep"], 4),
        "all_again_over_keep": round(median["all_again"] / median["keep"], 4),
        "chosen_over_all_again": round(median["chosen"] / median["all_again"], 4),
        "limit_mib": round(limit / 2**20, 1),
        "peak_mib": {name: round(value / 2**20, 1) for name, value in peak.items()},
        "within_limit": peak["chosen"] <= limit,
        "same_losses": len({tuple(row.losses) for row in rows.values()}) == 1,
    }


if __name__ == "__main__":
    main()
