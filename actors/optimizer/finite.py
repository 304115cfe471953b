"""What of a step is not finite, and where: noted on the device while it runs, read by the host only
if the step is not applied.

The sum over processes that makes the gradient norm also has zero times every loss in it, so one
that is NaN or infinite anywhere makes the norm NaN for all, without another message; and all read
the norm anyway. So none applies the step. A norm that overflows in fp32 is computed again in fp64.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from raymm.actors.sharding.fully_sharded import local_part
from raymm.scheduler.plan.stage import NO_STAGE, StageId

# What is noted between two updates; beyond that the oldest is forgotten.
MAX_NOTES = 2**16
# Names of parameters in a report.
MAX_NAMES = 3


class Place(NamedTuple):
    """Something that was not finite.

    Attributes:
        kind: what a stage handed on, the gradient that it handed back, or its parameters'
            gradients, summed over microbatches, copies and processes.
        stage: which.
        batch: number of the batch, of those whose gradients were accumulated; -1 if unknown.
        microbatch: its number; -1 if unknown.
        of: the stage whose output, or whose output's gradient, it is.
        rows: of that tensor's first dimension, those that were not finite; none if unknown.
        count: how many rows the whole microbatch has there.
        names: of parameters.
    """

    kind: Literal["output", "gradient", "parameters"]
    stage: StageId
    batch: int = -1
    microbatch: int = -1
    of: StageId = NO_STAGE
    rows: tuple[int, ...] = ()
    count: int = 0
    names: tuple[str, ...] = ()


class _Note(NamedTuple):
    """A tensor, as given to :meth:`FiniteObserver.saw`. A place is made of it only if somebody
    asks."""

    kind: Literal["output", "gradient"]
    stage: StageId
    batch: int
    microbatch: int
    of: StageId
    rows: tuple[int, int] | None
    count: int


_Noted = tuple[_Note, torch.Tensor]
"""With a sum per row, which is not finite where one of the row's values is not."""


class _Batch:
    """Notes of a batch that is over, whose sums are one after another in one tensor: many small
    ones that live on would lie between buffers of later batches, which then take new memory."""

    def __init__(self, noted: Sequence[_Noted]) -> None:
        self.notes = [note for note, _ in noted]
        self._shapes = [sums.shape for _, sums in noted]
        self._sums = torch.cat([sums.view(-1) for _, sums in noted])

    def noted(self) -> list[_Noted]:
        """As it was."""
        parts = self._sums.split([shape.numel() for shape in self._shapes])
        sums = (part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))
        return list(zip(self.notes, sums, strict=True))


