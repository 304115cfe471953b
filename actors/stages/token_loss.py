"""Losses of users in place of the cross entropy of tokens, as sums over tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raymm.errors import USER_CODE_RAISES, ConfigError, ModelError

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ACCEPTED = (
    "module:function, which returns the losses (N,) of N tokens for their logits (N, V) and labels "
    "(N,)"
)
# Tokens, and logits of each, of a trial.
_TOKENS, _WIDTH = 5, 16


def token_loss_sum(
    loss: TokenLoss, logits: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the sum of a custom loss over tokens, a scalar in fp32.

    Args:
        logits: (N, V), any floating dtype.
        targets: (N,) int64, no ignored entries. N may be 0.

    Raises:
        ModelError: the loss does not return a tensor (N,).
    """
    losses = loss(logits, targets)
    if not isinstance(losses, torch.Tensor) or losses.shape != targets.shape:
        shown = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ModelError(f"it returned {shown} for {len(targets)} tokens")
    return losses.float().sum()


def check_token_loss(field: str, loss: TokenLoss, vocabulary: int | None) -> None:
    """Try a custom loss on a few tokens on the CPU.

    Args:
        vocabulary: width of the logits; None if it is unknown.

    Raises:
        ConfigError: the loss raises, or its sums over microbatches and replicas would not be
            exact; names the field, the value and what is accepted.
    """
    try:
        reason = _reason(loss, vocabulary or _WIDTH)
    except USER_CODE_RAISES as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        name = f"{loss.__module__}:{getattr(loss, '__qualname__', type(loss).__qualname__)}"
        raise ConfigError(f"{field} is {name!r}: {reason}; accepted: {ACCEPTED}")


def _reason(loss: TokenLoss, width: int) -> str | None:
    """Return why a loss cannot be used, or None."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TOKENS, width, generator=generator).requires_grad_()
    targets = torch.randint(width, (_TOKENS,), generator=generator)
    total = token_loss_sum(loss, logits, targets)
    if not total.isfinite():
        return f"its sum is {float(total)}"
    if not total.requires_grad:
        return "it has no gradient"
    parts = [token_loss_sum(loss, logits[rows], targets[rows]) for rows in (slice(2), slice(2, 5))]
    if not torch.allclose(total, sum(parts, torch.zeros(())), 1e-5, 1e-6):
        return "the loss of a token depends on other tokens, or is random"
    token_loss_sum(loss, logits[:0], targets[:0])
    total.backward()
    return None
