"""Slicing and joining of messages by samples and ports.

Samples are ascending ranges; no range means all samples. Dimension 0 of a tensor has the rows of
its samples: one each, or as given by ``offsets`` (each sample's first row, then the row count).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from raymm.actors.modules.message import Message
from raymm.errors import InternalError, ModelError
from raymm.scheduler.graph.sample_ranges import Range, rows_of
from raymm.scheduler.plan.port_routes import EdgePorts

Samples = tuple[Range, ...]
Tensors = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


# Side tensors "shape/float32/name" hold the shape of a floating-point tensor that is not sent.
SHAPE = "shape/"
# Side tensor of a gradient message: flags of the tensors that have a gradient.
USED = "used"


def shape_entry(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return name and value of a side tensor that holds the shape of a tensor that is not sent."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{SHAPE}{dtype}/{name}", torch.tensor(tensor.shape, device="cpu")


def with_ports(message: Message, ports: EdgePorts) -> Message:
    """Return the part of a stage's message that an edge carries."""
    carried = _carried(message, ports)
    side = {} if ports.alone else dict(message.side)
    for name, tensor in zip(message.names, message.tensors, strict=False):
        if name in ports.withheld:
            side.update([shape_entry(name, tensor)])
    return message._replace(
        tensors=tuple([message.tensors[n] for n in carried]), side=side,
        names=tuple([message.names[n] for n in carried]) if message.names else (),
    )


def of_all_ports(gradients: Gradients, message: Message, ports: EdgePorts) -> Gradients:
    """Expand the gradients of an edge to the tensors of ``message``; None where the edge has none.
    """
    every: list[torch.Tensor | None] = [None] * len(message.tensors)
    for number, gradient in zip(_carried(message, ports), gradients, strict=True):
        every[number] = gradient
    return tuple(every)