class FiniteObserver:
    """Watches the batches of an update. Nothing here waits for the device, but :meth:`places`.

    Args:
        device: where stages live.
        modules: the stages. Running statistics (batch norm) change in forwards, so they are kept
            from before the first batch, for an update that is not applied.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._norms = [
            part for module in modules for part in module.modules() if isinstance(part, _NormBase)
        ]
        self._statistics: list[tuple[_NormBase, str, torch.Tensor]] | None = None
        self._past: deque[_Batch] = deque()
        self._kept = 0  # notes of those
        self._noted: deque[_Noted] = deque(maxlen=MAX_NOTES)  # of the batch that is under way
        self._losses: list[torch.Tensor] = []
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._batches = 0

    def begin(self) -> None:
        """A batch begins whose gradients count for the next update."""
        self._batches += 1
        self.losses()
        self._end_batch()
        if self._statistics is None:
            self._statistics = [
                (norm, name, buffer.clone())
                for norm in self._norms if norm.training
                for name, buffer in norm._buffers.items() if buffer is not None
            ]

    def _end_batch(self) -> None:
        if not self._noted:
            return
        self._past.append(_Batch(self._noted))
        self._kept += len(self._noted)
        self._noted.clear()
        while self._kept > MAX_NOTES and len(self._past) > 1:
            self._kept -= len(self._past.popleft().notes)

    def loss(self, value: torch.Tensor) -> None:
        """A microbatch's loss, of any shape, counts for the next update."""
        self._losses.append(value.detach())

    def losses(self) -> torch.Tensor:
        """0 (float64, on the device) if all losses since the last update are finite, else NaN."""
        if self._losses:
            sums = torch.stack([value.double().sum() for value in self._losses])
            self._zero = self._zero + (sums * 0).sum()
            self._losses.clear()
        return self._zero

    def saw(
        self,
        kind: Literal["output", "gradient"],
        stage: StageId,
        microbatch: int,
        tensors: Iterable[torch.Tensor],
        of: StageId | None = None,
        rows: tuple[int, int] | None = None,
        count: int = 0,
    ) -> None:
        """A stage hands on, or back, these tensors.

        Args:
            kind, stage, microbatch, of: as of :class:`Place`; ``of`` is the stage by default.
            tensors: (rows, ...), or a scalar of all rows; others than of floating point are left
                out.
            rows: the first row in the microbatch, and one past the last; by default the tensors
                have all.
            count: rows of the whole microbatch, where ``rows`` are given.
        """
        batch = self._batches - 1
        for tensor in tensors:
            if tensor.is_floating_point():
                sums = _row_sums(tensor)
                note = _Note(kind, stage, batch, microbatch, of or stage, rows, count)
                self._noted.append((note, sums))

    def places(self) -> list[Place]:
        """What was not finite since the last update. Waits for the device."""
        places = []
        noted = [*chain.from_iterable(batch.noted() for batch in self._past), *self._noted]
        for (kind, stage, batch, microbatch, of, rows, count), sums in noted:
            bad = (~torch.isfinite(sums)).cpu()
            if bad.any():
                size = len(sums) if sums.dim() else 0
                first, last = rows or (0, size)
                bad_rows = bad.nonzero()[:, 0] + first if bad.dim() else range(first, last)
                count = size if rows is None else count
                places.append(
                    Place(kind, stage, batch, microbatch, of, tuple(map(int, bad_rows)), count)
                )
        return places

    def restore_statistics(self) -> None:
        """Running statistics are again what they were before the batches since the last update."""
        for norm, name, kept in self._statistics or ():
            norm.get_buffer(name).copy_(kept)

    def clear(self) -> None:
        """What was seen so far counts for nothing any more."""
        self._past.clear()
        self._kept = 0
        self._noted.clear()
        self._losses.clear()
        self._zero = torch.zeros_like(self._zero)
        self._statistics = None
        self._batches = 0


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    # In fp32 at least: a sum of finite values overflows only where they are about to.
    dtype = torch.float32 if tensor.itemsize < 4 else tensor.dtype
    dims = tensor.dim()
    if dims < 2:
        return tensor.detach().to(dtype, copy=True)
    rest = _ROW_DIMS[dims] if dims < len(_ROW_DIMS) else tuple(range(1, dims))
    return tensor.detach().sum(rest, dtype=dtype)


_ROW_DIMS = [(), (), (1,), (1, 2), (1, 2, 3)]


def parameter_places(
    gradients: Iterable[tuple[tuple[StageId, str], torch.Tensor | None]]
) -> list[Place]:
    """A place for every stage with a parameter's gradient that is not finite.

    Args:
        gradients: by (stage, name); None for none.
    """
    names: dict[StageId, list[str]] = {}
    for (stage, name), gradient in gradients:
        if gradient is not None and not is_finite(gradient):
            names.setdefault(stage, []).append(name)
    return [
        Place("parameters", stage, names=tuple(named[:MAX_NAMES]), count=len(named))
        for stage, named in names.items()
    ]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite."""
    tensor = _countable(tensor)
    if not tensor.is_floating_point():
        return True
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if math.isfinite(float(tensor.sum(dtype=dtype))):  # many times faster than to look at each
        return True
    return bool(torch.isfinite(tensor).all())  # a sum of finite values may overflow


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as numbers that can be looked at: of 8 bits there are no sums."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors that have values that are not finite, each once, with how many."""
    texts = {}
    for name, tensor in tensors:
        if not is_finite(tensor):
            values = _countable(tensor)
            bad = int((~torch.isfinite(values)).sum())
            texts[name] = f"{name} ({bad} of {values.numel()} values)"
    return list(texts.values())


def named_tensors(
    modules: Mapping[StageId, nn.Module], state: Mapping[tuple[StageId, str, str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and optimizer state of a process, under their names in checkpoints.

    Args:
        modules: by stage.
        state: by stage, parameter and key.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{stage.module}/{name}", local_part(parameter.detach())
    for (stage, name, key), value in state.items():
        yield f"optimizer/{stage.module}/{name}/{key}", value
