"""Loads of modules, observed in runs without computation.

Parameters and floating-point inputs are fake tensors (:mod:`torch._subclasses.fake_tensor`), which
have shapes but no values. Integer and boolean inputs are real, so that grids of patches, window
indices and masks have values and the forward takes its usual path. Every product and every
attention reports its sizes during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from raymm.actors.adapters.lora import has_adapters, is_adapter
from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name, hidden_state
from raymm.actors.modules.message import first_tensor
from raymm.actors.modules.precision import CAST_BY_AUTOCAST, CAST_ONCE
from raymm.costs.load import Load, SeenAttention
from raymm.errors import USER_CODE_RAISES, ForwardLeft
from raymm.kernels.flash.operands import prepare
from raymm.kernels.hf.self_attention import can_use

# Number of dimensions of the patches of all items in one tensor, and of an image.
FLAT_ROWS, IMAGE_DIMENSIONS = 2, 3
_WITH_MASKS, _WITHOUT_MASKS = "raymm_sizes", "raymm_sizes_without_masks"
_NOTE = "_raymm_note_sizes"
# Attributes with the position of a layer, which do not affect its computation.
_INDEXES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"})


class Observation:
    """Observed sizes of a module's forward. Notes are taken until :meth:`close`.

    Args:
        leave: True to leave the forward at the first block.

    Attributes:
        places: rows of products with weights and of norms, by name.
        attention: sums over the calls of every attention module, by name.
        cross: names of those whose keys are not the queries' own tokens, or that are not causal.
        streams: output elements of every block that was called.
        rows, tokens: of the hidden state that enters the first block, or of the output of a module
            without blocks; 0 tokens if there is none.
        kept: bytes that autograd saves, without parameters: before the blocks, by block, after the
            blocks, and in a language model's head and loss.
        mixing: in the same order, FLOPs of products of two activations without attention through
            transformers' interface.
        attended: in the same order, True where attention ran through that interface.
        output: output of the forward; None if it did not finish.
    """

    def __init__(self, module: nn.Module, leave: bool = False) -> None:
        self.places: dict[str, int] = {}
        self.attention: dict[str, SeenAttention] = {}
        self.cross: set[str] = set()
        self.streams: list[int] = []
        self.rows, self.tokens = 1, 0
        self.output: Any = None
        self._bucket = 0
        self._leave = leave
        path = find_blocks(module)
        self._has_blocks = path is not None
        blocks = [] if path is None else list(block_list(module, path))
        first = next(iter(blocks), module)
        self.kept = [0] * (len(blocks) + 3)
        self.mixing = [0] * len(self.kept)
        self.attended = [False] * len(self.kept)
        # Widths of norms and biases, which distinguish channels in the last dimension from others.
        self._widths = {len(p) for p in first.parameters() if p.dim() == 1}
        self._hidden = "hidden_states" if path is None else hidden_name(first)
        self._handles = [
            first.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._end),
            *(block.register_forward_hook(self._stream) for block in blocks),
            *(
                block.register_forward_pre_hook(partial(self._enter_bucket, index))
                for index, block in enumerate(blocks, start=1)
            ),
        ]
        if blocks:
            leave_blocks = partial(self._enter_bucket, len(blocks) + 1)
            self._handles.append(blocks[-1].register_forward_hook(leave_blocks))
        if (head := getattr(module, "get_output_embeddings", lambda: None)()) is not None:
            enter_head = partial(self._enter_bucket, len(blocks) + 2)
            self._handles.append(head.register_forward_pre_hook(enter_head))
        for name, child in module.named_modules():
            if (channels := _channels(child)) is not None:
                note = partial(self._note, name, channels)
                self._handles.append(child.register_forward_hook(note))

    def load(self, times: int = 1) -> Load | None:
        """Return the load of a microbatch of ``times`` such forwards; None if the blocks were not
        reached."""
        if not self.tokens:
            return None
        total = self.rows * self.tokens
        complete = self.output is not None
        attention = self.attention.items() if complete else ()
        return Load(
            self.rows * times, self.tokens, places=self.places_per(total),
            attention=tuple((name, sizes.over(total)) for name, sizes in attention),
            handed=first_tensor(self.output).numel() / total if complete else None,
            streams=tuple(count / total for count in self.streams) if complete else (),
            mixing=self.mixing_per(total) if complete else (),
        )

    def places_per(self, tokens: int) -> tuple[tuple[str, float], ...]:
        """Return the rows by name, divided by a number of tokens."""
        return tuple((name, count / tokens) for name, count in self.places.items())

    def mixing_per(self, tokens: int) -> tuple[tuple[float, bool], ...]:
        """Return ``mixing`` of the blocks, divided by a number of tokens, with ``attended``."""
        blocks = zip(self.mixing[1:-2], self.attended[1:-2], strict=True)
        return tuple((flops / tokens, attended) for flops, attended in blocks)

    def _note(self, name: str, channels: int, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self.places[name] = self.places.get(name, 0) + output.numel() // channels

    def _enter(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get(self._hidden)
        if isinstance(hidden, torch.Tensor) and hidden.dim() >= FLAT_ROWS and (
            hidden.dim() == IMAGE_DIMENSIONS or hidden.shape[-1] in self._widths
        ):
            # (rows, tokens, width), or the tokens of all items one after another, or an image's
            # rows and columns. If channels come before them, the output has the number of tokens
            # instead.
            self.rows = 1 if hidden.dim() == FLAT_ROWS else hidden.shape[0]
            self.tokens = hidden.shape[:-1].numel() // max(self.rows, 1)
        if self._leave:
            raise ForwardLeft(cast(torch.Tensor, hidden))

    def _enter_bucket(self, bucket: int, *_: Any) -> None:
        self._bucket = bucket

    def add_bytes(self, size: int) -> None:
        self.kept[self._bucket] += size

    def add_mixing(self, flops: int) -> None:
        self.mixing[self._bucket] += flops

    def add_attention(self, name: str, sizes: SeenAttention, cross: bool) -> None:
        """Count a call of an attention module. ``cross`` is True if the keys are not the queries'
        own tokens, or the call is not causal."""
        earlier = self.attention.get(name)
        self.attention[name] = sizes if earlier is None else sizes.joined(earlier)
        self.attended[self._bucket] = True
        if cross:
            self.cross.add(name)

    def _stream(self, _: nn.Module, __: Any, output: Any) -> None:
        self.streams.append(first_tensor(output).numel())

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output
        if self._has_blocks or self.tokens:
            return
        features = first_tensor(output)
        if features.dim() >= FLAT_ROWS:
            self.rows = features.shape[0]
            flat = features.dim() <= IMAGE_DIMENSIONS
            tokens = features.shape[1:-1] if flat else features.shape[2:]
            self.tokens = tokens.numel()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def observe(
    run: Callable[..., Any], inputs: Mapping[str, Any], *modules: nn.Module,
    leave: bool = False, masks: bool = True, dtype: torch.dtype = torch.float32,
    few: bool = False,
) -> list[Observation]:  # fmt: skip
    """Run a forward as far as it gets, and return the observed sizes of modules.

    Args:
        run: the forward, called with the inputs as keyword arguments.
        modules: called by the forward, in full size. Their parameters become fake, unless
            ``leave``.
        leave: True to leave the forward at the first block of the first module, and to compute what
            precedes it.
        masks: True to count the visible pairs of masks of transformers' interface, if they are
            padded or have windows. Such masks have an element per pair.
        dtype: autocast dtype for the saved bytes; fp32 for no autocast.
        few: True to run only the first two blocks of every kind, and to count others as the second
            of their kind. The first block also saves what all blocks read, such as rotary tables.
    """
    observations = [Observation(module, leave) for module in modules]
    if not leave:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for module in modules:
            _make_fake(module, mode, dtype)
        fake = partial(_fake_tensor, mode)
        inputs = tree_map_only(
            torch.Tensor, lambda t: fake(t) if t.is_floating_point() else t, dict(inputs)
        )
    try:
        with ExitStack() as stack, torch.set_grad_enabled(not leave):
            stack.enter_context(torch.autocast("cpu", dtype, enabled=dtype != torch.float32))
            stack.enter_context(_GroupedFallback())
            for module, observation in zip(modules, observations, strict=True):
                stack.callback(observation.close)
                stack.enter_context(_noted_attention(module, observation, masks))
                if few:
                    stack.enter_context(_few_blocks(module, observation))
            running = stack.enter_context(_running(modules, observations))
            stack.enter_context(_saved_bytes(modules, running))
            if not leave:
                stack.enter_context(_Mixing(modules, running))
            run(**inputs)
    except USER_CODE_RAISES:  # not every forward runs without values; blocks may have run
        pass
    return observations


def _channels(module: nn.Module) -> int | None:
    """Return the output elements per row of a product or a norm; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 1 and "norm" in type(module).__name__.lower():
        return len(weight)
    return None


