"""What one GPU does in an iteration of a multiplexed program, as data.

Every GPU's process has a list of these. Slots are numbered: the stages of the mapping, then
those of losses that the mapping does not place. All slots run forward in order, then backward in
the reverse order. A ``Route`` comes after the ``Run`` of its slot and direction, on all GPUs that
take part; as all have them in the same order, none waits for another that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range


class Part(NamedTuple):
    """Samples of a node that a GPU works on in a slot."""

    node: str
    samples: Range


class SampleTransfer(NamedTuple):
    """Samples that go from one GPU to another (or stay, where ``peer`` is the GPU itself).

    Forward they are a node's output; backward, the gradient of it.
    """

    node: str
    peer: int
    samples: Range


@dataclass(frozen=True)
class Run:
    """Run a slot's nodes concurrently, on these samples."""

    slot: int
    direction: Direction
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Route:
    """Exchange what a slot has made. Returns at once; a later ``Run`` waits for what it needs.

    Attributes:
        sends, receives: transfers by the other GPU; of two GPUs, those between them come in the
            same order in the ``sends`` of the one and the ``receives`` of the other. Transfers that
            stay are in ``receives`` only.
    """

    slot: int
    direction: Direction
    sends: tuple[SampleTransfer, ...]
    receives: tuple[SampleTransfer, ...]


@dataclass(frozen=True)
class Barrier:
    """Wait until every GPU is at this slot."""

    slot: int
    direction: Direction


@dataclass(frozen=True)
class Reduce:
    """The gradients of these nodes' parameters are complete here: begin to sum them over the
    GPUs that have replicas."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Update:
    """Clip gradients and step the optimizer."""


@dataclass(frozen=True)
class Finish:
    """Wait for the sums of gradients."""


Instruction = Run | Route | Barrier | Reduce | Finish | Update


@dataclass(frozen=True)
class Slot:
    """What runs concurrently.

    Attributes:
        name: of the slot.
        quotas: per GPU, the quota of every node there, in steps of the mapping.
        placed: whether the mapping has it, and so predicts its seconds.
    """

    name: str
    quotas: Mapping[int, Mapping[str, int]]
    placed: bool = True


@dataclass(frozen=True)
class MultiplexProgram:
    """An iteration on all GPUs.

    Attributes:
        gpus: how many.
        batch: samples.
        slots: in forward order.
        replicas: GPUs that hold each node's parameters, ascending.
        needs: by (node, GPU): the samples of the node's output that the GPU reads.
        instructions: per GPU.
    """

    gpus: int
    batch: int
    slots: tuple[Slot, ...]
    replicas: Mapping[str, tuple[int, ...]]
    needs: Mapping[tuple[str, int], tuple[Range, ...]]
    instructions: tuple[tuple[Instruction, ...], ...]

    def describe(self) -> str:
        """A line per instruction and GPU, to read."""
        lines = []
        for gpu, listed in enumerate(self.instructions):
            lines += [f"gpu {gpu}: {said(instruction)}" for instruction in listed]
        return "\n".join(lines)


def said(instruction: Instruction) -> str:
    """An instruction in a line, to read."""
    kind = type(instruction).__name__.upper()
    if isinstance(instruction, Run):
        parts = ", ".join(f"{p.node}[{p.samples.lo}:{p.samples.hi}]" for p in instruction.parts)
        return f"{kind} {instruction.direction} slot {instruction.slot}: {parts}"
    if isinstance(instruction, Route):
        named = (("to", instruction.sends), ("from", instruction.receives))
        parts = [
            f"{p.node}[{p.samples.lo}:{p.samples.hi}] {way} {p.peer}"
            for way, transfers in named for p in transfers
        ]
        return f"{kind} {instruction.direction} slot {instruction.slot}: {', '.join(parts)}"
    if isinstance(instruction, Barrier):
        return f"{kind} {instruction.direction} slot {instruction.slot}"
    if isinstance(instruction, Reduce):
        return f"{kind} {', '.join(instruction.nodes)}"
    return kind