def used_tensors(
    gradients: Sequence[torch.Tensor | None], sent: bool,
    agree: Callable[[torch.Tensor], torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """Return one-byte flags of the named tensors that have a gradient.

    Unused tensors get zeros, which AdamW would treat as a gradient without this flag.

    Args:
        sent: True if the gradients are sent to another rank, which then expects flags.
        agree: collective maximum of host bytes over the processes that share the microbatch, which
            may use different tensors; None for a single process.
    """
    used = [gradient is not None for gradient in gradients]
    if agree is None and not sent and all(used):
        return {}
    flags = torch.tensor(used, dtype=torch.uint8, device="cpu")
    return {USED: flags if agree is None else agree(flags)}


def gradients_of(message: Message) -> Gradients:
    """Return the gradients of a message; None for tensors that the reader did not use."""
    if (used := message.side.get(USED)) is None:
        return message.tensors
    return tuple([t if u else None for t, u in zip(message.tensors, used.tolist(), strict=True)])


def summed_gradients(
    messages: Sequence[Message], of: Sequence[Samples], samples: Samples,
    offsets: Sequence[int] | None,
) -> Message:
    """Sum the gradient messages that several stages returned for one message; see :func:`summed`.
    """
    tensors = cast(Tensors, summed([m.tensors for m in messages], of, samples, offsets))
    used = [m.side[USED] for m in messages if USED in m.side]
    return Message(tensors, {USED: torch.stack(used).amax(0)} if used else {})


def _carried(message: Message, ports: EdgePorts) -> list[int]:
    """Return the numbers of the tensors that an edge carries."""
    if not message.names:
        return [] if ports.alone else list(range(len(message.tensors)))
    return [
        number for number, name in enumerate(message.names)
        if (name in ports.names if ports.alone else name not in ports.withheld)
    ]


def cut(tensors: Tensors, has: Samples, reads: Samples, offsets: Sequence[int] | None) -> Tensors:
    """Select the rows of samples ``reads`` from tensors (rows, ...) of samples ``has``. Contiguous
    rows become views."""
    if has == reads:
        return tensors
    row_ranges = _places(has, reads, offsets)
    return tuple([_rows(tensor, row_ranges) for tensor in tensors])


def _rows(tensor: torch.Tensor, places: Sequence[Range]) -> torch.Tensor:
    slices = [tensor[lo:hi] for lo, hi in places]
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def cut_message(
    message: Message, has: Samples, reads: Samples, offsets: Sequence[int] | None
) -> Message:
    """Select the rows of some samples from a message between modules; see :func:`cut`."""
    if has == reads:
        return message
    rows = sum(rows_of(sample_range, offsets).size for sample_range in reads)
    side = {
        name: _with_rows(entry, rows) if name.startswith(SHAPE)
        else cut((entry,), has, reads, offsets)[0]
        for name, entry in message.side.items()
    }
    return message._replace(tensors=cut(message.tensors, has, reads, offsets), side=side)


def _with_rows(shape: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.tensor([rows, *shape.tolist()[1:]], device="cpu")


def joined(name: str, parts: Sequence[Message]) -> Message:
    """Concatenate the messages of a module's replicas, whose samples are consecutive. Raise a
    ``ModelError`` if the replicas' outputs differ in more than the number of rows."""
    first, *further = parts
    if not further:
        return first
    tensors = zip(*(message.tensors for message in parts), strict=True)
    side = {}
    for key, entry in first.side.items():
        entries = [message.side[key] for message in parts]
        shapes = key.startswith(SHAPE)
        rows = sum(int(shape[0]) for shape in entries) if shapes else 0
        side[key] = _with_rows(entry, rows) if shapes else _rows_of_all(name, entries)
    return first._replace(
        tensors=tuple([_rows_of_all(name, by_replica) for by_replica in tensors]), side=side
    )


def _rows_of_all(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({tensor.shape[1:] for tensor in parts}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in parts)
        raise ModelError(
            f"outputs of replicas of {name!r} have shapes {shapes} for samples of one microbatch; "
            "accepted: shapes that depend on the microbatch, not on the samples of a replica"
        )
    return torch.cat(tuple(parts))


def summed(
    parts: Sequence[Gradients], of: Sequence[Samples], samples: Samples,
    offsets: Sequence[int] | None,
) -> Gradients:
    """Sum gradients (rows, ...), each of the samples in ``of``, into those of ``samples``. Rows
    without gradient are 0; tensors without any gradient are None."""
    if all(replica_samples == samples for replica_samples in of):
        total, *further = parts
        for later in further:
            total = tuple([_sum(t, added) for t, added in zip(total, later, strict=True)])
        return total
    count = sum(rows_of(sample_range, offsets).size for sample_range in samples)
    total = [None if t is None else t.new_zeros((count, *t.shape[1:])) for t in parts[0]]
    for tensors, replica_samples in zip(parts, of, strict=True):
        row_ranges = _places(samples, replica_samples, offsets)
        for number, tensor in enumerate(tensors):
            if tensor is None:
                continue
            total_grad = total[number]
            if total_grad is None:
                total_grad = total[number] = tensor.new_zeros((count, *tensor.shape[1:]))
            row = 0
            for lo, hi in row_ranges:
                total_grad[lo:hi] += tensor[row : row + hi - lo]
                row += hi - lo
    return tuple(total)


def _sum(first: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or other is None:
        return other if first is None else first
    return first + other


def _places(has: Samples, reads: Samples, offsets: Sequence[int] | None) -> list[Range]:
    """Return the row ranges of samples within the rows of other samples."""
    row_ranges = []
    for samples in reads:
        row = 0
        for held in has:
            rows = rows_of(held, offsets)
            if held.holds(samples):
                lo, hi = rows_of(samples, offsets)
                row_ranges.append(Range(row + lo - rows.lo, row + hi - rows.lo))
                break
            row += rows.size
        else:
            raise InternalError(f"samples {samples} are not among {has}")
    return row_ranges
