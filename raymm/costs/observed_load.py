"""Loads of modules, observed by running them without computing anything.

Parameters and floating-point inputs are fake tensors (:mod:`torch._subclasses.fake_tensor`), which
have shapes and no values. Integer and boolean inputs are real, so grids of patches, window indexes
and masks have their values, and the forward takes the path that it takes on the data. Every product
and every attention reports its sizes while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name
from raymm.actors.modules.cut import CutReached
from raymm.actors.modules.message import first_tensor
from raymm.costs.load import Load, SeenAttention
from raymm.errors import USER_CODE_RAISES
from raymm.kernels.hf.self_attention import can_use

# Dimensions of patches of all items in one tensor, and of an image of pixels.
FLAT_ROWS, IMAGE_DIMENSIONS = 2, 3
_WITH_MASKS, _WITHOUT_MASKS = "raymm_sizes", "raymm_sizes_without_masks"
_NOTE = "_raymm_note_sizes"


class Observation:
    """Sizes that a module's forward was seen to have. Notes are taken until :meth:`close`.

    Args:
        module: whose.
        leave: leave the forward at the first block.

    Attributes:
        places: rows of products with weights and of norms, by name.
        attention: sums over the calls of every attention module, by name.
        cross: names of those whose keys are not of the queries' own tokens, or not causal.
        streams: elements that every block returns, as far as they were called.
        rows, tokens: of the hidden state that enters the first block, or of what a module without
            blocks returns; 0 tokens if there is none.
        kept: bytes that autograd keeps, without parameters, by layer: what is before the blocks
            with the first, what is after them with the last.
        storages: what is kept already, and parameters, by address.
        output: what the forward returned; None if it did not end.
    """

    def __init__(self, module: nn.Module, leave: bool = False) -> None:
        self.places: dict[str, int] = {}
        self.attention: dict[str, SeenAttention] = {}
        self.cross: set[str] = set()
        self.streams: list[int] = []
        self.rows, self.tokens = 1, 0
        self.output: Any = None
        self._layer = 0
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._leave = leave
        path = find_blocks(module)
        self._has_blocks = path is not None
        blocks = [] if path is None else list(block_list(module, path))
        first = next(iter(blocks), module)
        self.kept = [0] * max(1, len(blocks))
        # Autocast keeps copies of weights, which ranks have once per step.
        self._weights = {p.shape for p in module.parameters() if p.dim() > 1}
        # Of its norms and biases: by them channels that come last are told from those before.
        self._widths = {len(p) for p in first.parameters() if p.dim() == 1}
        self._hidden = "hidden_states" if path is None else hidden_name(first)
        self._handles = [
            first.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._end),
            *(block.register_forward_hook(self._stream) for block in blocks),
            *(
                block.register_forward_pre_hook(partial(self._start, index))
                for index, block in enumerate(blocks)
            ),
        ]
        for name, child in module.named_modules():
            if (channels := _channels(child)) is not None:
                note = partial(self._note, name, channels)
                self._handles.append(child.register_forward_hook(note))

    def load(self, times: int = 1) -> Load | None:
        """Return the load, None if the forward did not come to the blocks.

        Args:
            times: how many such forwards a microbatch is.
        """
        if not self.tokens:
            return None
        total = self.rows * self.tokens
        complete = self.output is not None
        seen = self.attention.items() if complete else ()
        return Load(
            self.rows * times, self.tokens, places=self.places_per(total),
            attention=tuple((name, each.over(total)) for name, each in seen),
            handed=first_tensor(self.output).numel() / total if complete else None,
            streams=tuple(count / total for count in self.streams) if complete else (),
        )

    def places_per(self, tokens: int) -> tuple[tuple[str, float], ...]:
        """Return the rows by name, divided by a number of tokens."""
        return tuple((name, count / tokens) for name, count in self.places.items())

    def _note(self, name: str, channels: int, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self.places[name] = self.places.get(name, 0) + output.numel() // channels

    def _enter(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get(self._hidden)
        if isinstance(hidden, torch.Tensor) and hidden.dim() >= FLAT_ROWS and (
            hidden.dim() == IMAGE_DIMENSIONS or hidden.shape[-1] in self._widths
        ):
            # (rows, tokens, width), tokens of all items one after another, or in rows and columns
            # of an image; with channels before them, what is handed on says how many there are.
            self.rows = 1 if hidden.dim() == FLAT_ROWS else hidden.shape[0]
            self.tokens = hidden.shape[:-1].numel() // max(self.rows, 1)
        if self._leave:
            raise CutReached(cast(torch.Tensor, hidden))

    def _start(self, layer: int, _: nn.Module, __: Any) -> None:
        self._layer = layer

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype == torch.bfloat16 and tensor.dim() > 1 and (
            tensor.shape in self._weights or tensor.mT.shape in self._weights
        )
        if not is_cast and storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage  # held, so that its address stays its own
            self.kept[self._layer] += storage.nbytes()
        return tensor

    def _stream(self, _: nn.Module, __: Any, output: Any) -> None:
        self.streams.append(first_tensor(output).numel())

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output
        features = first_tensor(output)
        if not self._has_blocks and not self.tokens and features.dim() >= FLAT_ROWS:
            self.rows = features.shape[0]
            flat = features.dim() <= IMAGE_DIMENSIONS
            tokens = features.shape[1:-1] if flat else features.shape[2:]
            self.tokens = tokens.numel()

    def close(self) -> None:
        """Take no more notes."""
        for handle in self._handles:
            handle.remove()


def observe(
    run: Callable[..., Any], inputs: Mapping[str, Any], *modules: nn.Module,
    leave: bool = False, masks: bool = True, dtype: torch.dtype = torch.float32,
) -> list[Observation]:  # fmt: skip
    """Run a forward and return the sizes that modules were seen to have, as far as it came.

    Args:
        run: the forward, which takes the inputs as keyword arguments.
        inputs: of the forward.
        modules: that it calls, in their own sizes. Their parameters become fake, unless the forward
            is left at the first block.
        leave: leave the forward at the first block of the first module, and compute what is before.
        masks: note which pairs masks of transformers' interface let be seen, if they are padded or
            have windows. Such masks have an element for every pair.
        dtype: of autocast, for what autograd keeps; fp32 for none.
    """
    seen = [Observation(module, leave) for module in modules]
    if not leave:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for module in modules:
            _make_fake(module, mode)
        fake = partial(_fake_tensor, mode)
        inputs = tree_map_only(
            torch.Tensor, lambda t: fake(t) if t.is_floating_point() else t, dict(inputs)
        )
    try:
        with ExitStack() as stack, torch.set_grad_enabled(not leave):
            stack.enter_context(torch.autocast("cpu", dtype, enabled=dtype != torch.float32))
            for module, each in zip(modules, seen, strict=True):
                stack.callback(each.close)
                stack.enter_context(_noted_attention(module, each, masks))
            parameters = [p.untyped_storage() for m in modules for p in m.parameters()]
            for each in seen:
                each.storages = {storage._cdata: storage for storage in parameters}
                stack.enter_context(saved_tensors_hooks(each.keep, lambda tensor: tensor))
            run(**inputs)
    except USER_CODE_RAISES:  # not every forward runs without values; blocks may have run
        pass
    return seen


def _channels(module: nn.Module) -> int | None:
    """Elements of a row of what a product or a norm gives; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 1 and "norm" in type(module).__name__.lower():
        return len(weight)
    return None


