"""Mosaic: iteration times of multiplexed plans over those of Megatron-LM, DistMM and Spindle.

Modules follow Mosaic's Table 1 (:mod:`benchmarks.shared.multiplexed_models`), whose scaling
surfaces are rooflines, because the paper prints its measured surfaces only as pictures. Plans are
raymm's and the baselines' for the same surfaces; times are sums of stages (eq. 1).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.baselines.mappings import distmm, megatron, spindle
from benchmarks.papers.tables import Row, Table
from benchmarks.shared.multiplexed_models import ENCODERS, SHAPES, Kind, Shape
from raymm.scheduler.multiplex.solver.solve import solve

SURFACES = "measured scaling surfaces (Figure 7 is a picture)"
# §5.2: least and largest gain over a system, of six models.
FIGURE_9 = {"Spindle": (1.07, 1.31), "DistMM": (1.10, 1.42), "Megatron-LM": (1.17, 1.48)}
# §5.4.1: gains of OFASys with four modules, by GPUs.
FIGURE_14 = {
    8: {"Megatron-LM": 1.68, "Spindle": 1.30, "DistMM": 1.52},
    16: {"Megatron-LM": 1.48, "Spindle": 1.20, "DistMM": 1.36},
    32: {"Megatron-LM": 1.31, "Spindle": 1.12, "DistMM": 1.22},
}
SINGLE_NODE_GPUS, BATCHES = 8, (16, 32)  # §5.1: a single node has the smaller batch


def gains(shape: Shape) -> dict[str, float]:
    """Return the iteration time of every system over raymm's."""
    problem = shape.problem()
    ours = solve(problem).seconds
    others = {
        "Megatron-LM": megatron(problem), "DistMM": distmm(problem),
        "Spindle": spindle(problem, layers=shape.layers),
    }
    return {name: mapping.seconds / ours for name, mapping in others.items()}


def four_modules(gpus: int) -> Shape:
    """Return OFASys with the four modules that Table 1 lists."""
    growth = 1 if gpus <= SINGLE_NODE_GPUS else BATCHES[1] / BATCHES[0]
    modules = {name: ENCODERS[name] for name in ("vision", "text", "audio")}
    modules["backbone"] = SHAPES["ofasys"].modules["backbone"]
    modules = {name: Kind(k.tflops * growth, k.intensity, k.layers) for name, k in modules.items()}
    edges = tuple((name, "backbone") for name in modules if name != "backbone")
    return replace(SHAPES["ofasys"], modules=modules, edges=edges, gpus=gpus)


def tables() -> list[Table]:
    """Return Figures 9 and 14a as far as the text prints them."""
    found = {name: gains(shape) for name, shape in SHAPES.items()}
    rows = []
    for system, (least, largest) in FIGURE_9.items():
        ours = [of_model[system] for of_model in found.values()]
        rows += [
            Row(f"least gain over {system}", least, min(ours)),
            Row(f"largest gain over {system}", largest, max(ours)),
        ]
    rows += [
        Row("CLIP, over Spindle", FIGURE_9["Spindle"][0], found["clip"]["Spindle"]),
        Row("OFASys, over Spindle", FIGURE_9["Spindle"][1], found["ofasys"]["Spindle"]),
    ]
    scaled = tuple(
        Row(f"{gpus} GPUs, over {system}", paper, raymm[system])
        for gpus, printed in FIGURE_14.items()
        for raymm in [gains(four_modules(gpus))]
        for system, paper in printed.items()
    )
    return [
        Table(
            "Mosaic, Figure 9: gain", "§5.2", "iteration time of a system over Mosaic's",
            tuple(rows),
            f"{SURFACES}, GPUs per model, modules of Qwen3-VL, Unified-IO 2 and CTVLM; ranges are "
            "over CLIP, ImageBind and OFASys",
        ),
        Table(
            "Mosaic, Figure 14a: gain", "§5.4.1", "iteration time of a system over Mosaic's",
            scaled, SURFACES,
        ),
    ]
