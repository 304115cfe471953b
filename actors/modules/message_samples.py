"""Parts of messages: what they have of some of a microbatch's samples only, and of some ports.

Samples are ascending ranges; without any, it is all that there are. In dimension 0 a tensor has the
rows of its samples, one after another: one row of each, or as many as ``offsets`` says, by sample
the first row and behind the last one their number.
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


# Side tensors "shape/float32/name" hold the shape of a floating-point tensor that does not travel.
SHAPE = "shape/"
# The side tensor of gradients that says of which tensors there are any.
USED = "used"


def shape_entry(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """What goes along instead of a tensor: a side tensor with its shape, and the name of it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{SHAPE}{dtype}/{name}", torch.tensor(tensor.shape, device="cpu")


def with_ports(message: Message, ports: EdgePorts) -> Message:
    """What an edge carries of all that a stage has for others.

    Args:
        message: with names, if the stage has any ports.
        ports: of the edge.
    """
    kept = _carried(message, ports)
    side = {} if ports.alone else dict(message.side)
    for name, tensor in zip(message.names, message.tensors, strict=False):
        if name in ports.withheld:
            side.update([shape_entry(name, tensor)])
    return message._replace(
        tensors=tuple([message.tensors[n] for n in kept]), side=side,
        names=tuple([message.names[n] for n in kept]) if message.names else (),
    )


def of_all_ports(gradients: Gradients, message: Message, ports: EdgePorts) -> Gradients:
    """Gradients of what an edge carries as gradients of all that the stage has for others.

    Args:
        gradients: of what the edge carries.
        message: all that the stage has.
        ports: of the edge.

    Returns:
        One per tensor of ``message``; None of what the edge does not carry.
    """
    every: list[torch.Tensor | None] = [None] * len(message.tensors)
    for number, gradient in zip(_carried(message, ports), gradients, strict=True):
        every[number] = gradient
    return tuple(every)


def used_tensors(
    gradients: Sequence[torch.Tensor | None], sent: bool,
    agree: Callable[[torch.Tensor], torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """What goes beside a stage's gradients of tensors with names, which it may have left alone: a
    byte each says whether there is one, or zeros in its place. Then what only such a tensor
    depends on gets no gradient of zeros, which AdamW would take for one.

    Args:
        gradients: per tensor; None where there is none.
        sent: to another rank, and so in any case, as both ends of an edge expect it.
        agree: of bytes on the host, the largest among the processes that share the microbatch, each
            of which calls it: one may have used what another has not. None for a process alone.
    """
    used = [gradient is not None for gradient in gradients]
    if agree is None and not sent and all(used):
        return {}
    flags = torch.tensor(used, dtype=torch.uint8, device="cpu")
    return {USED: flags if agree is None else agree(flags)}


def gradients_of(message: Message) -> Gradients:
    """Of a message from a reader of tensors with names: None of those that it did not use."""
    if (used := message.side.get(USED)) is None:
        return message.tensors
    return tuple([t if u else None for t, u in zip(message.tensors, used.tolist(), strict=True)])


def summed_gradients(
    messages: Sequence[Message], of: Sequence[Samples], samples: Samples,
    offsets: Sequence[int] | None,
) -> Message:
    """The gradients that several stages have handed back of one message, as one message.

    Args:
        messages: with gradients (rows, ...).
        of, samples, offsets: as of :func:`summed`.
    """
    tensors = cast(Tensors, summed([m.tensors for m in messages], of, samples, offsets))
    used = [m.side[USED] for m in messages if USED in m.side]
    return Message(tensors, {USED: torch.stack(used).amax(0)} if used else {})


def _carried(message: Message, ports: EdgePorts) -> list[int]:
    """The numbers of the tensors that an edge carries."""
    if not message.names:  # the microbatch has no ports
        return [] if ports.alone else list(range(len(message.tensors)))
    return [
        number for number, name in enumerate(message.names)
        if (name in ports.names if ports.alone else name not in ports.withheld)
    ]


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
    rows = sum(rows_of(part, offsets).size for part in reads)
    side = {
        name: _with_rows(entry, rows) if name.startswith(SHAPE)
        else cut((entry,), has, reads, offsets)[0]
        for name, entry in message.side.items()
    }
    return message._replace(tensors=cut(message.tensors, has, reads, offsets), side=side)


def _with_rows(shape: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.tensor([rows, *shape.tolist()[1:]], device="cpu")


def joined(name: str, parts: Sequence[Message]) -> Message:
    """Messages of samples that follow one another, of replicas of a module, as one.

    Args:
        name: of the module.
        parts: in the order of their samples.

    Raises:
        ModelError: what replicas hand on differs in more than the number of rows.
    """
    first, *further = parts
    if not further:
        return first
    tensors = zip(*(part.tensors for part in parts), strict=True)
    side = {}
    for key, entry in first.side.items():
        entries = [part.side[key] for part in parts]
        shapes = key.startswith(SHAPE)
        rows = sum(int(shape[0]) for shape in entries) if shapes else 0
        side[key] = _with_rows(entry, rows) if shapes else _rows_of_all(name, entries)
    return first._replace(
        tensors=tuple([_rows_of_all(name, of_name) for of_name in tensors]), side=side
    )


def _rows_of_all(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ModelError(
            f"outputs of replicas of {name!r} have shapes {shapes} for samples of one microbatch; "
            "accepted: shapes that depend on the microbatch, not on the samples of a replica"
        )
    return torch.cat(tuple(parts))


def summed(
    parts: Sequence[Gradients], of: Sequence[Samples], samples: Samples,
    offsets: Sequence[int] | None,
) -> Gradients:
    """Tensor by tensor, the sum of gradients that are each of some of the samples; 0 where none is,
    None where nobody has one of the tensor.

    Args:
        parts: gradients (rows, ...).
        of: their samples.
        samples: of the result.
        offsets: of the rows.
    """
    if all(own == samples for own in of):
        total, *further = parts
        for others in further:
            total = tuple([_sum(t, other) for t, other in zip(total, others, strict=True)])
        return total
    count = sum(rows_of(part, offsets).size for part in samples)
    total = [None if t is None else t.new_zeros((count, *t.shape[1:])) for t in parts[0]]
    for tensors, own in zip(parts, of, strict=True):
        places = _places(samples, own, offsets)
        for number, tensor in enumerate(tensors):
            if tensor is None:
                continue
            whole = total[number]
            if whole is None:
                whole = total[number] = tensor.new_zeros((count, *tensor.shape[1:]))
            row = 0
            for lo, hi in places:
                whole[lo:hi] += tensor[row : row + hi - lo]
                row += hi - lo
    return tuple(total)


def _sum(first: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or other is None:
        return other if first is None else first
    return first + other


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
