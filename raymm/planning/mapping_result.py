"""What came of planning a mapping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem


@dataclass(frozen=True)
class MappingResult:
    """A mapping, and what it follows from.

    Attributes:
        problem: what was mapped: surfaces, dependencies, GPUs, memory, interference.
        mapping: what to run, as a plan (:func:`raymm.plan_of_mapping`).
        source: where the times come from, in words.
        estimated: whether they are estimates, not measurements.
        interference: what is known of modules disturbing each other, in words.
        batch: samples of an iteration; None if nobody said.
        unfit: why the mapping does not fit in memory, if it does not.
        notes: remarks a person should see.
        needs: bytes on each GPU by the account of all plans, with messages and what the system and
            updates take; empty where only surfaces say what modules take.
    """

    problem: MappingProblem
    mapping: Mapping
    source: str
    estimated: bool
    interference: str
    batch: int | None = None
    unfit: str | None = None
    notes: tuple[str, ...] = ()
    needs: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration's forward and backward."""
        return self.mapping.seconds

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes on each GPU over the whole iteration: ``needs``, or :func:`gpu_memory`."""
        return self.needs or gpu_memory(self.problem, self.mapping)


def gpu_memory(problem: MappingProblem, mapping: Mapping) -> tuple[int, ...]:
    """Bytes on each GPU over a whole training iteration: all modules that it ever runs keep
    their weights there, and their activations until the backward, which goes through the stages
    in reverse. (The solver's limit is of one stage at a time.)"""
    used = [0] * mapping.gpus
    most: dict[tuple[int, str], int] = {}
    for stage in mapping.stages:
        for placement in stage.placements:
            degree = len(placement.gpus).bit_length() - 1
            size = int(problem.memory[problem.names.index(placement.module), degree])
            for gpu in placement.gpus:  # a sliced module's slices share its weights
                most[gpu, placement.module] = max(most.get((gpu, placement.module), 0), size)
    for (gpu, _), size in most.items():
        used[gpu] += size
    return tuple(used)
