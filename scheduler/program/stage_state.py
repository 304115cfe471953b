"""Progress of a stage in a simulated program."""

from __future__ import annotations

from raymm.errors import InternalError
from raymm.scheduler.program.program import Instruction, Op

# Bits for the operations of a stage on a microbatch; each may run once.
FORWARD_DONE = 1
_KEPT = 2  # a forward or recomputation that kept what the backward needs
_CHECKPOINTED = 4  # a forward that kept only its inputs
_RECOMPUTED = 8
BACKWARD_DONE = 16  # backward of the inputs: their gradient can be sent
_SPLIT = 32  # the backward of the parameters is still to come
_WEIGHT = 64

_FORWARDS = {
    Op.FORWARD: FORWARD_DONE | _KEPT,
    Op.FORWARD_CHECKPOINTED: FORWARD_DONE | _CHECKPOINTED,
    Op.FORWARD_NO_GRAD: FORWARD_DONE,
}
_LATER = {Op.RECOMPUTE: _RECOMPUTED, Op.BACKWARD: BACKWARD_DONE, Op.BACKWARD_INPUT: BACKWARD_DONE,
          Op.BACKWARD_WEIGHT: _WEIGHT}  # fmt: skip


class StageState:
    """Progress of a stage: its rank, the bits above by microbatch, current and largest number of
    microbatches with live activations (-1 before the first), and seconds by operation."""

    __slots__ = ("done", "live", "peak", "rank", "seconds")

    def __init__(self, rank: int, seconds: dict[Op, float]) -> None:
        self.rank = rank
        self.done: dict[int, int] = {}
        self.live, self.peak = 0, -1
        self.seconds = seconds

    def compute(self, instruction: Instruction) -> None:
        """Run a compute instruction. Raise ``InternalError`` naming the rank if the instruction
        runs twice, or before what it needs."""
        op, microbatch, rank = instruction.op, instruction.microbatch, self.rank
        done = self.done.get(microbatch, 0)
        forward = _FORWARDS.get(op)
        if forward is not None:
            if done & FORWARD_DONE:
                raise InternalError(f"rank {rank}: {instruction} runs twice")
            self.done[microbatch] = forward
            if forward != FORWARD_DONE:
                self.live += 1
            self.peak = max(self.peak, self.live)
            return
        later = _LATER[op]
        if done & later:
            raise InternalError(f"rank {rank}: {instruction} runs twice")
        if not done & FORWARD_DONE:
            raise InternalError(f"rank {rank}: {instruction} before its forward")
        if op is Op.RECOMPUTE:
            if not done & _CHECKPOINTED:
                raise InternalError(f"rank {rank}: {instruction}, but its forward kept no inputs")
            self.done[microbatch] = done | _RECOMPUTED | _KEPT
            return
        if not done & _KEPT:
            missing = "was not recomputed" if done & _CHECKPOINTED else "kept nothing"
            raise InternalError(f"rank {rank}: {instruction}, but its forward {missing}")
        if op is Op.BACKWARD_WEIGHT and not done & _SPLIT:
            raise InternalError(f"rank {rank}: {instruction} before its backward_input")
        if op is Op.BACKWARD_INPUT:
            later |= _SPLIT  # activations stay live until backward_weight
        else:
            self.live -= 1
        self.done[microbatch] = done | later
