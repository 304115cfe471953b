"""Programs: the instructions of each rank for one step, as small frozen tuples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId


class Op(StrEnum):
    """Operation of an instruction. An ``edge`` is a directed pair of stages."""

    FORWARD = "forward"  # run a stage on a microbatch and keep what its backward needs
    FORWARD_NO_GRAD = "forward_no_grad"  # run a stage under no_grad and keep nothing
    FORWARD_CHECKPOINTED = "forward_checkpointed"  # run a stage and keep only its inputs
    RECOMPUTE = "recompute"  # run a checkpointed forward again and keep what the backward needs
    BACKWARD = "backward"  # gradients of inputs and parameters, as far as needed
    BACKWARD_INPUT = "backward_input"  # B_d: gradients of inputs only; B_w follows
    BACKWARD_WEIGHT = "backward_weight"  # B_w: gradients of parameters, after B_d
    SEND = "send"  # start sending the stage's result for the edge; never blocks
    RECV = "recv"  # wait for the next message of the edge
    REDUCE_GRADS = "reduce_grads"  # sum gradients of parameters that live on several ranks
    CLIP_GRADS = "clip_grads"  # scale gradients by the norm over all ranks
    STEP = "step"  # optimizer update, then zero gradients


FORWARDS = frozenset({Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED})
BACKWARDS = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
COMPUTE = FORWARDS | BACKWARDS | {Op.RECOMPUTE}
OPTIMIZER_OPS = (Op.REDUCE_GRADS, Op.CLIP_GRADS, Op.STEP)


class Instruction(NamedTuple):
    """One instruction of a rank.

    ``peer`` is the stage at the other end of a SEND or RECV. The ``direction`` of a message is
    forward for outputs and backward for gradients, which travel from consumer to producer, so their
    edge is the reversed data edge.

    Adjacent compute instructions with the same ``group`` (a number that is unique on the rank) run
    concurrently: each module runs its instructions in order on its ``quota``, a share of the rank's
    multiprocessors. A group begins when all earlier instructions have ended, and later instructions
    wait for all of it. Without a group (-1) an instruction has the whole device.

    ``samples`` are ascending ranges of the microbatch's samples that the instruction or its message
    covers; empty means all of them.
    """

    op: Op
    stage: StageId = NO_STAGE
    microbatch: int = -1
    peer: StageId = NO_STAGE
    group: int = -1
    quota: float = 1.0
    direction: Direction = Direction.FORWARD
    samples: tuple[Range, ...] = ()

    @property
    def edge(self) -> Edge:
        """(from stage, to stage) of a SEND or RECV."""
        return (self.stage, self.peer) if self.op is Op.SEND else (self.peer, self.stage)

    def __str__(self) -> str:
        stage = f" {self.stage}" if self.stage.module else ""
        number = f" #{self.microbatch}" if self.microbatch >= 0 else ""
        number += f"[{', '.join(f'{lo}:{hi}' for lo, hi in self.samples)}]" if self.samples else ""
        arrow = {Op.SEND: f" -> {self.peer}", Op.RECV: f" <- {self.peer}"}.get(self.op, "")
        group = f" (group {self.group}, quota {self.quota:g})" if self.group >= 0 else ""
        return f"{self.op.value}{stage}{arrow}{number}{group}"


def group_end(instructions: Sequence[Any], index: int) -> int:
    """Return one past the last instruction (or task) of the group of ``instructions[index]``;
    without a group, return ``index + 1``."""
    group, end = instructions[index].group, index + 1
    while group >= 0 and end < len(instructions) and instructions[end].group == group:
        end += 1
    return end


class Program(NamedTuple):
    """Instructions of one step, in order, for each rank."""

    ranks: tuple[tuple[Instruction, ...], ...]

    def __iter__(self) -> Iterator[tuple[Instruction, ...]]:  # type: ignore[override]
        return iter(self.ranks)

    def with_optimizer_ops(self, ops: tuple[Op, ...]) -> Program:
        """Return the program followed on every rank by the collective operations ``ops``."""
        tail = tuple(Instruction(op) for op in ops)
        return Program(tuple(rank + tail for rank in self.ranks))

    def __str__(self) -> str:
        return "\n".join(
            f"rank {index}:\n" + "\n".join(f"  {instruction}" for instruction in rank)
            for index, rank in enumerate(self.ranks)
        )
