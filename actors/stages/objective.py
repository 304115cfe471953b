"""Results of a language model's last stage: losses, log-probabilities and next tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.message import Message, MicrobatchContext, SourceSums
from raymm.actors.stages.item_shares import RowShares
from raymm.actors.stages.labels import Labelled
from raymm.actors.stages.texts.decoding import likeliest
from raymm.actors.stages.token_loss import TokenLoss, token_loss_sum
from raymm.kernels.collectives.gather_tokens import CONTRIBUTOR
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.cross_entropy import (
    token_cross_entropy_sum,
    vocabulary_parallel_cross_entropy_sum,
)
from raymm.kernels.preference import PreferenceLoss

Totals = tuple[torch.Tensor | None, SourceSums, torch.Tensor | None]
"""The undivided loss, the part of each source, and the rows' log-probabilities."""


class Objective:
    """Cross entropy of the labels; next tokens where a microbatch is decoded.

    The loss is the sum of cross entropies over label tokens divided by the number of label tokens
    of the entire step (``context.label_tokens``). The head runs only on labelled positions.

    Args:
        module: language model; None for stages before the last, which have no results.
        token_loss: custom loss in place of the cross entropy of tokens.

    Raises:
        TypeError: the model has no head.
    """

    def __init__(self, module: Any, token_loss: TokenLoss | None = None) -> None:
        self._token_loss = token_loss
        self._labelled: Labelled | None = None
        self._hook: Any = None
        self._vocabulary: tuple[int, TensorGroup | None] = (0, None)
        self._tokens: Exchange | None = None
        if module is None:
            return
        head = module.get_output_embeddings()
        if head is None:
            raise TypeError(f"{type(module).__name__} has no output embeddings (no lm_head)")
        self._hook = head.register_forward_pre_hook(self._keep_labelled_rows)

    def detach(self) -> None:
        """Remove the hook of the head."""
        if self._hook is not None:
            self._hook.remove()

    def shard_vocabulary(self, start: int, group: TensorGroup) -> None:
        """Set the first column of this process's logits; ``group`` has the other columns."""
        self._vocabulary = start, group

    def share_tokens(self, exchange: Exchange) -> None:
        """Set the processes that split the rows' tokens."""
        self._tokens = exchange

    def labels(
        self, targets: torch.Tensor, device: torch.device, context: MicrobatchContext
    ) -> Labelled | None:
        """Return the positions of targets (B, T), on the host, whose logits are needed."""
        if self._hook is None:
            return None
        return Labelled(targets, device, context.decode is not None)

    @contextmanager
    def only(self, labelled: Labelled | None) -> Iterator[None]:
        """Context manager in which the head runs on these positions only."""
        self._labelled = labelled
        try:
            yield
        finally:
            self._labelled = None

    def _keep_labelled_rows(self, head: nn.Module, args: tuple[torch.Tensor]) -> Any:
        if self._labelled is None or args[0].shape[:2] != self._labelled.shape:
            return None  # ProphetNet's head makes several predictions per row
        return (self._labelled.of(args[0])[None],)

    def outcome(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Message:
        """Return a message with the loss, the next tokens, or the rows' log-probabilities.

        Args:
            reference: (B,) reference log-probabilities of all rows of the microbatch.
        """
        rows = labelled.of(logits) if logits.shape[:2] == labelled.shape else logits[0]
        if context.decode is not None:
            return Message((), {}, scores=likeliest(rows, *self._vocabulary))
        total, sums, scores = self._totals(labelled, rows, context, reference)
        # None for references
        loss = None if total is None else total / max(context.label_tokens, 1)
        return Message((), {}, (), loss, None, sums, scores)

    def _totals(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Totals:
        total = self._loss_sum(logits, labelled.targets)
        return total, labelled.by_source(self._loss_sum, logits, total), None

    def _loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of logits (N, V) and targets (N,)."""
        if self._token_loss is not None:
            return token_loss_sum(self._token_loss, logits, targets)
        start, group = self._vocabulary
        if group is None:
            return token_cross_entropy_sum(logits, targets)
        return vocabulary_parallel_cross_entropy_sum(logits, targets, start, group)


class PreferenceObjective(Objective):
    """Loss of answer pairs, whose labels encode their row.

    A process without rows computes another process's row, with no effect. Of the processes that
    split the rows' tokens, each has the gradient for its own tokens, and only the first one returns
    a non-zero loss.

    Args:
        rows: the processes that split the rows.
    """

    def __init__(self, module: Any, loss: PreferenceLoss, rows: RowShares) -> None:
        super().__init__(module)
        self._loss, self._rows = loss, rows

    def _totals(
        self, labelled: Labelled, logits: torch.Tensor, context: MicrobatchContext,
        reference: torch.Tensor | None,
    ) -> Totals:
        rows = self._rows.own(len(context.sample_ids))
        if not rows:
            nothing = self._loss_sum(logits, labelled.targets)
            return (
                None if reference is None else nothing, {}, nothing.detach().new_zeros(0)
            )
        scores = -labelled.row_sums(self._loss_sum, logits, rows)
        if self._tokens is not None:
            scores = _summed(scores, self._tokens)
        if reference is None:
            return None, {}, scores
        total = self._loss(scores, reference[rows.start : rows.stop])
        if self._tokens is not None and self._tokens.rank != CONTRIBUTOR:
            total = total - total.detach()
        return total, {}, scores


def _summed(scores: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sum over processes in rank order, for identical bits; only the local part has a gradient."""
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    local = scores.detach()
    received = exchange.start(
        [(rank, local) for rank in peers],
        [(rank, (tuple(local.shape), local.dtype)) for rank in peers], local.device,
    ).wait()
    scores_of = dict(zip(peers, received, strict=True)) | {exchange.rank: scores}
    return torch.stack([scores_of[rank] for rank in range(exchange.size)]).sum(0)
