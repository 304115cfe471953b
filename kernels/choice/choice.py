"""Choice between raymm's attention kernel on a GPU and a faster one on the same device.

``auto`` measures raymm's kernel and FlexAttention, forward and backward, once per shape class and
process, on the tensors of the first call, and then uses the faster one. Processes and runs may
choose differently, and their results then differ in the last bits, so ``auto`` is not the default.
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
"""Values of ``run.kernels``. ``raymm_unordered`` sums the query's gradient in any order: it needs
fewer products, and its results differ in the last bits from run to run."""
REPEATS = 3
"""Timed calls, after one that compiles and one for warm-up."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``attend(query, key, value, masks, scale=, softcap=)`` -> output and LSE."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShapeClass:
    """Class of calls that share one measurement.

    Attributes:
        heads: number of query heads and of key heads.
        batch, queries, keys: bit lengths of the sizes, so that a class spans a factor of two.
        needs_bits: True if masks hide kinds of keys.
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
        """Return the class of a call; arguments as in :func:`chosen_attention`."""
        batch, heads, queries, dim = query.shape
        return cls(
            str(query.device), str(query.dtype), (heads, key.shape[1]), (dim, value.shape[3]),
            batch.bit_length(), queries.bit_length(), key.shape[2].bit_length(),
            any(mask.needs_bits for mask in masks), softcap is not None,
            torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        )  # fmt: skip


class KernelChoice:
    """The attention kernels of a process; ``kernels`` is one of :data:`KERNELS`."""

    def __init__(self) -> None:
        self.kernels = "raymm"
        self._chosen: dict[ShapeClass, str] = {}

    def use(self, kernels: str) -> None:
        """Set ``kernels`` and forget all measurements; raise ValueError for an unknown value."""
        check_kernels(kernels)
        self.kernels = kernels
        self._chosen.clear()

    def fastest(self, shape: ShapeClass, contenders: Mapping[str, Callable[[], float]]) -> str:
        """Return the fastest contender of a shape class, measured on the first call. Contenders
        that raise are excluded.

        Args:
            contenders: functions that measure a contender in seconds, by name; the first wins a
                tie.

        Raises:
            Exception: the error of the first contender, if all raise.
        """
        if shape not in self._chosen:
            seconds: dict[str, float] = {}
            errors: list[Exception] = []
            for name, measure in contenders.items():
                try:
                    seconds[name] = measure()
                except Exception as error:  # each kernel has its own limits and errors
                    _log.info("kernel %s failed: %s: %s", name, type(error).__name__, error)
                    errors.append(error)
            if not seconds:
                raise errors[0]
            self._chosen[shape] = min(seconds, key=seconds.__getitem__)
            _log.info("%s uses kernel %s; seconds: %s", shape, self._chosen[shape], seconds)
        return self._chosen[shape]

    def keep_to(self, shape: ShapeClass, name: str) -> None:
        """Use a contender for a shape class from now on, overriding any measurement."""
        self._chosen[shape] = name


KERNEL_CHOICE = KernelChoice()
"""The choice of this process."""


def check_kernels(kernels: str) -> None:
    """Raise ValueError if ``kernels`` is not one of :data:`KERNELS`."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; accepted: {', '.join(KERNELS)}")


def chosen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    masks: tuple[AttentionMask, ...], *, scale: float | None, softcap: float | None, own: Attend,
) -> Attend:  # fmt: skip
    """Return the attention function for a call on a device with several kernels.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        masks: one per sequence.
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
        except Exception as error:  # for example too many recompilations
            _log.warning("flex attention failed, using raymm's kernel instead: %s", error)
            KERNEL_CHOICE.keep_to(shape, "raymm")
            return own(query, key, value, masks, **options)

    return flex_while_it_can


def seconds(
    attend: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], backward: bool
) -> float:
    """Return the shortest duration of several calls, in seconds.

    Args:
        tensors: its inputs; detached copies that share their memory are passed.
    """
    device = tensors[0].device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    took = []
    # Hide these calls from the hooks of the surrounding forward pass: recomputation counts saved
    # tensors.
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
