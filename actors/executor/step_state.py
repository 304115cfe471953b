"""What a step under way has in memory between its instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.executor.split_backward import DeferredWeights
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.modules.message import Message, Routed, SourceSums
from raymm.scheduler.plan.stage import StageId

Received = list[Message]
"""What a stage gets of a microbatch, a message per producer."""
Leaves = list[Message]
"""What a stage received and computes gradients of, per producer that gets one."""


class StepState:
    """A step under way. Places of messages and activations are numbered by the compiled program.

    Args:
        messages, activations: how many places there are.
        inputs, meta: as given to :meth:`raymm.actors.executor.executor.Executor.run`.

    Attributes:
        learns: whether gradients follow from it.
        messages: from when they are there until they are used or sent.
        saved: leaves and output of forwards that wait for their backward.
        received: what came in of forwards that wait to be recomputed.
        deferred: parameter gradients that wait for their BACKWARD_WEIGHT.
        losses: by stage and microbatch.
        routed: by stage and microbatch, of mixtures of experts.
        by_source: as ``losses``, of microbatches whose samples say which source they are of.
        scores: of pairs of answers, the same of their rows' log-probabilities; of texts, of
            their next tokens.
        result: of the step, as far as it is known.
    """

    __slots__ = (
        "by_source", "deferred", "inputs", "learns", "losses", "messages", "meta", "received",
        "result", "routed", "saved", "scores",
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
        self.losses: dict[tuple[StageId, int], torch.Tensor] = {}
        self.routed: dict[tuple[StageId, int], Routed] = {}
        self.by_source: dict[tuple[StageId, int], SourceSums] = {}
        self.scores: dict[tuple[StageId, int], torch.Tensor] = {}
        self.result = StepResult()

    def finish(self) -> StepResult:
        """The result, with what was computed on the device."""
        result = self.result
        result.scores = {place: scores.tolist() for place, scores in self.scores.items()}
        result.losses = {place: float(loss) for place, loss in self.losses.items()}
        result.by_source = {
            place: {source: (float(total), n) for source, (total, n) in sums.items()}
            for place, sums in self.by_source.items()
        }
        loads: dict[str, torch.Tensor] = {}
        for routed in self.routed.values():
            for name, load in routed.loads.items():
                loads[name] = loads[name] + load if name in loads else load
        result.loads = {name: load.tolist() for name, load in loads.items()}
        counts = [r.counts for r in self.routed.values() if r.counts is not None]
        result.router_counts = torch.stack(counts).sum(0).tolist() if counts else None
        return result

    def take(self, place: int) -> Message:
        """A message, which nothing keeps any longer but who takes it."""
        message = self.messages[place]
        assert message is not None  # as check_program has proved
        self.messages[place] = None
        return message

    def stage_inputs(self, stage: StageId, microbatch: int) -> dict[str, Any] | None:
        """What a stage reads of a microbatch."""
        rows = self.inputs.get(stage)
        return rows[microbatch] if rows else None
