"""Tensors that claim to be on ``cuda:0`` and hold CPU data.

Their operators reject a mix with host tensors, and count host waits for the GPU by file and line.
Waits follow CUDA's rules: operators that read a value, or need one to determine a shape; copies to
the host; copies to the device from pageable memory. :mod:`.library` must be loaded first.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from raymm.actors.memory import to_device

REPOSITORY = Path(__file__).resolve().parents[3]
MULTIPROCESSORS, CACHE_BYTES = 132, 50 * 2**20  # values of an H100

# Operators whose result, or its shape, the host has to read.
_READS = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "_unique",
    "unique_consecutive", "is_nonzero", "equal", "bincount", "allclose", "histc", "multinomial",
})  # fmt: skip
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES = frozenset({"_to_copy", "copy_"})
_MASKS = (torch.bool, torch.uint8)


class MixedDevicesError(RuntimeError):
    """Error for an operator with tensors of both the GPU and the host."""


class PretendedTensor(torch.Tensor):
    """Tensor on the pretended GPU; ``held`` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=torch.device("cuda", 0),
        )  # fmt: skip
        tensor.held = held
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"pretended({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _State:
    """Waits so far, and pinned storages (kept alive, so that no other gets their address)."""

    waits: Counter[str] = Counter()
    pinned: dict[int, torch.UntypedStorage] = {}


def place() -> str:
    """Return the innermost line of this repository on the stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()  # raymm has links to its siblings
        inside = path.is_relative_to(REPOSITORY) and ".venv" not in path.parts
        if inside and path.parent != Path(__file__).parent:
            return f"{path.relative_to(REPOSITORY)}:{frame.lineno}"
    return "elsewhere"


def waited(why: str) -> None:
    """Record a host wait at the current line."""
    _State.waits[f"{place()} {why}"] += 1


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as an ordinary tensor, without a wait."""
    return tensor.held if isinstance(tensor, PretendedTensor) else tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _State.pinned


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _State.pinned[storage.data_ptr()] = storage
    return tensor


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = any(isinstance(t, PretendedTensor) for t in tensors)
    if name == "is_pinned":
        return not here and _is_pinned(args[0])
    if name == "_pin_memory":
        return _pin(args[0].clone())
    if name == "record_stream":
        return None
    if here:
        _check_mixed(name, tensors)
        if waits := _waits(name, args):
            waited(waits)
    to_device, pinned = here, kwargs.get("pin_memory")
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == "cuda"
        if name == "_to_copy" and to_device != here:
            _note_copy(args[0], None, to_device, kwargs.get("non_blocking", False))
        if to_device:
            kwargs = {**kwargs, "device": torch.device("cpu")}
    elif name == "copy_":
        target, source = (isinstance(tensor, PretendedTensor) for tensor in args[:2])
        if target != source:
            _note_copy(args[1], args[0], target, len(args) > 2 and args[2])
    if pinned:
        kwargs = {**kwargs, "pin_memory": False}
    result = func(*tree_map(_value, args), **tree_map(_value, kwargs))
    if pinned:
        return tree_map(lambda t: _pin(t) if isinstance(t, torch.Tensor) else t, result)
    of_values = {id(_value(t)): t for t in tensors}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, PretendedTensor):
            return value
        if id(value) in of_values:
            return of_values[id(value)]
        return PretendedTensor(value) if to_device and value.device.type == "cpu" else value

    return tree_map(wrap, result)


def _value(value: Any) -> Any:
    return value.held if isinstance(value, PretendedTensor) else value


def _check_mixed(name: str, tensors: list[torch.Tensor]) -> None:
    if name in _COPIES or name in _INDEXED:
        return
    foreign = [t for t in tensors if not isinstance(t, PretendedTensor) and t.dim()]
    if foreign:
        shapes = [tuple(t.shape) for t in foreign]
        raise MixedDevicesError(f"{name} of tensors on cuda and on {shapes} of the host: {place()}")


def _waits(name: str, args: tuple) -> str:
    """Return why the host waits in an operator on the device; empty if it does not."""
    if name in _READS or (name == "repeat_interleave" and len(args) == 1):
        return name
    if name in _INDEXED:
        indices = [i for i in args[1] if i is not None]
        if any(isinstance(i, PretendedTensor) and i.dtype in _MASKS for i in indices):
            return f"{name} by a mask"
        if any(not isinstance(i, PretendedTensor) and i.dim() for i in indices):
            return f"{name} by numbers of the host"
    return ""


def _note_copy(
    source: torch.Tensor, target: torch.Tensor | None, to_device: bool, non_blocking: bool
) -> None:
    if to_device:
        if not (non_blocking and _is_pinned(source)) and source.numel():
            waited("copy from the host" + ("" if non_blocking else ", blocking"))
    elif not non_blocking or (target is not None and not _is_pinned(target)):
        waited("copy to the host")


def _listed(tensor: torch.Tensor) -> list:
    if isinstance(tensor, PretendedTensor):
        waited("tolist")
    return _tolist(values(tensor))


_tolist = torch.Tensor.tolist


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:
    """Run ``scaled_dot_product_attention``, which in a CUDA build queries device properties."""
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Now(Executor):
    """Executor that runs calls immediately: only this thread has the pretended GPU."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Stream:
    """Stream whose work is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event().record()


class _Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> _Event:
        self._time = time.perf_counter()
        return self

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waited("event")

    def elapsed_time(self, end: _Event) -> float:
        return (end._time - self._time) * 1e3


_REPLACED = {
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": nullcontext,
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "manual_seed_all": lambda seed: None,
    "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
    "get_device_properties": lambda *_: SimpleNamespace(
        major=9, minor=0,
        multi_processor_count=MULTIPROCESSORS, L2_cache_size=CACHE_BYTES, name="pretended",
        pci_domain_id=0, pci_bus_id=0, pci_device_id=0,
    ),
    "reset_peak_memory_stats": lambda *_: None,
    "max_memory_allocated": lambda *_: 0,
    "set_device": lambda *_: None,
    "synchronize": lambda *_: waited("synchronize"),
}


@contextmanager
def pretended_gpu() -> Iterator[Counter[str]]:
    """Make ``torch.device("cuda")`` work on the CPU, in this thread, within a `with` block.

    Yields the number of host waits by place and reason; the caller may clear it.
    """
    torch._C._set_only_lift_cpu_tensors(True)  # pyright: ignore[reportAttributeAccessIssue]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _State.waits.clear()
    with ExitStack() as stack:
        for name, value in _REPLACED.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.accelerator, "current_device_index", lambda: 0))
        stack.enter_context(patch.object(torch.Tensor, "tolist", _listed))
        stack.enter_context(patch.object(to_device, "PINNING", _Now()))
        stack.enter_context(
            patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention)
        )
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)  # pyright: ignore[reportAttributeAccessIssue]
        with _Mode():
            yield _State.waits
