"""Claim: the best of pipelined, multiplexed and mixed plans is found, and runs as predicted.

Run with `python -m benchmarks.styles --json`.

Models of the papers, by the TFLOPs and layers of their modules: CLIP, ImageBind and OFASys after
Mosaic's Table 1, and vision-audio-language models of Cornstarch v1. All plans of a model have the
same devices, samples and costs. Executed plans sleep for the time that their profile predicts, on
the real actors, with tiny tensors that are sent for real.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from benchmarks.devices.emulation import ENTRY
from benchmarks.shared.common import console, emit, local_ray, machine, parser
from benchmarks.shared.multiplexed_models import (
    INTERFERENCE,
    RIDGE_INTENSITY,
    SHAPES,
    TFLOPS_PER_GPU,
    Kind,
    Shape,
)
from benchmarks.shared.roofline import roofline_surface
from benchmarks.shared.styled_plans import backend, styled
from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import NoPlanError, PlanError
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.roofline import ModuleWork
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Option, evaluate
from raymm.scheduler.search.module_degrees import DegreeChoices
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import find_plans
from raymm.scheduler.styles.blocks import StyleProblem
from raymm.scheduler.styles.style_search import StyleSearch, search_between

MICROBATCHES, SAMPLES, WIDTH = 8, 32, 8
PIPELINED, MULTIPLEXED, AUTO = "pipelined", "multiplexed", "auto"
# Work relative to an LLM of 4.8 TFLOPs, as in OFASys; layers of Table 1 of Cornstarch v1.
VALM_SS = {"vision": Kind(1.9, 35.2, 40), "audio": Kind(2.4, 22.8, 32), "llm": Kind(4.8, 41.6, 16)}
VALM_MS = {"vision": Kind(1.9, 35.2, 40), "audio": Kind(2.4, 22.8, 32), "llm": Kind(9.6, 41.6, 32)}
# Parameters in billions, of Cornstarch's sizes; a trained one takes 16 bytes, on GPUs of 48 GB.
BILLIONS = {
    "vlm": {"vision": 1.0, "llm": 8.0}, "alm": {"audio": 1.4, "llm": 8.0},
    "valm_ss": {"vision": 1.0, "audio": 1.4, "llm": 1.2},
    "valm_ms": {"vision": 1.0, "audio": 1.4, "llm": 8.0},
}
TRAINED_BYTES, LIMIT = 16, 44 * 2**30
_INTO_LLM = (("vision", "llm"), ("audio", "llm"))
MODELS = {
    **SHAPES,
    "vlm": Shape(
        {"vision": Kind(1.35, 35.2, 24), "llm": Kind(4.8, 41.6, 32)}, (("vision", "llm"),), 8, 2.0
    ),
    "alm": Shape(
        {"audio": Kind(2.09, 22.8, 32), "llm": Kind(4.8, 41.6, 32)}, (("audio", "llm"),), 8, 2.0
    ),
    "valm_ss": Shape(VALM_SS, _INTO_LLM, 8, 2.0),
    "valm_ms": Shape(VALM_MS, _INTO_LLM, 8, 2.0),
}


def profile(shape: Shape, microbatches: int, billions: Mapping[str, float]) -> CostProfile:
    """Return layer costs of one of a step's ``microbatches``, with surfaces.

    Every microbatch has the part of a call's time that does not depend on its size (launches).
    """
    surfaces: list[ScalingSurface] = []
    modules = {}
    for name, kind in shape.modules.items():
        compute = kind.tflops * shape.seconds_per_tflop / microbatches
        surface = roofline_surface(ModuleWork(
            name, compute, compute * RIDGE_INTENSITY / kind.intensity,
            fixed_seconds=0.02 * shape.seconds_per_tflop, reduce_seconds=0.03 * compute,
            parallel=max(0.5, kind.tflops / microbatches / TFLOPS_PER_GPU), ridge=1.0,
            state_bytes=int(billions.get(name, 0.0) * 1e9) * TRAINED_BYTES,
        ), [1 << j for j in range(shape.gpus.bit_length())])
        surfaces.append(surface)
        layer = surface.seconds_at(1, surface.steps) / kind.layers
        nbytes = int(billions.get(name, 0.0) * 1e9) * 4 // kind.layers
        cost = LayerCost(layer / 3, 0.0, 2 * layer / 3, parameter_bytes=nbytes)
        modules[name] = (cost,) * kind.layers
    return CostProfile(modules, sharing=DeviceSharing(tuple(surfaces), INTERFERENCE))


def searched(model: str, seconds: float | None) -> tuple[dict[str, Option], StyleSearch]:
    """Return the best plans of both styles, and the result of the search between them."""
    shape, billions = MODELS[model], BILLIONS.get(model, {})
    limit = LIMIT if billions else None
    read = {producer for producer, _ in shape.edges}
    every = tuple(edge for edge in shape.edges if edge[1] in shape.contrastive)
    graph = ModuleGraph(tuple(
        ModuleNode(name, (True,) * kind.layers, loss=name not in read)
        for name, kind in shape.modules.items()
    ), shape.edges, every)
    profiles = {count: profile(shape, count, billions) for count in (1, 2, 4, MICROBATCHES)}
    network, starts = Network(), {}
    copies = {name: DegreeChoices(dp=(1, 2, 4)) for name in shape.modules}
    pipelines = PlanProblem(
        graph, profiles[MICROBATCHES], shape.gpus, MICROBATCHES, limit, network,
        schedules=("1f1b",), degrees=copies if len(graph.nodes) <= shape.gpus else {},
    )
    try:
        starts[PIPELINED] = find_plans(pipelines, control=SearchControl(seconds)).best
    except NoPlanError as error:
        console().print(f"[dim]no pipelines: {error}")
    sharing = profiles[1].sharing
    assert sharing is not None
    try:
        mapping = solve(MappingProblem(
            sharing.surfaces, shape.edges, shape.gpus, memory_bytes=limit,
            interference=INTERFERENCE,
        ))
        mapped = replace(mapped_plan(graph, mapping), profile=profiles[1], memory_limit=limit)
        option, unfit = evaluate(mapped, network, MULTIPLEXED)
        if unfit is None:
            starts[MULTIPLEXED] = option
        else:
            console().print(f"[dim]no mapping: {unfit}", highlight=False)
    except PlanError as error:
        console().print(f"[dim]no mapping: {error}", highlight=False)
    problem = StyleProblem(
        graph, profiles, shape.gpus, limit, network, sharing.surfaces[0].steps,
        schedules=("1f1b",),
    )
    return starts, search_between(problem, starts, SearchControl(seconds))


def step_seconds(plan: Plan, shape: Shape, count: int) -> float:
    """Return median seconds of a step of sleeping stages, all submitted ahead."""
    dag, running_plan = styled(plan, shape.contrastive)
    assert plan.profile is not None and plan.profile.sharing is not None
    steps = plan.profile.sharing.surfaces[0].steps
    with ParallelModel(
        dag, running_plan, quota_backend=partial(backend, steps),
        resources=RankResources(cpus=1.0),
    ) as running:
        step = running.prepare({ENTRY: torch.randn(SAMPLES, WIDTH)})
        under_way = [running.submit(step, update=True) for _ in range(count + 2)]
        ends = []
        for one in under_way:  # the first step transfers layouts, and the second follows it
            one.result()
            ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(ends[1:], ends[2:], strict=False))


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of a step for each style of a model, predicted and measured."""
    shape = MODELS[model]
    began = time.perf_counter()
    starts, search = searched(model, options.seconds)
    took = time.perf_counter() - began
    rows: dict[str, Any] = {}
    for style, option in {**starts, AUTO: search.best}.items():
        same = next((s for s in starts if style == AUTO and starts[s] is option), None)
        if same is not None:
            rows[style] = {**rows[same], "plan": f"{same} as it is"}
            continue
        ran = None if options.predict else step_seconds(option.plan, shape, options.steps)
        rows[style] = {
            "predicted": option.seconds, "measured": ran, "plan": option.label,
            "error": None if ran is None else ran / option.seconds - 1,
        }
    return {
        "styles": rows, "why": search.lines(), "tried": search.tried, "search_s": took,
        "exhaustive": search.exhaustive,
    }


