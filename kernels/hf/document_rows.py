"""Layers that mix tokens by other means than attention, called with one document per row.

Short convolutions, linear attention and state-space layers carry state from token to token and
ignore masks, so in a row of several documents they leak state into the next document. transformers
has arguments for some of them (``seq_idx``, ``cu_seq_lens_q``), which only some kernels read and
torch's own paths ignore. This module calls such a layer with one document per row, padded on the
right. No earlier token sees the padding, so any implementation of the layer works unchanged.

Legend: ``B`` rows, ``T`` tokens of a row, ``D`` documents, ``L`` tokens of the longest document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from raymm.kernels.host_copies import to_device

DOCUMENTS_ARGUMENT = "raymm_documents"
"""Keyword argument of a model's forward, which passes it to its blocks like a ``raymm_mask``: the
lengths of the documents of each row, in order, T in sum; or a :class:`SharedRows` if tokens are
split over processes."""

Lengths = tuple[tuple[int, ...], ...]
_MASK = "attention_mask"  # name of the padding mask in transformers


class DocumentRows:
    """Converter between packed rows, with the given document lengths, and a row per document."""

    def __init__(self, lengths: Lengths) -> None:
        flat = torch.tensor([n for row in lengths for n in row], dtype=torch.int64, device="cpu")
        self.shape = (len(lengths), sum(lengths[0]))
        starts = flat.cumsum(0) - flat
        positions = torch.arange(int(flat.max()), device="cpu")
        is_token = positions < flat[:, None]
        # Padding repeats a document's last token, so it is as finite as that one.
        self._taken = starts[:, None] + positions.minimum(flat[:, None] - 1)
        self._back = is_token.flatten().nonzero()[:, 0]

    def split(self, value: Any) -> Any:
        """Convert (B, T, ...) to (D, L, ...), also in tuples and lists; keep other values."""
        if isinstance(value, list | tuple):
            return type(value)(self.split(entry) for entry in value)
        if not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != self.shape:
            return value
        indices = to_device(self._taken, value.device)
        rows = value.flatten(0, 1).index_select(0, indices.flatten())
        return rows.unflatten(0, tuple(indices.shape))

    def join(self, value: Any) -> Any:
        """Convert (D, L, ...) back to (B, T, ...), like :meth:`split`."""
        if isinstance(value, list | tuple):
            return type(value)(self.join(entry) for entry in value)
        shape = tuple(self._taken.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != shape:
            return value
        indices = to_device(self._back, value.device)
        return value.flatten(0, 1).index_select(0, indices).unflatten(0, self.shape)


class SharedRows:
    """Converter for rows whose tokens are split over processes. Every process calls the layer with
    all tokens and keeps its own tokens of the output.

    Args:
        lengths: lengths of the documents of each row.
        positions: positions of every process's tokens within a row; each position occurs once.
        gather: converts (B, t, ...) of this process's tokens to (B, T, ...) of all, in the order of
            processes.
        real: (B, T) on the host, 0 for padding; None if layers get no padding mask. Needed because
            the tokens of one process may have no padding while others have.
    """

    def __init__(
        self, lengths: Lengths, positions: Sequence[torch.Tensor], rank: int,
        gather: Callable[[torch.Tensor], torch.Tensor], real: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._gather, self._real = DocumentRows(lengths), gather, real
        self._in_sequence, self._own = torch.cat(list(positions)).argsort(), positions[rank]
        self.shape = (len(lengths), len(self._own))

    def split(self, value: Any) -> Any:
        """Convert (B, t, ...) to (D, L, ...), also in tuples and lists; keep other values."""
        if isinstance(value, list | tuple):
            return type(value)(self.split(entry) for entry in value)
        if not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != self.shape:
            return value
        gathered = self._gather(value.contiguous())
        return self._rows.split(
            gathered.index_select(1, to_device(self._in_sequence, value.device))
        )

    def of_call(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments ``args`` and ``kwargs`` of a layer's ``forward`` for all tokens,
        with the padding mask of all tokens. The mask that the model made from this process's tokens
        is dropped, because all processes must gather the same arguments."""
        parameters = inspect.signature(forward).parameters
        if self._real is None or _MASK not in parameters:
            return tuple(map(self.split, args)), {n: self.split(v) for n, v in kwargs.items()}
        names = [name for name, _ in zip(parameters, args, strict=False)]
        arguments = {**dict(zip(names, args, strict=True)), **kwargs}
        arguments.pop(_MASK, None)
        converted = {name: self.split(value) for name, value in arguments.items()}
        device = next(v for v in converted.values() if isinstance(v, torch.Tensor)).device
        return (), {**converted, _MASK: self._rows.split(to_device(self._real, device))}

    def join(self, value: Any) -> Any:
        """Convert (D, L, ...) back to (B, t, ...), like :meth:`split`."""
        if isinstance(value, list | tuple):
            return type(value)(self.join(entry) for entry in value)
        joined = self._rows.join(value)
        if joined is value:
            return value
        return joined.index_select(1, to_device(self._own, joined.device))


def mix_by_documents(
    blocks: Iterable[nn.Module], mixers: Collection[str]
) -> Callable[[], None]:
    """Convert the inputs of some layers to one document per row while the model gets documents.

    Args:
        blocks: blocks of a model; the conversion runs inside their recomputation, if any.
        mixers: class names of the layers to convert.

    Returns:
        A function that restores the layers.
    """
    previous: list[tuple[nn.Module, Any]] = []

    def call_by(module: nn.Module, function: Callable[..., Any], current: list) -> None:
        previous.append((module, vars(module).get("forward")))
        module.forward = partial(function, module.forward, current)

    for block in blocks:
        current: list[DocumentRows | SharedRows] = []
        for module in list(block.modules()):
            if type(module).__name__ in mixers:
                call_by(module, _by_documents, current)
        call_by(block, _with_documents, current)

    def undo() -> None:
        for module, forward in reversed(previous):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward

    return undo


def _with_documents(
    forward: Callable[..., Any], current: list[DocumentRows | SharedRows], *args: Any,
    raymm_documents: Lengths | SharedRows | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    rows = raymm_documents
    if isinstance(rows, tuple):
        rows = DocumentRows(rows) if any(len(row) > 1 for row in rows) else None
    if rows is None:
        return forward(*args, **kwargs)
    current.append(rows)
    try:
        return forward(*args, **kwargs)
    finally:
        current.clear()


def _by_documents(
    forward: Callable[..., Any], current: list[DocumentRows | SharedRows], *args: Any,
    **kwargs: Any,
) -> Any:
    if not current:
        return forward(*args, **kwargs)
    (rows,) = current
    if isinstance(rows, SharedRows):
        args, kwargs = rows.of_call(forward, args, kwargs)
        return rows.join(forward(*args, **kwargs))
    split = {name: rows.split(value) for name, value in kwargs.items()}
    return rows.join(forward(*map(rows.split, args), **split))
