"""In-memory state of a step between its instructions, and forwards that groups of microbatches
share.

The inputs of a group are concatenated by items, and every microbatch gets its items of the output.
Gradients add up in the group's output until the last microbatch's is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raymm.actors.executor.split_backward import DeferredWeights
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.modules.message import Message, Routed, SourceSums
from raymm.scheduler.plan.stage import StageId

Row = Mapping[str, Any] | None


def group_of(rows: Sequence[Row], microbatch: int, span: int) -> tuple[int, ...]:
    """Return the microbatches that share a forward with ``microbatch``, ascending: those of its
    ``span`` with inputs of the same names, dtypes and item shapes, because items are never padded.
    """
    first = microbatch - microbatch % span
    signature = _signature(rows[microbatch])
    return tuple(
        number for number in range(first, min(first + span, len(rows)))
        if number == microbatch or _signature(rows[number]) == signature
    )


def _signature(row: Row) -> object:
    if row is None:
        return None
    return tuple(
        (name, value.dtype, tuple(value.shape[1:])) if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in sorted(row.items())
    )


def joined_inputs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the concatenated inputs of the microbatches of a group."""
    return {
        name: torch.cat([row[name] for row in rows]) if isinstance(value, torch.Tensor) else value
        for name, value in rows[0].items()
    }


class GroupRun:
    """Output of a group's forward, until its backward.

    Args:
        split: returns the messages of the microbatches, given that of the group.
        with_grad: True if a backward follows.

    Attributes:
        parts: output of each microbatch.
    """

    def __init__(
        self, output: Message, split: Callable[[Message], list[Message]], with_grad: bool
    ) -> None:
        self._outputs = output.tensors
        self._leaves = tuple([
            t.detach().requires_grad_(with_grad and t.requires_grad) for t in output.tensors
        ])
        self.parts = split(output._replace(tensors=self._leaves))
        self._open = len(self.parts)

    def last_use(self) -> bool:
        """Count a microbatch that no longer needs the group; return True for the last one."""
        self._open -= 1
        return not self._open

    def gradients(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the outputs that have a gradient, with the gradients."""
        pairs = [
            (output, leaf.grad) for output, leaf in zip(self._outputs, self._leaves, strict=True)
            if leaf.grad is not None
        ]
        return tuple([output for output, _ in pairs]), tuple([grad for _, grad in pairs])


Received = list[Message]
"""Messages that a stage receives for a microbatch, one per producer."""
Leaves = list[Message]
"""Received messages that need gradients, one per producer that receives a gradient."""


class StepState:
    """State of a step in progress. The compiled program numbers the slots of messages and
    activations.

    Attributes:
        saved: leaves and output of forwards that wait for their backward.
        received: inputs of forwards that wait for their recomputation.
        deferred: parameter gradients that wait for their BACKWARD_WEIGHT.
        groups: groups of microbatches, by stage and microbatches, that share a forward and a
            backward.
    """

    __slots__ = (
        "by_source", "deferred", "groups", "inputs", "learns", "losses", "messages", "meta",
        "received", "routed", "saved", "scores",
    )  # fmt: skip

    def __init__(
        self, messages: int, activations: int,
        inputs: Mapping[StageId, Sequence[dict[str, Any] | None]], meta: StepMeta,
    ) -> None:  # fmt: skip
        self.inputs, self.meta = inputs, meta
        self.learns = meta.training and not meta.counting
        self.messages: list[Any] = [None] * messages
        self.saved: list[Any] = [None] * activations
        self.received: list[Received | None] = [None] * activations
        self.deferred: list[DeferredWeights | None] = [None] * activations
        self.groups: dict[tuple[StageId, tuple[int, ...]], GroupRun] = {}
        self.losses: dict[tuple[StageId, int], torch.Tensor] = {}
        self.routed: dict[tuple[StageId, int], Routed] = {}
        self.by_source: dict[tuple[StageId, int], SourceSums] = {}
        self.scores: dict[tuple[StageId, int], torch.Tensor] = {}

    def result(self, labels: bytes, times: bytes) -> StepResult:
        """Return the step's result, with values read from the device; for the arguments, see
        :class:`StepResult`."""
        loads: dict[str, torch.Tensor] = {}
        for routed in self.routed.values():
            for name, load in routed.loads.items():
                loads[name] = loads[name] + load if name in loads else load
        counts = [r.counts for r in self.routed.values() if r.counts is not None]
        return StepResult(
            losses={key: float(loss) for key, loss in self.losses.items()},
            scores={key: scores.tolist() for key, scores in self.scores.items()},
            by_source={
                key: {source: (float(total), n) for source, (total, n) in sums.items()}
                for key, sums in self.by_source.items()
            },
            labels=labels,
            times=times,
            loads={name: load.tolist() for name, load in loads.items()},
            router_counts=torch.stack(counts).sum(0).tolist() if counts else None,
        )

    def take(self, place: int) -> Message:
        message = self.messages[place]
        assert message is not None  # verified by check_program
        self.messages[place] = None
        return message

    def stage_inputs(self, stage: StageId, microbatch: int) -> dict[str, Any] | None:
        rows = self.inputs.get(stage)
        return rows[microbatch] if rows else None
