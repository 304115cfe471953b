"""CLIP-, ImageBind- and OFASys-shaped mapping problems.

Work follows Mosaic's Table 1 (TFLOPs and FLOPs per byte of a module), where it has the module;
the other modules of these models are given work like that of their kind. Times are stretched so
that stages take hundreds of milliseconds to seconds: long beside what the actors themselves take,
even eight of them on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks._mapping_instances import INTERFERENCE
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.roofline import ModuleWork, roofline_surface

# FLOPs per byte at which arithmetic and memory traffic take equally long.
RIDGE_INTENSITY = 20.0
# A module of so many TFLOPs has enough parallel work for all multiprocessors of one GPU.
TFLOPS_PER_GPU = 0.5


class Kind(NamedTuple):
    """A module's TFLOPs and FLOPs per byte."""

    tflops: float
    intensity: float


@dataclass(frozen=True)
class Shape:
    """A model: modules, dependencies, and which of them compare all samples."""

    modules: dict[str, Kind]
    edges: tuple[tuple[str, str], ...]
    gpus: int
    seconds_per_tflop: float
    contrastive: tuple[str, ...] = ()

    def problem(self) -> MappingProblem:
        """The problem, with a roofline surface for every module."""
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
        parallel=max(0.5, kind.tflops / TFLOPS_PER_GPU),
    )


ENCODERS = {
    "vision": Kind(1.35, 18.2), "text": Kind(0.72, 12.5), "audio": Kind(0.95, 14.8),
    "video": Kind(1.60, 18.2), "depth": Kind(0.40, 18.2), "thermal": Kind(0.45, 18.2),
    "imu": Kind(0.20, 14.8), "action": Kind(0.10, 12.5), "box": Kind(0.06, 12.5),
}
DECODERS = {
    "text_out": Kind(0.60, 12.5), "image_out": Kind(1.10, 18.2), "audio_out": Kind(0.80, 14.8),
    "video_out": Kind(1.30, 18.2), "action_out": Kind(0.10, 12.5), "box_out": Kind(0.06, 12.5),
}
SENSES = ("text", "audio", "depth", "thermal", "imu")

SHAPES = {
    "clip": Shape(
        {"vision": Kind(4.17, 35.2), "text": Kind(1.04, 20.5), "align": Kind(0.05, 20.5)},
        (("vision", "align"), ("text", "align")), 4, 2.0, ("align",),
    ),
    "imagebind": Shape(
        {
            "vision": Kind(4.17, 35.2), "audio": Kind(2.09, 22.8), "text": Kind(1.04, 20.5),
            "depth": Kind(0.80, 35.2), "thermal": Kind(0.90, 35.2), "imu": Kind(0.30, 20.5),
            "align": Kind(0.10, 20.5),
        },
        tuple((name, "align") for name in ("vision", *SENSES)), 8, 2.0, ("align",),
    ),
    "ofasys": Shape(
        {**ENCODERS, "backbone": Kind(4.80, 41.6), **DECODERS},
        (*((name, "backbone") for name in ENCODERS), *(("backbone", name) for name in DECODERS)),
        8, 2.0,
    ),
}
