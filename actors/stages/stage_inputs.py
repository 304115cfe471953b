"""Inputs and outputs of the stages of a cut encoder.

Only the first stage reads data. Integers, and floats that are read later (``travels``), are sent to
later stages. Of other floats only shapes are sent: a later stage runs the module's own forward,
which needs inputs of that shape up to the stage's first block. If a callback reads their values, an
error is raised.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raymm.actors.features.kept_features import FEATURES
from raymm.actors.modules.message import HIDDEN, Message
from raymm.actors.modules.message_samples import SHAPE, shape_entry
from raymm.errors import ProbeError
from raymm.kernels.hf.text_masks import KnownMask
from raymm.kernels.host_copies import on_host, to_device

_ROWS, _SAME = f"{FEATURES}/", f"{FEATURES}="  # prefixes of stored entries
PLAIN = "plain/"  # prefix of side tensors that store a non-tensor as JSON


def to_side(
    inputs: Mapping[str, Any], travels: Collection[str], module: str
) -> dict[str, torch.Tensor]:
    """Return the inputs that are sent to later stages of a module, after its preprocess callback.

    Args:
        travels: floating-point inputs whose values are read later.
        module: name, for errors.

    Raises:
        ProbeError: an input is neither a tensor nor plain data.
    """
    side = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            side[PLAIN + name] = _plain(name, value, module)
        elif value.is_floating_point() and name not in travels:
            side.update([shape_entry(name, value)])
        else:
            side[name] = value.detach()
    return side


def _plain(name: str, value: Any, module: str) -> torch.Tensor:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = None
    if text is None or json.loads(text) != value:
        raise ProbeError(
            f"input {name!r} of {module!r} is a {type(value).__name__}, which cannot be sent to "
            "later stages; accepted: tensors, numbers, strings, lists of them, None. Otherwise "
            "give the module one stage (pp 1)"
        )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_side(side: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Return a later stage's inputs; floats that were not sent are zeros that take no memory."""
    inputs: dict[str, Any] = {}
    for name, value in side.items():
        if name.startswith(SHAPE):
            dtype, _, name = name.removeprefix(SHAPE).partition("/")
            zero = torch.zeros((), dtype=getattr(torch, dtype), device=device)
            inputs[name] = zero.expand(on_host(value).tolist())
        elif name.startswith(PLAIN):
            inputs[name.removeprefix(PLAIN)] = json.loads(bytes(on_host(value).tolist()))
        else:
            inputs[name] = to_device(value, device)
    return inputs


def message_of(
    hidden: torch.Tensor, ports: Mapping[str, torch.Tensor], side: dict[str, torch.Tensor],
    optional: bool = False,
) -> Message:
    """Return the message from a stage to later stages of its module.

    Args:
        ports: inputs with a gradient that layers of later stages read.
        side: tensors without gradient.
        optional: True if the hidden state may have no gradient because its result may be unused.
    """
    if not ports and not optional:
        return Message((hidden,), side)
    return Message((hidden, *ports.values()), side, (HIDDEN, *ports))


