"""CLIP-, ImageBind- and OFASys-shaped mapping problems.

Work follows Mosaic's Table 1 (layers, TFLOPs and FLOPs per byte of a module) where it lists the
module; other modules get the work of similar ones.

A module is a sequence of kernels: matrix products, bound by arithmetic, alternate with kernels that
move data (norms, softmax, activation functions), bound by memory bandwidth. Their times add up
instead of overlapping as within one kernel. So a module with half of the multiprocessors keeps more
than half of its speed, and it uses the memory bus for a third to a half of its time. Mosaic starts
from this under-utilization (§2.2: modules of low intensity "fail to fully monopolize" the
multiprocessors; 27 % to 38 % utilization with whole GPUs, Fig. 10), and it is the reason that
sharing pays off: if a module were one ideal kernel, shares of a GPU would gain hardly anything over
time slices. Modules on one GPU disturb each other as on a shared bus
(:mod:`benchmarks.shared.colocations`).

Times are stretched so that stages take hundreds of milliseconds to seconds, which is long compared
with the overhead of the actors, even for eight of them on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.shared.roofline import roofline_surface
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.roofline import ModuleWork

# FLOPs per byte at which arithmetic and memory traffic take the same time.
RIDGE_INTENSITY = 20.0
# A module of this many TFLOPs has enough parallel work for all multiprocessors of one GPU.
TFLOPS_PER_GPU = 0.5
# Interference on a shared bus: own use times that of the others, as a share of a module's time.
INTERFERENCE = Interference(product=1.0, unit="relative", coupling="own")


class Kind(NamedTuple):
    """TFLOPs, FLOPs per byte, and layers of a module."""

    tflops: float
    intensity: float
    layers: int


@dataclass(frozen=True)
class Shape:
    """Model: modules, dependencies, and the modules that compare all samples."""

    modules: dict[str, Kind]
    edges: tuple[tuple[str, str], ...]
    gpus: int
    seconds_per_tflop: float
    contrastive: tuple[str, ...] = ()

    @property
    def layers(self) -> dict[str, int]:
        """Return the number of layers of every module."""
        return {name: kind.layers for name, kind in self.modules.items()}

    def problem(self) -> MappingProblem:
        """Return the problem, with a roofline surface for every module."""
        degrees = [1 << j for j in range(self.gpus.bit_length())]
        surfaces = [
            roofline_surface(_work(name, kind, self.seconds_per_tflop), degrees)
            for name, kind in self.modules.items()
        ]
        return MappingProblem(tuple(surfaces), self.edges, self.gpus, interference=INTERFERENCE)


def _work(name: str, kind: Kind, seconds_per_tflop: float) -> ModuleWork:
    compute = kind.tflops * seconds_per_tflop
    return ModuleWork(
        name, compute, compute * RIDGE_INTENSITY / kind.intensity,
        fixed_seconds=0.02 * seconds_per_tflop, reduce_seconds=0.03 * compute,
        parallel=max(0.5, kind.tflops / TFLOPS_PER_GPU), ridge=1.0,
    )


ENCODERS = {
    "vision": Kind(1.35, 18.2, 8), "text": Kind(0.72, 12.5, 4), "audio": Kind(0.95, 14.8, 6),
    "video": Kind(1.60, 18.2, 8), "depth": Kind(0.40, 18.2, 8), "thermal": Kind(0.45, 18.2, 8),
    "imu": Kind(0.20, 14.8, 6), "action": Kind(0.10, 12.5, 4), "box": Kind(0.06, 12.5, 4),
}
DECODERS = {
    "text_out": Kind(0.60, 12.5, 4), "image_out": Kind(1.10, 18.2, 8),
    "audio_out": Kind(0.80, 14.8, 6),
    "video_out": Kind(1.30, 18.2, 8), "action_out": Kind(0.10, 12.5, 4),
    "box_out": Kind(0.06, 12.5, 4),
}
SENSES = ("text", "audio", "depth", "thermal", "imu")

SHAPES = {
    "clip": Shape(
        {
            "vision": Kind(4.17, 35.2, 24), "text": Kind(1.04, 20.5, 12),
            "align": Kind(0.05, 20.5, 1),
        },
        (("vision", "align"), ("text", "align")), 4, 2.0, ("align",),
    ),
    "imagebind": Shape(
        {
            "vision": Kind(4.17, 35.2, 24), "audio": Kind(2.09, 22.8, 12),
            "text": Kind(1.04, 20.5, 12),
            "depth": Kind(0.80, 35.2, 12), "thermal": Kind(0.90, 35.2, 12),
            "imu": Kind(0.30, 20.5, 6),
            "align": Kind(0.10, 20.5, 1),
        },
        tuple((name, "align") for name in ("vision", *SENSES)), 8, 2.0, ("align",),
    ),
    "ofasys": Shape(
        {**ENCODERS, "backbone": Kind(4.80, 41.6, 36), **DECODERS},
        (*((name, "backbone") for name in ENCODERS), *(("backbone", name) for name in DECODERS)),
        8, 2.0,
    ),
}