def _make_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    fakes: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    fake = _fake_tensor(mode, parameter)
                    grad = parameter.is_floating_point()
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=grad)
                child._parameters[key] = fakes[id(parameter)]
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[key] = _fake_tensor(mode, buffer)


def _fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


@contextmanager
def _noted_attention(module: nn.Module, observation: Observation, masks: bool) -> Iterator[None]:
    """Replace the attention of a transformers model by a function that notes sizes; the attention
    of other modules stays as it is."""
    if not can_use(module):
        yield
        return
    names = {id(child): name for name, child in module.named_modules()}

    def note(child: nn.Module, sizes: SeenAttention, cross: bool) -> None:
        name, attention = names[id(child)], observation.attention
        attention[name] = sizes.joined(attention[name]) if name in attention else sizes
        if cross:
            observation.cross.add(name)

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
    """Attention of transformers' interface: (B, H, T, D) query, key and value -> (B, T, H, D)."""
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
    return _Attended.apply(query, key, value), None


class _Attended(torch.autograd.Function):
    """What flash attention keeps: its inputs, its output, and a number per row."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        batch, heads, rows, _ = query.shape
        result = query.new_empty(batch, rows, heads, value.shape[3])
        sums = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result


def kept_elements(fp32: Observation, bf16: Observation) -> tuple[tuple[float, float], ...]:
    """Return, by layer, elements that autograd keeps in the compute dtype and in fp32, for each
    token of the blocks; empty if a forward did not end.

    Args:
        fp32, bf16: the same forward without autocast, and with it.
    """
    if fp32.output is None or bf16.output is None or not fp32.tokens:
        return ()
    total = fp32.rows * fp32.tokens
    halves = [max(0.0, (a - b) / 2) for a, b in zip(fp32.kept, bf16.kept, strict=True)]
    return tuple(
        (half / total, (size / 4 - half) / total)
        for half, size in zip(halves, fp32.kept, strict=True)
    )


def _no_mask(*_: Any, **__: Any) -> None:
    """Mask of transformers' interface."""
