"""Choice between raymm's attention kernel on a GPU and faster ones on the same device.

``auto`` measures raymm's kernel and those of libraries that can compute the masks, forward and
backward, once per shape class and process, on the tensors of the first call. The driver adds the
times of all processes and sends one choice to all of them with the next step; until then a class is
computed by raymm's kernel. Choices are stored in checkpoints, so a resumed run uses the same
kernels. Results of kernels differ in the last bits, so ``auto`` is not the default.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass

import torch

from raymm.kernels.choice.flex import flex_attention
from raymm.kernels.choice.library import (
    batch_form,
    library_kernels,
    sdpa_attention,
    varlen_attention,
)
from raymm.kernels.mask.mask import AttentionMask

KERNELS = ("raymm", "raymm_unordered", "auto")
"""Values of ``run.kernels``. ``raymm_unordered`` sums the query's gradient in any order: it needs
fewer products, and its results differ in the last bits from run to run."""
REPEATS = 3
"""Timed calls, after one that compiles and one for warm-up."""
OWN = "raymm"
"""Name of raymm's kernel among the contenders."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""``attend(query, key, value, masks, scale=, softcap=)`` -> output and LSE; None without LSE."""
Seconds = Mapping[str, Mapping[str, float]]
"""Shortest seconds of each contender by name, by key of a shape class."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShapeClass:
    """Class of calls that share one measurement.

    Attributes:
        heads: number of query heads and of key heads.
        batch, queries, keys: bit lengths of the sizes, so that a class spans a factor of two.
        mask: name of the masks' form; empty for others.
        needs_bits: True if masks hide kinds of keys.
        lse: True if the caller needs the LSE.
    """

    dtype: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: int
    queries: int
    keys: int
    mask: str
    needs_bits: bool
    softcap: bool
    backward: bool
    lse: bool = True

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: tuple[AttentionMask, ...], softcap: float | None, lse: bool = True,
    ) -> ShapeClass:  # fmt: skip
        """Return the class of a call; arguments as in :func:`chosen_attention`."""
        batch, heads, queries, dim = query.shape
        forms = batch_form(masks)
        return cls(
            str(query.dtype), (heads, key.shape[1]), (dim, value.shape[3]),
            batch.bit_length(), queries.bit_length(), key.shape[2].bit_length(),
            max((form.name for form in forms), key=len, default=""),
            any(mask.needs_bits for mask in masks), softcap is not None,
            torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)), lse,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Text under which checkpoints store the class's choice."""
        return " ".join(map(str, astuple(self)))


class KernelChoice:
    """The attention kernels of a process; ``kernels`` is one of :data:`KERNELS`."""

    def __init__(self) -> None:
        self.kernels = "raymm"
        self._driven = False
        self._chosen: dict[str, str] = {}
        self._measured: dict[str, dict[str, float]] = {}
        self._reported: set[str] = set()
        self._kept: set[str] = set()

    def use(self, kernels: str, driven: bool = False) -> None:
        """Set ``kernels`` and forget all measurements; raise ValueError for an unknown value.

        Args:
            driven: True if choices come from :meth:`decide`; False to choose by this process's
                measurements.
        """
        check_kernels(kernels)
        self.__init__()
        self.kernels, self._driven = kernels, driven

    def decide(self, chosen: Mapping[str, str]) -> None:
        """Use kernels by key of a shape class from now on, except where one failed here."""
        self._chosen.update({key: name for key, name in chosen.items() if key not in self._kept})

    def new_seconds(self) -> dict[str, dict[str, float]]:
        """Return the measurements since the last call."""
        new = {key: value for key, value in self._measured.items() if key not in self._reported}
        self._reported.update(new)
        return new

    def fastest(self, shape: ShapeClass, contenders: Mapping[str, Callable[[], float]]) -> str:
        """Return the contender to use for a shape class, which is measured on the first call if
        none was chosen before. Contenders that raise are excluded.

        Args:
            contenders: functions that measure a contender in seconds, by name; the first wins a
                tie, and is used until the driver's choice arrives.

        Raises:
            Exception: the error of the first contender, if all raise.
        """
        key = shape.key
        if key in self._chosen:
            return self._chosen[key]
        if key not in self._measured:
            self._measured[key] = _measure(key, contenders)
        seconds = self._measured[key]
        if not self._driven:
            self._chosen[key] = min(seconds, key=seconds.__getitem__)
            return self._chosen[key]
        return next(iter(seconds))

    def keep_to(self, shape: ShapeClass, name: str) -> None:
        """Use a contender for a shape class from now on, overriding measurements and choices."""
        self._chosen[shape.key] = name
        self._kept.add(shape.key)


KERNEL_CHOICE = KernelChoice()
"""The choice of this process."""


def _measure(key: str, contenders: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return the seconds of the contenders that work, in order."""
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
    _log.info("seconds of kernels for %s: %s", key, seconds)
    return seconds


def agreed(measured: Iterable[Seconds], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return one choice for each measured class that has none yet: the kernel with the fewest
    seconds over all processes, among those that work on each of them.

    Args:
        measured: new measurements by process, in a fixed order.
        chosen: earlier choices by key of a shape class.
    """
    by_class: dict[str, list[Mapping[str, float]]] = {}
    for seconds in measured:
        for key, of_process in seconds.items():
            if key not in chosen:
                by_class.setdefault(key, []).append(of_process)
    choices = {}
    for key, processes in by_class.items():
        common = [name for name in processes[0] if all(name in each for each in processes)]
        if common:
            choices[key] = min(common, key=lambda name: sum(each[name] for each in processes))
    return choices


def check_kernels(kernels: str) -> None:
    """Raise ValueError if ``kernels`` is not one of :data:`KERNELS`."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; accepted: {', '.join(KERNELS)}")


def chosen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    masks: tuple[AttentionMask, ...], *, own: Attend, lse: bool = True, **options: float | None,
) -> Attend:  # fmt: skip
    """Return the attention function for a call on a device with several kernels.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        masks: one per sequence.
        lse: True if the caller needs the LSE.
        options: scale and softcap of the call.
    """
    softcap = options["softcap"]
    if KERNEL_CHOICE.kernels != "auto" or not query.numel() or not key.numel():
        return own
    attends: dict[str, Attend] = {OWN: own, "flex": flex_attention}
    if not lse:
        by_name = {"sdpa": sdpa_attention, "varlen": varlen_attention}
        attends |= {name: by_name[name] for name in library_kernels(masks, softcap)}
    shape = ShapeClass.of(query, key, value, masks, softcap, lse)

    def measuring(attend: Attend) -> Callable[[], float]:
        return lambda: seconds(
            lambda *tensors: attend(*tensors, masks, **options)[0],
            (query, key, value), shape.backward,
        )  # fmt: skip

    contenders = {name: measuring(attend) for name, attend in attends.items()}
    name = KERNEL_CHOICE.fastest(shape, contenders)
    if name == OWN:
        return own
    if name not in attends:  # stored by another release
        _log.warning("the checkpoint names an unknown kernel, %s; using raymm's instead", name)
        KERNEL_CHOICE.keep_to(shape, OWN)
        return own
    attend = attends[name]

    def attend_while_it_can(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: tuple[AttentionMask, ...], **options: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        try:
            return attend(query, key, value, masks, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # for example too many recompilations
            _log.warning("kernel %s failed, using raymm's instead: %s", name, error)
            KERNEL_CHOICE.keep_to(shape, OWN)
            return own(query, key, value, masks, **options)

    return attend_while_it_can


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
