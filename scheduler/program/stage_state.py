"""What has been done of a stage while a program is played."""

from __future__ import annotations

from raymm.errors import InternalError
from raymm.scheduler.program.program import Instruction, Op

# What can be done with a stage and a microbatch, each once, as bits.
FORWARD_DONE = 1
_KEPT = 2  # a forward, or a recomputation, that kept what the backward needs
_CHECKPOINTED = 4  # a forward that kept its inputs
_RECOMPUTED = 8
BACKWARD_DONE = 16  # of the inputs: their gradient can be sent
_SPLIT = 32  # such that that of the parameters is still to come
_WEIGHT = 64

_FORWARDS = {
    Op.FORWARD: FORWARD_DONE | _KEPT,
    Op.FORWARD_CHECKPOINTED: FORWARD_DONE | _CHECKPOINTED,
    Op.FORWARD_NO_GRAD: FORWARD_DONE,
}
_LATER = {Op.RECOMPUTE: _RECOMPUTED, Op.BACKWARD: BACKWARD_DONE, Op.BACKWARD_INPUT: BACKWARD_DONE,
          Op.BACKWARD_WEIGHT: _WEIGHT}  # fmt: skip


class StageState:
    """What has been done of a stage: the rank it is on, by microbatch the bits above, the number
    of microbatches whose activations live (-1: it has run nothing), and seconds by operation."""

    __slots__ = ("done", "live", "peak", "rank", "seconds")

    def __init__(self, rank: int, seconds: dict[Op, float]) -> None:
        self.rank = rank
        self.done: dict[int, int] = {}
        self.live, self.peak = 0, -1
        self.seconds = seconds


def compute(rank: int, instruction: Instruction, state: StageState) -> None:
    """A rank computes: what of the stage is done, and which activations live, afterwards.

    Args:
        rank: for errors.
        instruction: a compute instruction.
        state: of its stage; changed.

    Raises:
        InternalError: it comes twice, or before what it needs.
    """
    op, microbatch = instruction.op, instruction.microbatch
    done = state.done.get(microbatch, 0)
    forward = _FORWARDS.get(op)
    if forward is not None:
        if done & FORWARD_DONE:
            raise InternalError(f"rank {rank}: {instruction} runs twice")
        state.done[microbatch] = forward
        if forward != FORWARD_DONE:
            state.live += 1
        state.peak = max(state.peak, state.live)
        return
    later = _LATER[op]
    if done & later:
        raise InternalError(f"rank {rank}: {instruction} runs twice")
    if not done & FORWARD_DONE:
        raise InternalError(f"rank {rank}: {instruction} before its forward")
    if op is Op.RECOMPUTE:
        if not done & _CHECKPOINTED:
            raise InternalError(f"rank {rank}: {instruction}, but its forward kept no inputs")
        state.done[microbatch] = done | _RECOMPUTED | _KEPT
        return
    if not done & _KEPT:
        missing = "was not recomputed" if done & _CHECKPOINTED else "kept nothing"
        raise InternalError(f"rank {rank}: {instruction}, but its forward {missing}")
    if op is Op.BACKWARD_WEIGHT and not done & _SPLIT:
        raise InternalError(f"rank {rank}: {instruction} before its backward_input")
    if op is Op.BACKWARD_INPUT:
        later |= _SPLIT  # lives on until its backward_weight
    else:
        state.live -= 1
    state.done[microbatch] = done | later