def table(found: dict[str, Any]) -> Table:
    """Return a table with one row per model and style."""
    shown = Table("model", "style", "predicted s", "run s", "error", "plan")
    for model, result in found.items():
        for style, row in result["styles"].items():
            ran = row["measured"]
            shown.add_row(
                model, style, f"{row['predicted']:.3f}", "" if ran is None else f"{ran:.3f}",
                "" if ran is None else f"{row['error']:+.1%}", row["plan"],
            )
    return shown


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    result = parser((__doc__ or "").splitlines()[0])
    result.add_argument("--steps", type=int, default=2, help="measured steps per plan")
    result.add_argument("--seconds", type=float, default=120.0, help="seconds per search, at most")
    result.add_argument("--predict", action="store_true", help="only predict, do not run")
    result.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    return result.parse_args()


def main() -> None:
    options = arguments()
    before = machine()
    found: dict[str, Any] = {}
    with local_ray(max(MODELS[name].gpus for name in options.models)):
        for model in options.models:
            found[model] = measure(model, options)
            for line in found[model]["why"]:
                console().print(f"[dim]{model}: {line}", highlight=False)
            console().print(table({model: found[model]}))
    result: dict[str, Any] = {"benchmark": "styles"}
    errors = []
    for model, one in found.items():
        rows = one["styles"]
        pure = min(row["predicted"] for style, row in rows.items() if style != AUTO)
        result[f"auto_gain_predicted_{model}"] = pure / rows[AUTO]["predicted"]
        errors += [abs(row["error"]) for row in rows.values() if row["error"] is not None]
        if rows[AUTO]["measured"] is not None:
            pure = min(row["measured"] for style, row in rows.items() if style != AUTO)
            result[f"auto_gain_run_{model}"] = pure / rows[AUTO]["measured"]
    if errors:
        result["error_max"] = max(errors)
    result |= {"models": found, "machine": before}
    emit(result, options.json)


if __name__ == "__main__":
    main()
