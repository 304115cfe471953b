"""Detection of non-finite values in a step. Values are recorded on the device during the step; the
host reads them only if the step is skipped.

The sum over processes for the gradient norm also includes zero times every loss. A loss that is NaN
or infinite on any process therefore makes the norm NaN on all of them, without further
communication, and all of them skip the step. A norm that overflows in fp32 is recomputed in fp64.
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

# Largest number of notes between two updates; older notes are dropped.
MAX_NOTES = 2**16
# Largest number of parameter names in a report.
MAX_NAMES = 3


class Place(NamedTuple):
    """Location of non-finite values.

    Attributes:
        kind: a stage's output, the gradient that it returned, or the gradients of its parameters,
            summed over microbatches, replicas and processes.
        batch, microbatch: number of the batch among the accumulated ones, and of the microbatch; -1
            if unknown.
        of: stage whose output or output gradient it is.
        rows: indices in the tensor's first dimension of non-finite rows; empty if unknown.
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
    """Arguments of :meth:`FiniteObserver.saw`, converted to a place only on request."""

    kind: Literal["output", "gradient"]
    stage: StageId
    batch: int
    microbatch: int
    of: StageId
    rows: tuple[int, int] | None
    count: int


_Noted = tuple[_Note, torch.Tensor]
"""Note with a sum per row, which is not finite if a value of the row is not."""


class _Batch:
    """Notes of a finished batch, with all sums in one tensor. Many small long-lived tensors would
    fragment the memory that later batches reuse."""

    def __init__(self, noted: Sequence[_Noted]) -> None:
        self.notes = [note for note, _ in noted]
        self._shapes = [sums.shape for _, sums in noted]
        self._sums = torch.cat([sums.view(-1) for _, sums in noted])

    def noted(self) -> list[_Noted]:
        flat_sums = self._sums.split([shape.numel() for shape in self._shapes])
        sums = (flat.view(shape) for flat, shape in zip(flat_sums, self._shapes, strict=True))
        return list(zip(self.notes, sums, strict=True))


class FiniteObserver:
    """Observer of the batches of an update. Only :meth:`places` waits for the device. Forwards
    change running statistics (batch norm) of ``modules``, so these are copied before the first
    batch, in case the update is skipped."""

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._norms = [
            child for module in modules for child in module.modules()
            if isinstance(child, _NormBase)
        ]
        self._statistics: list[tuple[_NormBase, str, torch.Tensor]] | None = None
        self._past: deque[_Batch] = deque()
        self._kept = 0  # number of their notes
        self._noted: deque[_Noted] = deque(maxlen=MAX_NOTES)  # notes of the current batch
        self._losses: list[torch.Tensor] = []
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._batches = 0

    def begin(self) -> None:
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
        self._losses.append(value.detach())

    def losses(self) -> torch.Tensor:
        """Return 0 (float64, on the device) if all losses since the last update are finite, else
        NaN."""
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
        """Record tensors that a stage sends forward or backward.

        Args:
            kind, stage, microbatch, of: see :class:`Place`; ``of`` is the stage by default.
            tensors: (rows, ...), or a scalar for all rows; ignored unless floating point.
            rows: half-open range of the rows in the microbatch; all rows by default.
            count: rows of the whole microbatch, if ``rows`` is given.
        """
        batch = self._batches - 1
        for tensor in tensors:
            if tensor.is_floating_point():
                sums = _row_sums(tensor)
                note = _Note(kind, stage, batch, microbatch, of or stage, rows, count)
                self._noted.append((note, sums))

    def places(self) -> list[Place]:
        """Return the locations of non-finite values since the last update. Waits for the device."""
        places = []
        noted = [*chain.from_iterable(batch.noted() for batch in self._past), *self._noted]
        for (kind, stage, batch, microbatch, source, rows, count), sums in noted:
            bad = (~torch.isfinite(sums)).cpu()
            if bad.any():
                size = len(sums) if sums.dim() else 0
                first, last = rows or (0, size)
                bad_rows = bad.nonzero()[:, 0] + first if bad.dim() else range(first, last)
                count = size if rows is None else count
                places.append(
                    Place(kind, stage, batch, microbatch, source, tuple(map(int, bad_rows)), count)
                )
        return places

    def restore_statistics(self) -> None:
        """Restore running statistics to their values before the batches since the last update."""
        for norm, name, saved in self._statistics or ():
            norm.get_buffer(name).copy_(saved)

    def clear(self) -> None:
        self._past.clear()
        self._kept = 0
        self._noted.clear()
        self._losses.clear()
        self._zero = torch.zeros_like(self._zero)
        self._statistics = None
        self._batches = 0


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    # At least fp32, so that a sum of finite values overflows only if the values nearly do.
    dtype = torch.float32 if tensor.itemsize < 4 else tensor.dtype
    dims = tensor.dim()
    if dims < 2:
        return tensor.detach().to(dtype, copy=True)
    summed_dims = _ROW_DIMS[dims] if dims < len(_ROW_DIMS) else tuple(range(1, dims))
    return tensor.detach().sum(summed_dims, dtype=dtype)


_ROW_DIMS = [(), (), (1,), (1, 2), (1, 2, 3)]


def parameter_places(
    gradients: Iterable[tuple[tuple[StageId, str], torch.Tensor | None]]
) -> list[Place]:
    """Return a place for every stage with a parameter whose gradient is not finite."""
    names: dict[StageId, list[str]] = {}
    for (stage, name), gradient in gradients:
        if gradient is not None and not is_finite(gradient):
            names.setdefault(stage, []).append(name)
    return [
        Place("parameters", stage, names=tuple(named[:MAX_NAMES]), count=len(named))
        for stage, named in names.items()
    ]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all values are finite; integers always are."""
    tensor = _countable(tensor)
    if not tensor.is_floating_point():
        return True
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    if math.isfinite(float(tensor.sum(dtype=dtype))):  # many times faster than checking each value
        return True
    return bool(torch.isfinite(tensor).all())  # a sum of finite values may overflow


def _countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a real dtype that supports sums: complex numbers as pairs, 8-bit
    floats as fp32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors with non-finite values, each once and with the number of such
    values."""
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
    """Yield a process's parameters and optimizer state under their checkpoint names."""
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{stage.module}/{name}", local_part(parameter.detach())
    for (stage, name, key), value in state.items():
        yield f"optimizer/{stage.module}/{name}/{key}", value
