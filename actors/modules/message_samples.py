"""Messages that have something of some of a microbatch's samples only.

Samples are ascending ranges; without any, it is all that there are. In dimension 0 a tensor has the
rows of its samples, one after another: one row of each, or as many as ``offsets`` says, by sample
the first row and behind the last one their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raymm.actors.modules.message import Message
from raymm.errors import InternalError
from raymm.scheduler.graph.sample_ranges import Range, rows_of

Samples = tuple[Range, ...]
Tensors = tuple[torch.Tensor, ...]


def cut(tensors: Tensors, has: Samples, reads: Samples, offsets: Sequence[int] | None) -> Tensors:
    """Of tensors with the rows of some samples those of others that are among them: views where
    they lie together.

    Args:
        tensors: (rows, ...).
        has: their samples.
        reads: which are taken.
        offsets: of the rows.
    """
    if has == reads:
        return tensors
    places = _places(has, reads, offsets)
    return tuple([_rows(tensor, places) for tensor in tensors])


def _rows(tensor: torch.Tensor, places: Sequence[Range]) -> torch.Tensor:
    parts = [tensor[lo:hi] for lo, hi in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut_message(
    message: Message, has: Samples, reads: Samples, offsets: Sequence[int] | None
) -> Message:
    """All that a message between modules has of some samples.

    Args:
        message: tensors (rows, ...).
        has, reads, offsets: as of :func:`cut`.
    """
    if has == reads:
        return message
    side = cut(tuple(message.side.values()), has, reads, offsets)
    return message._replace(
        tensors=cut(message.tensors, has, reads, offsets),
        side=dict(zip(message.side, side, strict=True)),
    )


def joined(parts: Sequence[Message]) -> Message:
    """Messages of samples that follow one another, of replicas of a module, as one."""
    first, *further = parts
    if not further:
        return first
    tensors = zip(*(part.tensors for part in parts), strict=True)
    return first._replace(
        tensors=tuple([torch.cat(of_name) for of_name in tensors]),
        side={name: torch.cat([part.side[name] for part in parts]) for name in first.side},
    )


def summed(
    parts: Sequence[Tensors], of: Sequence[Samples], samples: Samples,
    offsets: Sequence[int] | None,
) -> Tensors:
    """Tensor by tensor, the sum of gradients that are each of some of the samples; 0 where none is.

    Args:
        parts: gradients (rows, ...).
        of: their samples.
        samples: of the result.
        offsets: of the rows.
    """
    if all(own == samples for own in of):
        total, *further = parts
        for others in further:
            total = tuple([t + other for t, other in zip(total, others, strict=True)])
        return total
    count = sum(rows_of(part, offsets).size for part in samples)
    total = tuple([t.new_zeros((count, *t.shape[1:])) for t in parts[0]])
    for tensors, own in zip(parts, of, strict=True):
        places = _places(samples, own, offsets)
        for whole, tensor in zip(total, tensors, strict=True):
            row = 0
            for lo, hi in places:
                whole[lo:hi] += tensor[row : row + hi - lo]
                row += hi - lo
    return total


def _places(has: Samples, reads: Samples, offsets: Sequence[int] | None) -> list[Range]:
    """Where the rows of samples are among those of others."""
    places = []
    for part in reads:
        row = 0
        for own in has:
            rows = rows_of(own, offsets)
            if own.holds(part):
                lo, hi = rows_of(part, offsets)
                places.append(Range(row + lo - rows.lo, row + hi - rows.lo))
                break
            row += rows.size
        else:
            raise InternalError(f"samples {part} are not among {has}")
    return places