def from_stages(
    received: Mapping[str, Message], module: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return hidden state, side tensors and ports received from earlier stages of a module."""
    hidden: torch.Tensor | None = None
    side: dict[str, torch.Tensor] = {}
    ports: dict[str, torch.Tensor] = {}
    for producer, message in received.items():
        if producer != module and producer.partition(".")[0] != module:
            continue
        names = message.names or (HIDDEN,) * len(message.tensors)
        named = dict(zip(names, message.tensors, strict=True))
        if HIDDEN in named:
            hidden, side = named.pop(HIDDEN), message.side
        ports.update(named)
    assert hidden is not None  # sent by the previous stage
    return hidden, {n: entry for n, entry in side.items() if _shape_of(n) not in ports}, ports


def joined(messages: Sequence[Message]) -> Message:
    """Concatenate messages of single items in item order; shapes and plain data must be equal."""
    side = dict(messages[0].side)
    for name, entry in side.items():
        if name.startswith(SHAPE):
            side[name] = torch.tensor([len(messages), *entry.tolist()[1:]], device="cpu")
        elif not name.startswith(PLAIN):
            side[name] = torch.cat([message.side[name] for message in messages])
    return Message((torch.cat([message.tensors[0] for message in messages]),), side)


def kept_entries(message: Message) -> dict[str, torch.Tensor]:
    """Return the stored entries (items, ...) of a message from :func:`joined`.

    Data without a row per item is encoded in the entry names, to be readable without tensor values.
    """
    (hidden,) = message.tensors
    entries = {FEATURES: hidden}
    for name, entry in message.side.items():
        if name.startswith((SHAPE, PLAIN)):
            values = entry.tolist()[1 if name.startswith(SHAPE) else 0 :]
            entries[_SAME + json.dumps([name, values])] = torch.zeros(len(hidden), 1)
        else:
            entries[_ROWS + name] = entry
    return entries


def message_of_entries(entries: Mapping[str, torch.Tensor]) -> Message:
    """Invert :func:`kept_entries`; ignore other entries."""
    hidden, side = entries[FEATURES], {}
    for name, entry in entries.items():
        if name.startswith(_ROWS):
            side[name.removeprefix(_ROWS)] = entry
        elif name.startswith(_SAME):
            name, values = json.loads(name.removeprefix(_SAME))
            if name.startswith(SHAPE):
                side[name] = torch.tensor([len(hidden), *values], device="cpu")
            else:
                side[name] = torch.tensor(values, dtype=torch.uint8, device="cpu")
    return Message((hidden,), side)


def _shape_of(name: str) -> str | None:
    """Return the tensor whose shape a side tensor stores; None for other side tensors."""
    return name.removeprefix(SHAPE).partition("/")[2] if name.startswith(SHAPE) else None


def ghosts(side: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the inputs that a stage knows only by shape."""
    return frozenset(name for entry in side if (name := _shape_of(entry)) is not None)


class Reads:
    """Record of a callback's reads of unavailable values, to raise errors that the callback
    swallowed."""

    def __init__(self, callback: str, module: str) -> None:
        self._callback, self._module = callback, module
        self._error: ProbeError | None = None

    def refuse(self, name: str, key: str | None) -> ProbeError:
        self._error = self._error or ProbeError(
            f"{self._callback} of {self._module!r} reads {name}, which only an earlier stage "
            "has. "
            + ("Give example_inputs with which the callback reads it when it is tried"
               if key else "Use last_hidden_state, or the output that the callback receives")
            + ", or give the module one stage (pp 1)", key,
        )
        return self._error

    @contextmanager
    def observed(self) -> Iterator[Reads]:
        yield self
        if self._error is not None:
            raise self._error


def shown_inputs(inputs: Mapping[str, Any], absent: Collection[str], reads: Reads) -> dict:
    """Return inputs for a callback; reading values of ``absent`` ones (maybe on meta) raises."""
    return {
        name: _absent_tensor(value, f"inputs[{name!r}]", name, reads) if name in absent else value
        for name, value in inputs.items()
    }


def shown_output(output: Any, lost: Collection[str], reads: Reads) -> Any:
    """Return a module's output for a callback; reading a ``lost`` (incomplete) field raises."""
    if not lost:
        return output
    if isinstance(output, Mapping):
        output = copy.copy(output)
        for name in set(lost) & set(output):
            output[name] = _absent(output[name], f"output.{name}", reads)
        return output
    if isinstance(output, tuple | list):
        shown = [
            _absent(value, f"output[{n}]", reads) if str(n) in lost else value
            for n, value in enumerate(output)
        ]
        return type(output)(*shown) if hasattr(output, "_fields") else type(output)(shown)
    return output


def fields(output: Any) -> dict[str, Any]:
    """Return the fields of a module's output by name, and entries of a tuple by number."""
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {str(n): value for n, value in enumerate(output)}
    return {"": output}


def _absent(value: Any, name: str, reads: Reads) -> Any:
    if isinstance(value, torch.Tensor):
        return _absent_tensor(value, name, None, reads)
    return AbsentValue(name, reads)


def _absent_tensor(
    value: torch.Tensor, name: str, key: str | None, reads: Reads
) -> AbsentTensor:
    # NaN, so that reads that bypass the subclass (torch.tensor) do not look like data.
    fill = float("nan") if value.is_floating_point() or value.is_complex() else 0
    filled = torch.full((), fill, dtype=value.dtype, device=value.device).expand(value.shape)
    tensor = filled.as_subclass(AbsentTensor)
    tensor._refuse = lambda: reads.refuse(name, key)
    return tensor


class AbsentValue:
    """Placeholder for a list or mapping that a stage does not have; raises on any use."""

    def __init__(self, name: str, reads: Reads) -> None:
        self.__dict__["_refuse"] = lambda: reads.refuse(name, None)

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise self.__dict__["_refuse"]()

    def __getattr__(self, _: str) -> Any:
        raise self.__dict__["_refuse"]()

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __reversed__ = __add__ = _raise
    __radd__ = __eq__ = _raise
    __hash__ = None  # pyright: ignore[reportAssignmentType] as for classes with __eq__


# Typed as Any because type checkers give class attributes the types of instance attributes.
_T: Any = torch.Tensor
_SHAPE_ONLY: frozenset[Callable[..., Any]] = frozenset({
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.layout.__get__,
    _T.requires_grad.__get__, _T.is_leaf.__get__, _T.is_cuda.__get__, _T.grad_fn.__get__,
    _T.size, _T.dim, _T.numel, _T.nelement, _T.__len__, _T.is_floating_point, _T.is_complex,
    _T.get_device, torch.is_floating_point, torch.is_complex, torch.numel, _T.new_zeros,
    _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor, torch.zeros_like, torch.ones_like,
    torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
})  # fmt: skip


class AbsentTensor(torch.Tensor):
    """Placeholder for a tensor that a stage knows only by shape; raises when its values are read.
    """

    _refuse: Callable[[], ProbeError]

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE_ONLY:
                return func(*args, **kwargs)
        raise next(_absent_among((args, kwargs)))._refuse()

    def __repr__(self, **_: Any) -> str:
        return f"<values of another stage, shape {tuple(self.shape)}>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._refuse()

    def __deepcopy__(self, _: Any) -> Any:
        raise self._refuse()


def _absent_among(value: Any) -> Iterator[AbsentTensor]:
    if isinstance(value, AbsentTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _absent_among(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _absent_among(item)


def for_model(name: str, value: Any, device: torch.device) -> Any:
    """Convert a side tensor to a model argument on the stage's device; keep other values."""
    if not isinstance(value, torch.Tensor):
        return value
    if name == "attention_mask" and value.dim() == 2:
        return KnownMask.of(value, device)
    return to_device(value, device)
