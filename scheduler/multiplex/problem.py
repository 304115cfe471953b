"""The mapping problem: modules, dependencies, GPUs, and the times of every choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.strict_json import MOST_GPUS, MOST_STEPS, items, text, whole

# Sets of modules are bits of an int64.
MOST_MODULES = 60
MEMORY_OVER = ("iteration", "stage")
STEPS = 10  # by default, per GPU


@dataclass(frozen=True)
class MappingProblem:
    """Modules to place on a pool of equal GPUs (Mosaic §3.1).

    A module runs on 2^j GPUs with one quota on all of them (eq. 6). Stages run one after another;
    the modules of a stage run concurrently and must not depend on each other.

    Attributes:
        edges: (producer, consumer) pairs of module names.
        steps: quota steps per GPU; the granularity of the search is ``1 / steps``.
        memory_bytes: bytes per GPU; None for no limit.
        interference: interference between colocated modules.
        memory_over: ``"iteration"`` to limit the sum over all modules that a GPU runs in any stage,
            as needed in training, where state and activations are kept until the backward;
            ``"stage"`` to limit each stage separately.
        allowed: accepted degrees per module; None for any power of two.

    Raises:
        PlanError: unknown or repeated names, a cycle, a surface without samples where they are
            needed, or a module that fits on no GPU at any degree.
    """

    surfaces: tuple[ScalingSurface, ...]
    edges: tuple[tuple[str, str], ...] = ()
    gpus: int = 8
    steps: int = STEPS
    memory_bytes: int | None = None
    interference: Interference = Interference()
    memory_over: str = "iteration"
    allowed: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("surfaces", "edges"):
            object.__setattr__(self, name, tuple(items(getattr(self, name), name)))
        self._check_types()
        whole(self.gpus, "gpus", 1, MOST_GPUS)
        whole(self.steps, "steps", 1, MOST_STEPS)
        if self.memory_bytes is not None:
            whole(self.memory_bytes, "memory_bytes", 1)
        if self.memory_over not in MEMORY_OVER:
            raise PlanError(
                f"memory_over is {self.memory_over!r:.80}; accepted: {', '.join(MEMORY_OVER)}"
            )
        if self.allowed is not None and len(self.allowed) != len(self.surfaces):
            raise PlanError(
                f"allowed has {len(self.allowed)} entries; there are {len(self.surfaces)} modules"
            )
        if not 1 <= len(self.surfaces) <= MOST_MODULES:
            raise PlanError(
                f"surfaces has {len(self.surfaces)} modules; accepted: 1 to {MOST_MODULES}"
            )
        if len(set(self.names)) != len(self.names):
            raise PlanError(f"surfaces[].name must differ, got {list(self.names)}")
        for i, edge in enumerate(self.edges):
            for end in edge:
                if text(end, f"edges[{i}]") not in self.names:
                    raise PlanError(
                        f"edges[{i}] names module {end!r}; modules are {list(self.names)}"
                    )
        if any(self.ancestors[m] >> m & 1 for m in range(len(self.surfaces))):
            raise PlanError(f"edges have a cycle: {list(self.edges)}")
        for m, name in enumerate(self.names):
            if not np.isfinite(self.seconds[m]).any():
                least = int(self.memory[m][self.memory[m] >= 0].min())
                raise PlanError(
                    f"memory_bytes is {self.memory_bytes}, but module {name!r} needs at least "
                    f"{least} bytes on every GPU, at any degree up to {self.gpus}"
                )

    def _check_types(self) -> None:
        for i, surface in enumerate(self.surfaces):
            if not isinstance(surface, ScalingSurface):
                raise PlanError(
                    f"surfaces[{i}] is {surface!r:.80}; it must be a ScalingSurface"
                )
        for i, edge in enumerate(self.edges):
            if not isinstance(edge, tuple | list) or len(edge) != 2:
                raise PlanError(
                    f"edges[{i}] is {edge!r:.80}; it must be a pair, (producer, consumer)"
                )
        object.__setattr__(self, "edges", tuple(map(tuple, self.edges)))
        if not isinstance(self.interference, Interference):
            raise PlanError(
                f"interference is {self.interference!r:.80}; it must be an Interference"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(surface.name for surface in self.surfaces)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        return tuple(1 << j for j in range(self.gpus.bit_length()))

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count, steps = len(self.surfaces), self.steps
        seconds = np.full((count, len(self.degrees), steps + 1), np.inf)
        memory = np.full((count, len(self.degrees)), -1, np.int64)
        bandwidth = np.zeros((count, steps + 1))
        for m, surface in enumerate(self.surfaces):
            quotas = [
                q for q in range(1, steps + 1)
                if surface.quotas[0] * steps <= q * surface.steps <= surface.quotas[-1] * steps
            ]
            measured = [d for d in self.degrees if surface.degrees[0] <= d <= surface.degrees[-1]]
            if not quotas or not measured:
                raise PlanError(
                    f"{surface.name} was sampled at degrees {surface.degrees} and quotas "
                    f"{surface.quotas} of {surface.steps}; it needs a power of two up to "
                    f"{self.gpus} and a multiple of 1/{steps} among them"
                )
            for q in quotas:
                bandwidth[m, q] = surface.bandwidth_at(q, steps)
            for j, degree in enumerate(self.degrees):
                if degree not in measured:
                    continue
                memory[m, j] = surface.memory_at(degree)
                if self.allowed is not None and degree not in self.allowed[m]:
                    continue
                if self.memory_bytes is None or memory[m, j] <= self.memory_bytes:
                    for q in quotas:
                        seconds[m, j, q] = surface.seconds_at(degree, q, steps)
        return seconds, memory, bandwidth

    @property
    def seconds(self) -> np.ndarray:
        """(M, J, steps + 1) seconds of each module alone, by log2 of the degree and quota; infinite
        where the surface has no samples or the module does not fit."""
        return self._tables[0]

    @property
    def memory(self) -> np.ndarray:
        """(M, J) int64 bytes on each GPU, by module and log2 of the degree; -1 if not sampled."""
        return self._tables[1]

    @property
    def bandwidth(self) -> np.ndarray:
        """(M, steps + 1) share of a GPU's bandwidth, by module and quota."""
        return self._tables[2]

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For every module, the set (as bits) of modules that must run before it."""
        index = {name: m for m, name in enumerate(self.names)}
        predecessors = [0] * len(self.names)
        for producer, consumer in self.edges:
            predecessors[index[consumer]] |= 1 << index[producer]
        for _ in range(len(predecessors)):
            closed = list(predecessors)
            for m, earlier in enumerate(predecessors):
                for predecessor in bits(earlier):
                    closed[m] |= predecessors[predecessor]
            if closed == predecessors:
                break
            predecessors = closed
        return tuple(predecessors)

    @cached_property
    def related(self) -> tuple[int, ...]:
        """For every module, the set of modules that cannot share a stage with it."""
        result = list(self.ancestors)
        for m, ancestors in enumerate(self.ancestors):
            for ancestor in bits(ancestors):
                result[ancestor] |= 1 << m
        return tuple(result)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Sets of modules with equal length of the longest path from a source, in order."""
        depth: dict[int, int] = {}
        for m in sorted(range(len(self.names)), key=lambda m: self.ancestors[m].bit_count()):
            depth[m] = 1 + max((depth[a] for a in bits(self.ancestors[m])), default=-1)
        result = [0] * (max(depth.values()) + 1)
        for m, level in depth.items():
            result[level] |= 1 << m
        return tuple(result)


def bits(modules: int) -> Iterator[int]:
    while modules:
        low = modules & -modules
        yield low.bit_length() - 1
        modules ^= low