def _make_fake(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace all parameters by fake ones that are trained (with adapters, only those of the
    adapters). Weights that ranks cast once per step have the compute dtype."""
    fakes: dict[tuple[int, torch.dtype], nn.Parameter] = {}
    adapted = has_adapters(module)
    for child in module.modules():
        cast_once = isinstance(child, CAST_BY_AUTOCAST) or hasattr(child, CAST_ONCE)
        for key, parameter in child._parameters.items():
            if parameter is not None:
                is_float = parameter.is_floating_point()
                fake_dtype = dtype if cast_once and is_float else parameter.dtype
                identity = id(parameter), fake_dtype
                if identity not in fakes:
                    with mode:
                        fake = torch.empty(parameter.shape, dtype=fake_dtype)
                    trained = is_float and (not adapted or is_adapter(key))
                    fakes[identity] = nn.Parameter(fake, requires_grad=trained)
                child._parameters[key] = fakes[identity]
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[key] = _fake_tensor(mode, buffer)


def _fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


@contextmanager
def _running(
    modules: Sequence[nn.Module], seen: Sequence[Observation]
) -> Iterator[list[Observation]]:
    """Yield a list whose last entry is the observation of the running module, or of the first
    one."""
    running = [seen[0]]

    def enter(each: Observation, *_: Any) -> None:
        running.append(each)

    def leave(*_: Any) -> None:
        running.pop()

    handles = [
        handle for module, each in zip(modules, seen, strict=True) for handle in (
            module.register_forward_pre_hook(partial(enter, each)),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _state_storages(modules: Sequence[nn.Module]) -> dict[int, torch.UntypedStorage]:
    """Return storages of parameters and buffers by address. References keep the addresses
    unique."""
    state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in state}


@contextmanager
def _saved_bytes(modules: Sequence[nn.Module], running: list[Observation]) -> Iterator[None]:
    """Count every tensor that autograd saves in the observation of the running module. Torch calls
    only the innermost of nested hooks, so there is one for all modules."""
    storages = _state_storages(modules)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage
            running[-1].add_bytes(storage.nbytes())
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield


def _solve_flops(system: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Return FLOPs of a triangular system of n equations, n² per column of its right-hand side."""
    return right.numel() * system.shape[-1]


class _Mixing(TorchDispatchMode):
    """Counts the FLOPs of products of two activations, such as scans of state-space layers and
    chunks of linear attention. Products with parameters, and with values computed only from
    parameters and buffers, are counted by their shapes (:mod:`raymm.costs.layer_count`)."""

    _FLOPS: Mapping[Any, Callable[..., int]] = {
        **flop_registry, torch.ops.aten.linalg_solve_triangular: _solve_flops
    }

    def __init__(self, modules: Sequence[nn.Module], running: list[Observation]) -> None:
        super().__init__()
        self._state, self._running = _state_storages(modules), running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        storages = [s for t in tree_leaves((args, kwargs)) if (s := _storage(t)) is not None]
        is_state = [s._cdata in self._state for s in storages]
        if all(is_state) and is_state:
            results = (s for t in tree_leaves(output) if (s := _storage(t)) is not None)
            self._state.update((s._cdata, s) for s in results)
        elif not any(is_state) and (flops := self._FLOPS.get(func._overloadpacket)) is not None:
            self._running[-1].add_mixing(flops(*args, **kwargs, out_val=output))
        return output


def _storage(value: Any) -> torch.UntypedStorage | None:
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None


@contextmanager
def _few_blocks(module: nn.Module, observation: Observation) -> Iterator[None]:
    """Replace all but the first two blocks of a kind by functions that return the output of the
    second one, with their input as the hidden state."""
    path = find_blocks(module)
    blocks = [] if path is None else list(block_list(module, path))
    kinds: dict[Any, list[int]] = {}
    copied: dict[int, int] = {}
    for index, block in enumerate(blocks):
        same_kind = kinds.setdefault(_kind(module, index, block), [])
        if len(same_kind) < 2:
            same_kind.append(index)
            continue
        copied[index] = same_kind[1]

        def repeat(*args: Any, block: nn.Module = block, like: int = same_kind[1], **kwargs: Any):
            hidden, output = hidden_state(block, args, kwargs), outputs[like]
            return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

        vars(block)["forward"] = repeat
    outputs: dict[int, Any] = {}

    def note(index: int, _: nn.Module, __: Any, output: Any) -> None:
        outputs[index] = output

    handles = [blocks[i].register_forward_hook(partial(note, i)) for i in set(copied.values())]
    try:
        yield
    finally:
        for index, like in copied.items():
            vars(blocks[index]).pop("forward")
            observation.kept[index + 1] = observation.kept[like + 1]
            observation.mixing[index + 1] = observation.mixing[like + 1]
            observation.attended[index + 1] = observation.attended[like + 1]
        for handle in handles:
            handle.remove()


def _kind(module: nn.Module, index: int, block: nn.Module) -> Any:
    """Return a key that blocks share if they compute the same: settings and shapes of their
    modules, and their entries in lists of the config."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    lists = [
        (name, str(value[index])) for name, value in sorted(vars(config or object).items())
        if isinstance(value, list | tuple) and len(value) > index
    ]
    modules = [
        (
            name, type(child),
            tuple((k, str(v)) for k, v in sorted(vars(child).items())
                  if isinstance(v, bool | int | float | str) and k not in _INDEXES),
            tuple((k, v is not None and v.shape) for k, v in child._parameters.items()),
        )
        for name, child in block.named_modules()
    ]
    return tuple(lists), tuple(modules)


class _GroupedFallback(TorchFunctionMode):
    """Runs products of experts with the fallback of transformers, since torch's own operator
    refuses fake tensors in fp32. Both save the same tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm:  # pyright: ignore[reportPrivateImportUsage]
            return torch.ops.transformers.grouped_mm_fallback(*args, offs=kwargs["offs"])
        return func(*args, **kwargs)


@contextmanager
def _noted_attention(module: nn.Module, observation: Observation, masks: bool) -> Iterator[None]:
    """Replace the attention of a transformers model by a function that reports sizes. Attention of
    other modules is unchanged."""
    if not can_use(module):
        yield
        return
    names = {id(child): name for name, child in module.named_modules()}

    def note(child: nn.Module, sizes: SeenAttention, cross: bool) -> None:
        observation.add_attention(names[id(child)], sizes, cross)

    chosen = _WITH_MASKS if masks else _WITHOUT_MASKS
    AttentionInterface.register(chosen, _sizes_forward)
    AttentionMaskInterface.register(chosen, sdpa_mask if masks else _no_mask)
    cast(Any, module).set_attn_implementation(chosen)
    for child in module.modules():
        vars(child)[_NOTE] = note
    try:
        yield
    finally:
        for child in module.modules():
            vars(child).pop(_NOTE, None)


def _sizes_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, is_causal: bool | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Report the sizes of an attention: (B, H, T, D) query, key and value -> (B, T, H, D)."""
    batch, heads, rows, width = query.shape
    shared, keys, out = value.shape[1:]
    pairs = float(batch * rows * keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(attention_mask, torch.Tensor) and not isinstance(attention_mask, FakeTensor):
        mask = attention_mask[..., :keys]
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        pairs = float(visible[:, 0].sum()) * batch / len(visible) * rows / visible.shape[-2]
    elif attention_mask is None and causal and rows == keys:
        pairs = batch * rows * (rows + 1) / 2
    sizes = SeenAttention(
        batch * rows, batch * keys, pairs, heads * width, shared * width, shared * out, heads * out
    )
    vars(module)[_NOTE](module, sizes, rows != keys or not getattr(module, "is_causal", False))
    query, key, value = prepare(query, key, value, None)
    learned = isinstance(attention_mask, torch.Tensor) and attention_mask.requires_grad
    return _Attended.apply(query, key, value, learned).transpose(1, 2).contiguous(), None


class _Attended(torch.autograd.Function):
    """Attention that only saves tensors: its inputs, its output in the layout of the query, and one
    number per row, or all weights for a learned mask, which torch has no flash attention for."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, learned: bool
    ) -> Any:
        batch, heads, rows, _ = query.shape
        if query.stride(2) > query.stride(1):
            result = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
        else:
            result = query.new_empty(batch, heads, rows, value.shape[3])
        weights = key.shape[2] if learned else 1
        sums = query.new_empty(batch, heads, rows, weights, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask, for transformers' interface."""
