"""Counting a module's layers: FLOPs, memory traffic, what autograd keeps, parameters.

Nothing is run and nothing is known of a model by name: everything follows from the shapes of
the weights on a skeleton (parameters on the meta device), and from the few numbers of a
Hugging Face config that shapes do not show (heads, experts per token).

Assumed throughout:

- Every weight matrix multiplies every token of its layer once (2 FLOPs per element), experts
  only the share of tokens that is routed to them; a pooling head works on one token per sample.
- Convolutions before the blocks end at the module's number of tokens, so an earlier one runs
  at that times the strides after it.
- One self-attention per block with an ``...Attention`` module, over visible pairs only: half of
  them if causal, fewer with a sliding window. Linear attention and state-space mixers count
  with their weights alone.
- Blocks work on as many tokens as the module gives out (no token merging between blocks).
- Embeddings, norms, activation functions and rotary tables are no FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from raymm.actors.modules.blocks import block_list, find_blocks, input_embeddings
from raymm.errors import InputError

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "encoder_attention_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts",
)
_WIDTH = ("hidden_size", "d_model", "n_embd")
_POOLING = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d | nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d


class LoadError(InputError, ValueError):
    """How much a module has to do cannot be told, or makes no sense. Names the field."""


@dataclass(frozen=True)
class Load:
    """What one module has to do for one microbatch.

    Attributes:
        samples: sequences (images, clips); attention stays within one.
        tokens: of each, as its blocks see them. For an encoder, class tokens included.
        labels: tokens of the microbatch with a label, which the language model's head runs
            on; all of them by default.
    """

    samples: int
    tokens: int
    labels: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("tokens", 1), ("labels", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise LoadError(f"{name} is {value!r}; it must be a whole number >= {least}")
        if self.labels is not None and self.labels > self.total:
            raise LoadError(f"labels is {self.labels}, but there are only {self.total} tokens")

    @property
    def total(self) -> int:
        """Tokens of the microbatch."""
        return self.samples * self.tokens


@dataclass(frozen=True)
class LayerCount:
    """One layer on one microbatch; elements, not bytes, where the dtype decides.

    Attributes:
        matmul_flops: of the forward products with weights.
        attention_flops: of the forward's two products within attention.
        weight_elements: elements of weights that a forward reads.
        traffic_elements: elements that products and attention read and write besides.
        kept_elements: what autograd keeps in the compute dtype, if everything is trained.
        kept_fp32: what it keeps in fp32 whatever the compute dtype (norms, softmax of logits).
        parameters: elements of all its parameters.
        output_elements: of what it hands on.
        replicated: of ``parameters``, those that tensor parallelism does not share out: vectors,
            convolutions, and outside the blocks all but a language model's embedding and head.
        key_value_elements: of its attention's keys and values.
        product_elements: what its products with weights give.
        attention_elements: what its attention gives.
        attention_traffic: of ``traffic_elements``, the attention's.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    weight_elements: float = 0.0
    traffic_elements: float = 0.0
    kept_elements: float = 0.0
    kept_fp32: float = 0.0
    parameters: int = 0
    output_elements: int = 0
    replicated: int = 0
    key_value_elements: float = 0.0
    product_elements: float = 0.0
    attention_elements: float = 0.0
    attention_traffic: float = 0.0

    def __add__(self, other: LayerCount) -> LayerCount:
        return LayerCount(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class _Matmul:
    """One weight: ``rows`` inputs of width ``inner`` to outputs of width ``outer``."""

    name: str
    parent: str
    inner: int
    outer: int
    rows: float
    numel: float  # elements that one row meets
    read: float  # elements read from memory
    gated: bool
    in_attention: bool
    is_head: bool
    input_elements: float

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.numel


def count_layers(module: nn.Module, load: Load, causal: bool = False) -> tuple[LayerCount, ...]:
    """Counts per layer, as :class:`raymm.scheduler.graph.module_graph.ModuleNode` has layers: one
    per block, what is before the blocks with the first, what is after them with the last. A module
    that cannot be cut is one layer. Parameters tied between the two ends count at both, because
    both hold them once the module is cut.

    Args:
        module: parameters may be on the meta device.
        load: what it has to do.
        causal: whether a token sees only those before it; then the module is a language model
            whose head runs on ``load.labels`` rows and whose output is a loss.
    """
    counter = _Counter(module, load, causal)
    places = counter.places()
    layers = [counter.layer(place) for place in places or [""]]
    if places and counter.path is not None:
        before, after = counter.outside(counter.path)
        layers[0] += counter.own(before)
        layers[-1] += counter.own(after)
    if causal:
        layers[-1] = replace(layers[-1], output_elements=1)
    return tuple(layers)


def count_blocks(module: nn.Module, load: Load, causal: bool = False) -> tuple[LayerCount, ...]:
    """Counts of the blocks alone, without what is before and after them; arguments as of
    :func:`count_layers`. Empty for a module that cannot be cut."""
    counter = _Counter(module, load, causal)
    return tuple(counter.layer(place) for place in counter.places())


def count_attention(module: nn.Module, causal: bool = False) -> tuple[dict[int | None, float], ...]:
    """FLOPs of a forward's attention per visible pair of a query and a key, by layer and the window
    of its attention (None: without one); arguments as of :func:`count_layers`."""
    counter = _Counter(module, Load(1, 1), causal)
    return tuple(counter.pair_flops(place) for place in counter.places() or [""])


def default_tokens(module: nn.Module) -> int:
    """Tokens per item of an encoder, from its config: patches (and class tokens) of an image,
    positions of an audio encoder.

    Raises:
        LoadError: if the config does not say.
    """
    config = getattr(module, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    positions = getattr(config, "max_source_positions", None)
    if isinstance(positions, int):
        return positions
    if size is None or patch is None:
        raise LoadError(
            f"the config of {type(module).__name__} does not say how many tokens an item has; "
            "give the encoder's Load"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
    hidden = _number(_WIDTH, config) or 1
    special = sum(
        parameter.numel() // hidden
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[2]
        in ("cls_token", "class_embedding", "distillation_token", "register_tokens")
    )
    return (height // down) * (width // across) + special


def _number(names: tuple[str, ...], *holders: Any) -> int | None:
    """The first whole number that a holder has under one of the names."""
    for container in holders:
        for name in names:
            value = getattr(container, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


class _Counter:
    """Counts parts of one module under one load."""

    def __init__(self, module: nn.Module, load: Load, causal: bool) -> None:
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config") and causal:
            config = config.get_text_config()
        self.module, self.load, self.causal, self.config = module, load, causal, config
        self.experts = _number(_EXPERTS, config) or 0
        self.per_token = _number(_EXPERTS_PER_TOKEN, config) or self.experts
        find_head = getattr(module, "get_output_embeddings", None)
        self.head = find_head() if find_head is not None and causal else None
        self.hidden = _number(_WIDTH, config)
        self.strides = self._strides_after()
        self.path = find_blocks(module)
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self.is_pair = self.path is None and len(linear) == 2  # a projector's

    def _strides_after(self) -> dict[int, int]:
        """Per convolution, by how much later ones reduce the number of positions."""
        result, product = {}, 1
        convolutions = [m for m in self.module.modules() if isinstance(m, _ConvNd | _POOLING)]
        for one in reversed(convolutions):
            result[id(one)] = product
            if len(convolutions) == 1 or math.prod(_sizes(one, "kernel_size")) > 1:
                product *= math.prod(_sizes(one, "stride"))
            # Else a strided 1x1 is a shortcut beside another one and reduces nothing more.
        return result

    def places(self) -> list[str]:
        """Names of the blocks, if there are several."""
        if self.path is None or (many := len(block_list(self.module, self.path))) < 2:
            return []
        return [f"{self.path}.{index}" for index in range(many)]

    def outside(self, path: str) -> tuple[list[str], list[str]]:
        """Names of modules outside the blocks that own parameters: before, after. They are told
        apart by the order of registration; the head is always after, and what is tied to it is
        also before."""
        before, after, seen = [], [], False
        for name, module in self.module.named_modules():
            if name == path or name.startswith(path + "."):
                seen = True
            elif module._parameters:
                late = seen or module is self.head
                (after if late else before).append(name)
        return before, after

    def layer(self, place: str) -> LayerCount:
        """A block, or the whole module (``""``), with attention and output."""
        names = [
            ".".join(filter(None, (place, name)))
            for name, child in self.module.get_submodule(place).named_modules()
            if child._parameters
        ]
        output = LayerCount(output_elements=self._output(names))
        return self.own(names) + self._attention(place) + output

    def _output(self, names: list[str]) -> int:
        width = self.hidden
        if width is None:
            matmuls = [m for name in names for m in self._matmuls(name)]
            width = matmuls[-1].outer if matmuls else 0
        return self.load.total * width

    def own(self, names: list[str]) -> LayerCount:
        """What these modules' own parameters do (not their children's)."""
        matmuls = [m for name in names for m in self._matmuls(name)]
        norms = sum(self._norm(name) for name in names)
        parameters: dict[int, int] = {}
        replicated: dict[int, int] = {}
        for name in names:
            for parameter in self.module.get_submodule(name)._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter.numel()
                    if not self._is_shared_out(name, parameter):
                        replicated[id(parameter)] = parameter.numel()
        return LayerCount(
            matmul_flops=sum(m.flops for m in matmuls),
            weight_elements=sum(m.read for m in matmuls),
            traffic_elements=sum(m.input_elements + m.rows * m.outer for m in matmuls),
            kept_elements=_kept(matmuls),
            kept_fp32=norms + sum(m.rows * m.outer for m in matmuls if m.is_head),
            parameters=sum(parameters.values()),
            replicated=sum(replicated.values()),
            product_elements=sum(m.rows * m.outer for m in matmuls),
        )

    def _is_shared_out(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether processes with tensor parallelism have a share of a parameter each."""
        module = self.module.get_submodule(name)
        if parameter.dim() < 2 or isinstance(module, _ConvNd):
            return False
        if self.path is None:
            return self.is_pair
        if name.startswith(self.path + "."):
            return True
        is_embedding = self.causal and module is input_embeddings(self.module)
        return is_embedding or module is self.head

    def _norm(self, name: str) -> float:
        """fp32 elements that a norm keeps: its input, and an RMS norm written in Python also
        what it multiplies with the weight."""
        module = self.module.get_submodule(name)
        weight = module._parameters.get("weight")
        if "norm" not in type(module).__name__.lower() or weight is None or weight.dim() != 1:
            return 0.0
        copies = 1 if isinstance(module, nn.LayerNorm | nn.GroupNorm) else 2
        width = max(weight.numel(), self.hidden or 0)  # one per head: of all heads together
        return float(copies * width * self._rows(name))

    def _rows(self, name: str) -> float:
        if self._pools(name):
            return float(self.load.samples)
        return float(self.load.total)

    def _pools(self, name: str) -> bool:
        """Whether a module is part of a pooling head, which makes one token of a sample's."""
        path = name.split(".") if name else []
        for length in range(1, len(path) + 1):
            parent = self.module.get_submodule(".".join(path[:length]))
            if not isinstance(parent, nn.ModuleList | _POOLING):
                if "pool" in path[length - 1] or "Pooling" in type(parent).__name__:
                    return True
        return False

    def _share(self, name: str) -> float:
        """Fraction of tokens that come to a module: below 1 in a list of experts."""
        path = name.split(".")
        for length in range(1, len(path)):
            parent = self.module.get_submodule(".".join(path[:length]))
            if isinstance(parent, nn.ModuleList) and len(parent) == self.experts > 1:
                return self.per_token / self.experts
        return 1.0

    def _matmuls(self, name: str) -> Iterator[_Matmul]:
        module = self.module.get_submodule(name)
        if isinstance(module, _ConvNd):
            yield self._convolution(name, module)
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return
        for leaf, weight in module._parameters.items():
            if weight is None:
                continue
            if weight.dim() == 2 and leaf.endswith("weight"):
                yield self._product(name, module, leaf, weight)
            elif weight.dim() == 3 and weight.shape[0] == self.experts > 1:
                yield self._bank(name, leaf, weight)

    def _product(
        self, name: str, module: nn.Module, leaf: str, weight: torch.Tensor
    ) -> _Matmul:
        outer, inner = weight.shape
        if isinstance(module, nn.Linear):
            outer, inner = module.out_features, module.in_features
        elif type(module).__name__ == "Conv1D":  # GPT-2's, which keeps its weight transposed
            inner, outer = weight.shape
        share = self._share(name)
        rows = self._rows(name) * share
        if leaf == "in_proj_weight" and self._pools(name):
            # The query is one token per sample, keys and values are all of them.
            rows = (self.load.samples + 2 * self.load.total) / 3
        is_head = module is self.head
        if is_head and self.load.labels is not None:
            rows = float(self.load.labels)
        parent = name.rpartition(".")[0]
        numel = inner * outer
        return _Matmul(
            name, parent, inner, outer, rows, numel, numel * min(1.0, rows),
            "gate" in name.rpartition(".")[2] and outer > inner, self._in_attention(name, module),
            is_head, rows * inner,
        )

    def _bank(self, name: str, leaf: str, weight: torch.Tensor) -> _Matmul:
        """All experts of a layer in one tensor: (E, out, in) or, in some models, (E, in, out)."""
        first, second = weight.shape[1:]
        narrow = self.hidden if self.hidden in (first, second) else second
        other = first if narrow == second else second
        comes_back = any(part in leaf for part in ("down", "w2", "out"))
        inner, outer = (other, narrow) if comes_back else (narrow, other)
        rows = self._rows(name) * self.per_token
        touched = min(float(self.experts), rows)
        return _Matmul(
            f"{name}.{leaf}", name, inner, outer, rows, inner * outer,
            inner * outer * touched, "gate" in leaf, False, False, rows * inner,
        )

    def _convolution(self, name: str, module: _ConvNd) -> _Matmul:
        rows = self._rows(name) * self.strides[id(module)]
        numel = (
            module.out_channels * module.in_channels // module.groups
            * math.prod(module.kernel_size)
        )
        return _Matmul(
            name, name.rpartition(".")[0], module.in_channels, module.out_channels, rows, numel,
            numel, False, False, False, rows * module.in_channels * math.prod(module.stride),
        )

    def _in_attention(self, name: str, module: nn.Module) -> bool:
        parent = self.module.get_submodule(name.rpartition(".")[0])
        return any("attention" in type(one).__name__.lower() for one in (parent, module))

    def _attention(self, place: str) -> LayerCount:
        """All attention below ``place``."""
        return sum((self._one_attention(m) for m in self.attentions(place)), LayerCount())

    def pair_flops(self, place: str) -> dict[int | None, float]:
        """FLOPs of all attention below ``place`` per visible pair, by window."""
        flops: dict[int | None, float] = {}
        for attention in self.attentions(place):
            if (widths := self._widths(attention)) is not None:
                window = _window(attention, self.config)
                flops[window] = flops.get(window, 0.0) + 2.0 * (widths[0] + widths[3])
        return flops

    def attentions(self, place: str) -> list[nn.Module]:
        """Attention modules below ``place``; none without one whose class is called so."""
        found = {
            ".".join(filter(None, (place, name))): module
            for name, module in self.module.get_submodule(place).named_modules()
            if "attention" in type(module).__name__.lower()
        }
        # The innermost that know their heads (BertSelfAttention, not BertAttention around it);
        # where none does, the config's, once.
        knowing = {n: m for n, m in found.items() if _number(_HEADS, m) is not None}
        inner = [
            m for n, m in knowing.items()
            if not self._pools(n) and not any(o.startswith(n + ".") for o in knowing)
        ]
        return inner or list(found.values())[:1]

    def _one_attention(self, attention: nn.Module) -> LayerCount:
        widths = self._widths(attention)
        if widths is None:
            return LayerCount()
        queries, keys, values, out = widths
        pairs = self._pairs(_window(attention, self.config))
        elements = float(self.load.total * (queries + keys + values + out))
        return LayerCount(
            attention_flops=2.0 * self.load.samples * pairs * (queries + out),
            traffic_elements=elements,
            kept_elements=elements,
            key_value_elements=float(self.load.total * (keys + values)),
            attention_elements=float(self.load.total * out),
            attention_traffic=elements,
        )

    def _widths(self, attention: nn.Module) -> tuple[int, int, int, int] | None:
        """Widths of all heads' queries, keys, values and outputs."""
        heads = _number(_HEADS, attention, self.config)
        if heads is None:
            return None
        size = _number(_HEAD_DIM, attention, self.config)
        if size is None and self.hidden is not None:
            size = self.hidden // heads
        shared = _number(_KV_HEADS, attention, self.config) or heads
        query = _number(("qk_head_dim",), attention) or size
        value = _number(("v_head_dim",), attention) or size
        if query is None or value is None:
            return None
        return heads * query, shared * query, shared * value, heads * value

    def _pairs(self, window: int | None) -> float:
        """Pairs of a query and a key it sees, in one sample."""
        T = self.load.tokens
        if not self.causal:
            return float(T * T)
        W = min(window or T, T)
        return W * T - W * (W - 1) / 2


def _window(attention: nn.Module, config: Any) -> int | None:
    """Keys that a query sees of its past, itself included; None for all. Some attention modules
    (Mistral's) take it from their config in every forward."""
    window = getattr(config, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif getattr(config, "use_sliding_window", True) is False:
        window = None
    elif kinds is not None and isinstance(index, int) and kinds[index] != "sliding_attention":
        window = None
    return window if isinstance(window, int) else None


def _kept(matmuls: list[_Matmul]) -> float:
    """Elements kept in the compute dtype: every distinct input once (products of one parent
    with the same input width share it), and around activation functions their inputs and, where
    a gate multiplies it, their output."""
    inputs: dict[tuple[str, int], float] = {}
    kept = 0.0
    for one in matmuls:
        key = (one.parent, one.inner)
        inputs[key] = max(inputs.get(key, 0.0), one.input_elements)
        if one.in_attention or one.is_head or one.outer < one.inner:
            continue
        kept += one.rows * one.outer
        if one.gated:
            kept += one.rows * one.outer / (2 if "up" in one.name.rpartition(".")[2] else 1)
    return kept + sum(inputs.values())


def _sizes(module: nn.Module, name: str) -> tuple[int, ...]:
    """A convolution's or pooling's kernel or stride, one number per dimension."""
    value = getattr(module, name)
    if isinstance(value, tuple):
        return value
    return (value,) * int(type(module).__name__[-2])  # MaxPool2d
