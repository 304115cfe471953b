"""Random, seeded problems for the mapping solver: roofline surfaces, three kinds of graph."""

from __future__ import annotations

import numpy as np

from benchmarks.shared.roofline import roofline_surface
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.roofline import ModuleWork

KINDS = ("star", "layered", "parallel")
GIB = 2**30
# Approximate fit of eq. 8 to the colocations of `benchmarks.shared.colocations`.
INTERFERENCE = Interference(-0.15, 0.3, 0.35)


def random_work(rng: np.random.Generator, name: str, size: float) -> ModuleWork:
    """Draw a module of ``size`` GPU seconds, compute or memory bound.

    Compute intensity varies by an order of magnitude between modules (Mosaic, Table 1), and small
    modules cannot fill many GPUs.
    """
    intensity = float(np.exp(rng.uniform(np.log(0.35), np.log(4.0))))
    bytes_ = int(size * GIB * rng.uniform(2.0, 6.0))
    return ModuleWork(
        name, compute_seconds=size * min(1.0, intensity),
        memory_seconds=size * min(1.0, 1 / intensity),
        fixed_seconds=float(rng.uniform(0.002, 0.01)),
        reduce_seconds=float(size * rng.uniform(0.0, 0.02)),
        parallel=float(np.exp(rng.uniform(np.log(2.0), np.log(24.0))) * max(0.3, size)),
        saturation=float(rng.uniform(0.25, 0.6)),
        state_bytes=bytes_, activation_bytes=8 * bytes_,
    )


def random_edges(rng: np.random.Generator, kind: str, modules: int) -> list[tuple[int, int]]:
    """Draw edges (producer, consumer): a star (encoders, backbone, decoders), random layers, or
    none.
    """
    if kind == "parallel":
        return []
    if kind == "star":
        decoders = 1 if modules < 16 else int(rng.integers(1, 3))
        backbone = modules - decoders - 1
        return [(m, backbone) for m in range(backbone)] + [
            (backbone, m) for m in range(backbone + 1, modules)
        ]
    layers: list[list[int]] = []
    first = 0
    while first < modules:
        width = min(int(rng.integers(2, 7)), modules - first)
        layers.append(list(range(first, first + width)))
        first += width
    edges = []
    for above, below in zip(layers, layers[1:], strict=False):
        for m in below:
            count = min(len(above), int(rng.integers(1, 4)))
            edges += [(int(p), m) for p in rng.choice(above, count, replace=False)]
    return edges


def random_problem(
    seed: int, kind: str, modules: int, gpus: int, interference: Interference = INTERFERENCE,
    memory_over: str = "stage",
) -> MappingProblem:
    """Draw a problem: log-uniform sizes over a factor of 40, a backbone as large as the largest
    module, 80 GiB of memory per GPU.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind), modules, gpus])
    edges = random_edges(rng, kind, modules)
    sizes = np.exp(rng.uniform(np.log(0.05), np.log(2.0), modules))
    if kind == "star":
        sizes[edges[0][1]] = 4.0
    degrees = [1 << j for j in range(gpus.bit_length())]
    surfaces = tuple(
        roofline_surface(random_work(rng, f"m{m}", float(size)), degrees)
        for m, size in enumerate(sizes)
    )
    names = [surface.name for surface in surfaces]
    return MappingProblem(
        surfaces, tuple((names[a], names[b]) for a, b in edges), gpus, 10, 80 * GIB, interference,
        memory_over,
    )

