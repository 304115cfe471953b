"""Which kernel computes attention on a GPU: raymm's, or the one that is faster on this device.

``auto`` measures raymm's kernel and FlexAttention forward and backward, once per shape class and
process, on the tensors of the first call, and keeps to the faster one. Processes may choose
differently and runs too: their results then differ in the last bits, which is why it is not the
default.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raymm.kernels.choice.flex import flex_attention
from raymm.kernels.mask.mask import AttentionMask

KERNELS = ("raymm", "raymm_unordered", "auto")
"""Values of ``run.kernels``. Unordered are raymm's that sum up the query's gradient in any order:
fewer products, and results that differ in the last bits from run to run."""
REPEATS = 3
"""Calls that are timed, after one that compiles and one that warms up."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``attend(query, key, value, masks, scale=, softcap=)`` -> output and LSE."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShapeClass:
    """Calls that are taken to be alike: what is measured once.

    Attributes:
        device, dtype: by name.
        heads: of queries and of keys.
        head_dims: of keys and of values.
        batch, queries, keys: bits of their numbers, so that a class spans a factor of two.
        needs_bits: whether masks hide kinds of keys.
        softcap: whether scores are capped.
        backward: whether gradients are wanted.
    """

    device: str
    dtype: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: int
    queries: int
    keys: int
    needs_bits: bool
    softcap: bool
    backward: bool

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: tuple[AttentionMask, ...], softcap: float | None,
    ) -> ShapeClass:  # fmt: skip
        """Of a call.

        Args:
            query: (B, Hq, Tq, D).
            key: (B, Hk, Tk, D).
            value: (B, Hk, Tk, Dv).
            masks: one per sequence.
            softcap: of the scores.
        """
        batch, heads, queries, dim = query.shape
        return cls(
            str(query.device), str(query.dtype), (heads, key.shape[1]), (dim, value.shape[3]),
            batch.bit_length(), queries.bit_length(), key.shape[2].bit_length(),
            any(mask.needs_bits for mask in masks), softcap is not None,
            torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        )  # fmt: skip


class KernelChoice:
    """What a process computes attention with.

    Attributes:
        kernels: of :data:`KERNELS`.
    """

    def __init__(self) -> None:
        self.kernels = "raymm"
        self._chosen: dict[ShapeClass, str] = {}

    def use(self, kernels: str) -> None:
        """From now on.

        Raises:
            ValueError: kernels that are none of :data:`KERNELS`.
        """
        check_kernels(kernels)
        self.kernels = kernels
        self._chosen.clear()

    def fastest(self, shape: ShapeClass, contenders: Mapping[str, Callable[[], float]]) -> str:
        """The contender that took least, measured when its shape class is first asked for. One
        that raises is out.

        Args:
            shape: of the call.
            contenders: by name, what measures it, in seconds; the first is taken where several
                are as fast.

        Raises:
            Exception: of the first contender, where all raise.
        """
        if shape not in self._chosen:
            seconds: dict[str, float] = {}
            errors: list[Exception] = []
            for name, measure in contenders.items():
                try:
                    seconds[name] = measure()
                except Exception as error:  # each has its own limits, and its own words for them
                    _log.info("kernel %s failed: %s: %s", name, type(error).__name__, error)
                    errors.append(error)
            if not seconds:
                raise errors[0]
            self._chosen[shape] = min(seconds, key=seconds.__getitem__)
            _log.info("%s uses kernel %s; seconds: %s", shape, self._chosen[shape], seconds)
        return self._chosen[shape]

    def keep_to(self, shape: ShapeClass, name: str) -> None:
        """Take a contender for a shape class from now on, whatever was measured."""
        self._chosen[shape] = name


KERNEL_CHOICE = KernelChoice()
"""Of this process."""


def check_kernels(kernels: str) -> None:
    """Refuse what is none of :data:`KERNELS`.

    Raises:
        ValueError: naming it.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; accepted: {', '.join(KERNELS)}")


def chosen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    masks: tuple[AttentionMask, ...], *, scale: float | None, softcap: float | None, own: Attend,
) -> Attend:  # fmt: skip
    """What computes a call on a device that has several kernels.

    Args:
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D).
        value: (B, Hk, Tk, Dv).
        masks: one per sequence.
        scale: of the scores.
        softcap: of the scores.
        own: raymm's kernel.
    """
    if KERNEL_CHOICE.kernels != "auto" or not query.numel() or not key.numel():
        return own
    attends = {"raymm": own, "flex": flex_attention}
    shape = ShapeClass.of(query, key, value, masks, softcap)

    def measuring(attend: Attend) -> Callable[[], float]:
        return lambda: seconds(
            lambda *tensors: attend(*tensors, masks, scale=scale, softcap=softcap)[0],
            (query, key, value), shape.backward,
        )  # fmt: skip

    contenders = {name: measuring(attend) for name, attend in attends.items()}
    if KERNEL_CHOICE.fastest(shape, contenders) == "raymm":
        return own

    def flex_while_it_can(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: tuple[AttentionMask, ...], **options: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        try:
            return flex_attention(query, key, value, masks, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as more lengths than it compiles for
            _log.warning("flex attention failed, using raymm's kernel instead: %s", error)
            KERNEL_CHOICE.keep_to(shape, "raymm")
            return own(query, key, value, masks, **options)

    return flex_while_it_can


def seconds(
    attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], backward: bool
) -> float:
    """Of the fastest of some calls, the backward pass included if it is wanted.

    Args:
        attend: gives the output.
        tensors: that it is given, or copies that share their memory.
        backward: whether gradients are taken.
    """
    device = tensors[0].device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    took = []
    # Not the forward pass under way: its hooks (recomputation counts what is saved) must not see
    # this one.
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        torch.autocast(device.type, enabled=False),
        torch.set_grad_enabled(backward),
    ):
        leaves = [t.detach().requires_grad_(backward) for t in tensors]
        for _ in range(REPEATS + 2):
            wait(device)
            start = time.perf_counter()
            out = attend(*leaves)
            if backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
            wait(device)
            took.append(time.perf_counter() - start)
    return min(took[2:])
