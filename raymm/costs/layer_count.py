"""Counts of a module's layers: FLOPs, memory traffic, parameters.

Nothing is run here, and no model is known by name. The counts follow from the shapes of the weights
of a skeleton (parameters on the meta device), from the few numbers of a Hugging Face config that
shapes do not show (heads, experts per token), and from loads and runs.

Assumptions:

- Products with weights: see :mod:`raymm.costs.layer_count`. A pooling head has one token per
  sample.
- Attention: see :mod:`raymm.costs.layer_count`. Linear attention and state-space mixers count
  with their weights, and with the products of activations that were observed in a run of the
  forward (:mod:`raymm.costs.forward_run`).
- Observed products and attention (:mod:`raymm.costs.observed_load`) count as observed. Otherwise,
  blocks have as many tokens as the module outputs (no token merging between blocks).
- Embeddings, norms, activation functions and rotary tables have no FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from raymm.actors.adapters.lora import HIGH, LOW, MAGNITUDE, AdaptedLayer, has_adapters, is_adapter
from raymm.actors.experts.routing import experts
from raymm.actors.modules.blocks import block_list
from raymm.actors.sharding.tensor_plan import TensorPlan, plan_module
from raymm.actors.weights.model_part import is_within
from raymm.costs.forward_run import ForwardRun
from raymm.costs.load import HEADS, POOLING, Load, LoadedModule, config_number
from raymm.errors import PlanError

_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts",
)


@dataclass(frozen=True)
class Attention:
    """One attention module; widths are elements per token of all heads together.

    Attributes:
        queries, keys, values, out: widths.
        window: past keys that a query sees, itself included; None for all.
        pairs: visible pairs of a query and a key in the microbatch.
        rows, key_rows: rows of queries, and of keys and values, in the microbatch.
    """

    queries: int
    keys: int
    values: int
    out: int
    window: int | None
    pairs: float
    rows: float
    key_rows: float

    @property
    def pair_flops(self) -> float:
        """FLOPs of the two products of a forward per visible pair."""
        return 2.0 * (self.queries + self.out)


class AttentionCounter:
    """Finds the attention in parts of a module."""

    def __init__(self, loaded: LoadedModule) -> None:
        self.loaded = loaded

    def below(self, place: str) -> Iterator[Attention]:
        """Yield the attention below a submodule, except modules whose number of heads is
        unknown."""
        load = self.loaded.load
        counted = {n: a for n, a in self.loaded.seen.items() if is_within(n, (place,)) or not place}
        for sizes in counted.values():
            rows, keys, pairs = (size * load.total for size in sizes[:3])
            yield Attention(*sizes[3:], None, pairs, rows, keys)
        if counted and not self.loaded.causal:
            return
        for name, attention in self._modules(place).items():
            if any(is_within(path, (name,)) or is_within(name, (path,)) for path in counted):
                continue
            if (widths := self._widths(attention)) is not None:
                window = _window(attention, self.loaded.config)
                pairs = load.samples * self._pairs(window)
                yield Attention(*widths, window, pairs, load.total, load.total)

    def _modules(self, place: str) -> dict[str, nn.Module]:
        """Return the attention modules below ``place``, found by their class names."""
        attentions = {
            ".".join(filter(None, (place, name))): module
            for name, module in self.loaded.module.get_submodule(place).named_modules()
            if "attention" in type(module).__name__.lower()
        }
        # The innermost modules with a number of heads (BertSelfAttention, not the BertAttention
        # around it). If none has one, the first module, with the config's heads.
        knowing = {n: m for n, m in attentions.items() if config_number(HEADS, m) is not None}
        inner = {
            n: m for n, m in knowing.items()
            if not self.loaded.pools(n) and not any(o.startswith(n + ".") for o in knowing)
        }
        return inner or dict(list(attentions.items())[:1])

    def _widths(self, attention: nn.Module) -> tuple[int, int, int, int] | None:
        heads = config_number(HEADS, attention, self.loaded.config)
        if heads is None:
            return None
        size = config_number(_HEAD_DIM, attention, self.loaded.config)
        if size is None and self.loaded.hidden is not None:
            size = self.loaded.hidden // heads
        shared = config_number(_KV_HEADS, attention, self.loaded.config) or heads
        query = config_number(("qk_head_dim",), attention) or size
        value = config_number(("v_head_dim",), attention) or size
        if query is None or value is None:
            return None
        return heads * query, shared * query, shared * value, heads * value

    def _pairs(self, window: int | None) -> float:
        """Return the visible pairs of a query and a key in one sample."""
        T = self.loaded.load.tokens
        if not self.loaded.causal:
            return float(T * T)
        W = min(window or T, T)
        return W * T - W * (W - 1) / 2


def _window(attention: nn.Module, config: Any) -> int | None:
    """Return the past keys that a query sees, itself included; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif getattr(config, "use_sliding_window", True) is False:
        window = None
    elif kinds is not None and isinstance(index, int) and kinds[index] != "sliding_attention":
        window = None
    return window if isinstance(window, int) else None


@dataclass(frozen=True)
class LayerCount:
    """Counts of one layer on one microbatch, in elements where bytes depend on the dtype.

    Attributes:
        matmul_flops: forward products with weights.
        weight_flops: products of weights with weights, once per forward (norms of adapted rows).
        attention_flops: the forward's two products of attention.
        mixing_flops: the forward's other products of two activations, such as scans.
        weight_elements: elements of weights that a forward reads.
        traffic_elements: other elements that products and attention read and write.
        trained_traffic: part of ``traffic_elements`` in products with trained weights.
        replicated: part of ``parameters`` that tensor parallelism does not split.
        few_parameters: part of ``parameters`` that tensor parallelism splits over at most
            ``few_heads`` processes: keys and values with fewer heads than queries.
        tied: parameters of the last layer that the first layer has as well.
        key_value_elements: keys and values of the attention.
        product_elements: outputs of the products with weights.
        attention_elements: outputs of the attention.
        attention_traffic: part of ``traffic_elements`` in attention.
        stream_elements: the hidden state.
        widest_elements: output of the largest product except a head.
        expanded_elements: that output with its activation function's result, and a gate.
        logits: output of the head.
        data_elements: elements of 4 bytes that are read from a microbatch's data.
        expert_parameters: part of ``parameters`` in experts.
        exchange_elements: tokens sent to experts and back, with a weight each.
        base_flops, base_weights, base_parameters: parts of ``matmul_flops``, ``weight_elements``
            and ``parameters`` of weights under adapters.
        quantised: part of ``base_parameters`` with one byte per element.
    """

    matmul_flops: float = 0.0
    weight_flops: float = 0.0
    attention_flops: float = 0.0
    mixing_flops: float = 0.0
    weight_elements: float = 0.0
    traffic_elements: float = 0.0
    parameters: int = 0
    output_elements: int = 0
    replicated: int = 0
    few_parameters: int = 0
    few_heads: int = 0
    tied: int = 0
    trained_traffic: float = 0.0
    key_value_elements: float = 0.0
    product_elements: float = 0.0
    attention_elements: float = 0.0
    attention_traffic: float = 0.0
    stream_elements: float = 0.0
    widest_elements: float = 0.0
    expanded_elements: float = 0.0
    logits: float = 0.0
    largest_weight: float = 0.0
    data_elements: float = 0.0
    expert_parameters: int = 0
    exchange_elements: float = 0.0
    base_flops: float = 0.0
    base_weights: float = 0.0
    base_parameters: int = 0
    quantised: int = 0

    @property
    def quantised_share(self) -> float:
        """Quantised fraction of ``base_parameters``."""
        return self.quantised / max(self.base_parameters, 1)

    def __add__(self, other: LayerCount) -> LayerCount:
        def together(name: str) -> Any:
            values = getattr(self, name), getattr(other, name)
            return max(values) if name in _ONE_AT_A_TIME else sum(values)

        return LayerCount(**{f.name: together(f.name) for f in fields(self)})


_ONE_AT_A_TIME = frozenset(
    {"stream_elements", "widest_elements", "expanded_elements", "logits", "largest_weight",
     "few_heads"}
)


def count_layers(
    module: nn.Module, load: Load, causal: bool = False, run: ForwardRun | None = None
) -> tuple[LayerCount, ...]:
    """Return the counts per layer, as defined by
    :class:`raymm.scheduler.graph.module_graph.ModuleNode`.

    There is one layer per block; modules before the blocks count with the first, those after with
    the last. A module that cannot be cut is one layer. Parameters tied between both ends count at
    both, since both hold them once the module is cut.

    Args:
        module: parameters may be on the meta device.
        causal: True for a language model, in which a token sees only earlier tokens, the head runs
            on ``load.labels`` rows and the output is a loss.
        run: a forward of the same load; ``mixing_flops`` are 0 without.
    """
    counter = _LayerCounter(module, load, causal, run)
    blocks = counter.places()
    layers = [counter.layer(block) for block in blocks or [""]]
    if blocks and counter.path is not None:
        before, after = counter.outside(counter.path)
        layers[0] += counter.own(before)
        layers[0] = replace(layers[0], data_elements=counter.read(before))
        layers[-1] += counter.own(after)
        layers[-1] = replace(layers[-1], tied=counter.tied(blocks[0], blocks[-1]))
    relayed = round(load.relayed * load.total)
    layers = [replace(layer, output_elements=layer.output_elements + relayed) for layer in layers]
    if causal:
        layers[-1] = replace(layers[-1], output_elements=1)
    elif load.handed is not None:
        layers[-1] = replace(layers[-1], output_elements=round(load.handed * load.total))
    return tuple(layers)


def count_blocks(
    module: nn.Module, load: Load, causal: bool = False, run: ForwardRun | None = None
) -> tuple[LayerCount, ...]:
    """Return the counts of the blocks alone, for the arguments of :func:`count_layers`. Empty for a
    module that cannot be cut."""
    counter = _LayerCounter(module, load, causal, run)
    return tuple(counter.layer(block) for block in counter.places())


def count_activations(
    module: nn.Module, causal: bool = False, run: ForwardRun | None = None
) -> tuple[tuple[float, dict[int | None, float]], ...]:
    """Return FLOPs of a forward's products of two activations by layer, for the arguments of
    :func:`count_layers`: ``mixing_flops``, and attention per visible pair of a query and a key, by
    window (None: no window)."""
    counter = _LayerCounter(module, Load(1, 1), causal, run)
    return tuple(counter.activations(block) for block in counter.places() or [""])


def count_products(
    module: nn.Module, load: Load, causal: bool = False
) -> dict[str, tuple[float, float]]:
    """Return FLOPs of the forward products with weights, and the part with weights under adapters,
    by submodule with weights in the order of registration. See :func:`count_layers` for the
    arguments."""
    counter = _LayerCounter(module, load, causal)
    products: dict[str, tuple[float, float]] = {}
    for name, child in module.named_modules():
        if child._parameters and (matmuls := list(counter.matmuls.of(name))):
            products[name] = sum(m.flops for m in matmuls), sum(m.flops for m in matmuls if m.base)
    return products


class _LayerCounter:
    """Counts parts of one module under one load."""

    def __init__(
        self, module: nn.Module, load: Load, causal: bool, run: ForwardRun | None = None
    ) -> None:
        self.loaded = LoadedModule(module, load, causal)
        self.mixing = () if run is None else run.mixing
        self.module, self.load, self.path = module, load, self.loaded.path
        self.matmuls = MatmulCounter(self.loaded)
        self.attention = AttentionCounter(self.loaded)
        self.experts = experts(module)
        self.shares = parameter_shares(module)

    def places(self) -> list[str]:
        """Return the names of the blocks, if there are several."""
        if self.path is None or (count := len(block_list(self.module, self.path))) < 2:
            return []
        return [f"{self.path}.{index}" for index in range(count)]

    def outside(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names of modules with parameters before and after the blocks. The order of
        registration decides, except that the head is always after the blocks, and modules tied to
        it also count before."""
        before, after, past_blocks = [], [], False
        for name, module in self.module.named_modules():
            if name == path or name.startswith(path + "."):
                past_blocks = True
            elif module._parameters:
                late = past_blocks or module is self.loaded.head
                (after if late else before).append(name)
        return before, after

    def layer(self, place: str) -> LayerCount:
        """Return the counts of a block, or of the whole module (``""``), with attention and
        output."""
        names = [
            ".".join(filter(None, (place, name)))
            for name, child in self.module.get_submodule(place).named_modules()
            if child._parameters
        ]
        output = self._output(names, place)
        hidden = LayerCount(output_elements=output, stream_elements=output)
        return self.own(names) + self._attention(place) + hidden

    def _output(self, names: list[str], place: str) -> int:
        blocks = self.places()
        if place and len(self.load.streams) == len(blocks):
            return round(self.load.streams[blocks.index(place)] * self.load.total)
        width = self.loaded.hidden
        if width is None:
            matmuls = [m for name in names for m in self.matmuls.of(name)]
            width = matmuls[-1].outer if matmuls else 0
        return self.load.total * width

    def own(self, names: list[str]) -> LayerCount:
        """Return the counts of the modules' own parameters, without those of their children."""
        matmuls = [m for name in names for m in self.matmuls.of(name)]
        parameters: dict[int, int] = {}
        few_heads = 0
        replicated: dict[int, int] = {}
        few_parameters: dict[int, int] = {}
        base: dict[int, int] = {}
        quantised: dict[int, int] = {}
        for name in names:
            for leaf, parameter in self.module.get_submodule(name)._parameters.items():
                if parameter is not None:
                    parameters[id(parameter)] = parameter.numel()
                    if self.matmuls.adapted and not is_adapter(leaf):
                        base[id(parameter)] = parameter.numel()
                        if parameter.dtype == torch.int8:
                            quantised[id(parameter)] = parameter.numel()
                    shards = self.shares.get(f"{name}.{leaf}".lstrip("."), 1)
                    if shards == 1:
                        replicated[id(parameter)] = parameter.numel()
                    elif shards < max(self.shares.values()):
                        few_parameters[id(parameter)] = parameter.numel()
                        few_heads = shards
        return LayerCount(
            matmul_flops=sum(m.flops for m in matmuls),
            weight_flops=sum(self._norm_flops(name) for name in names),
            weight_elements=sum(m.read for m in matmuls),
            traffic_elements=sum(m.input_elements + m.rows * m.outer for m in matmuls),
            parameters=sum(parameters.values()),
            replicated=sum(replicated.values()),
            few_parameters=sum(few_parameters.values()),
            few_heads=few_heads,
            trained_traffic=sum(m.input_elements + m.rows * m.outer for m in matmuls if not m.base),
            product_elements=sum(m.rows * m.outer for m in matmuls),
            widest_elements=max((m.rows * m.outer for m in matmuls if not m.is_head), default=0.0),
            expanded_elements=max(
                (expanded_elements(m) for m in matmuls if not m.is_head), default=0.0
            ),
            logits=max((m.rows * m.outer for m in matmuls if m.is_head), default=0.0),
            largest_weight=max((m.numel for m in matmuls), default=0.0),
            expert_parameters=sum(
                p.numel() for name in names if name in self.experts
                for p in self.experts[name].parameters()
            ),
            exchange_elements=sum(self._exchange(name) for name in names if name in self.experts),
            base_flops=sum(m.flops for m in matmuls if m.base),
            base_weights=sum(m.read for m in matmuls if m.base),
            base_parameters=sum(base.values()),
            quantised=sum(quantised.values()),
        )

    def _norm_flops(self, name: str) -> float:
        """Return FLOPs of the product of an adapter's two matrices, which row norms are computed
        from."""
        parameters = self.module.get_submodule(name)._parameters
        low, high = parameters.get(LOW), parameters.get(HIGH)
        if parameters.get(MAGNITUDE) is None or low is None or high is None:
            return 0.0
        return 2.0 * high.shape[0] * low.numel()

    def _exchange(self, name: str) -> float:
        per_row = 2 * (self.loaded.hidden or 0) + 1
        return float(self.loaded.rows(name) * self.matmuls.per_token * per_row)

    def read(self, before: list[str]) -> float:
        """Return the elements that the first product reads; for a language model ids, labels and
        mask."""
        products = (m.input_elements for name in before for m in self.matmuls.of(name))
        return 6.0 * self.load.total if self.loaded.causal else next(products, 0.0)

    def tied(self, first: str, last: str) -> int:
        """Return the elements of parameters that both ends have, counting the first and last
        block."""
        assert self.path is not None
        ends = []
        for outer_names, block in zip(self.outside(self.path), (first, last), strict=True):
            modules = [self.module.get_submodule(name) for name in outer_names]
            modules += self.module.get_submodule(block).modules()
            parameters = (
                p for module in modules for p in module._parameters.values() if p is not None
            )
            ends.append({id(p): p.numel() for p in parameters})
        return sum(size for key, size in ends[0].items() if key in ends[1])

    def _attention(self, place: str) -> LayerCount:
        flops, attentions = self._mixing(place)
        count = sum((self._one_attention(attention) for attention in attentions), LayerCount())
        return replace(count, mixing_flops=flops)

    def _mixing(self, place: str) -> tuple[float, list[Attention]]:
        """Return FLOPs of products of two activations below ``place``, and the attention, which the
        FLOPs do not include."""
        attentions = list(self.attention.below(place))
        if not place or not self.mixing:
            return 0.0, attentions
        flops, attended = self.mixing[self.places().index(place)]
        if attended or not attentions:
            return flops, attentions
        is_observed = any(is_within(name, (place,)) for name in self.loaded.seen)
        if not is_observed and any(attended for _, attended in self.mixing):
            return flops, []  # linear attention, in a model that also has observed attention
        return 0.0, attentions  # the model's own products, which include masked pairs

    def _one_attention(self, attention: Attention) -> LayerCount:
        a = attention
        elements = float(a.rows * (a.queries + a.out) + a.key_rows * (a.keys + a.values))
        return LayerCount(
            attention_flops=a.pairs * a.pair_flops,
            traffic_elements=elements,
            key_value_elements=float(a.key_rows * (a.keys + a.values)),
            attention_elements=float(a.rows * a.out),
            attention_traffic=elements,
        )

    def activations(self, place: str) -> tuple[float, dict[int | None, float]]:
        """Return an entry of :func:`count_activations` for everything below ``place``."""
        mixing, attentions = self._mixing(place)
        flops: dict[int | None, float] = {}
        for attention in attentions:
            window = attention.window
            flops[window] = flops.get(window, 0.0) + attention.pair_flops
        return mixing, flops


_SHARES: WeakKeyDictionary[nn.Module, Mapping[str, int]] = WeakKeyDictionary()


def parameter_shares(module: nn.Module) -> Mapping[str, int]:
    """Return the number of different shards of every split parameter, by name. The degree is the
    largest that the module's plan accepts. Keys and values with few heads have fewer shards than
    there are processes. Parameters that are absent are replicated."""
    if module not in _SHARES:
        plan = _largest_plan(module)
        shards = {} if plan is None else plan.shards
        _SHARES[module] = {name: len(set(dims)) for name, dims in shards.items()}
    return _SHARES[module]


def _largest_plan(module: nn.Module) -> TensorPlan | None:
    config: Any = getattr(module, "config", None)
    texts = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = config_number(HEADS, config, texts) or 2
    for tp in range(heads, 1, -1):
        if heads % tp == 0:
            try:
                return plan_module(module, tp, "module")
            except PlanError:
                continue
    return None


@dataclass(frozen=True)
class Matmul:
    """One weight that maps ``rows`` inputs of width ``inner`` to outputs of width ``outer``."""

    name: str
    inner: int
    outer: int
    rows: float
    numel: float  # elements that multiply one row
    read: float  # elements read from memory
    gated: bool
    is_head: bool
    input_elements: float
    base: bool = False  # under an adapter: never trained

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.numel


class MatmulCounter:
    """Finds the products in parts of a module."""

    def __init__(self, loaded: LoadedModule) -> None:
        self.loaded = loaded
        self.adapted = has_adapters(loaded.module)
        self.experts = config_number(_EXPERTS, loaded.config) or 0
        self.per_token = config_number(_EXPERTS_PER_TOKEN, loaded.config) or self.experts
        self.strides = self._strides_after()

    def _strides_after(self) -> dict[int, int]:
        """Return by convolution how much later ones reduce the number of positions."""
        result, product = {}, 1
        convolutions = [m for m in self.loaded.module.modules() if isinstance(m, _ConvNd | POOLING)]
        for convolution in reversed(convolutions):
            result[id(convolution)] = product
            if len(convolutions) == 1 or math.prod(_sizes(convolution, "kernel_size")) > 1:
                product *= math.prod(_sizes(convolution, "stride"))
            # A strided 1x1 next to other convolutions is a shortcut and reduces nothing more.
        return result

    def _share(self, name: str) -> float:
        """Return the fraction of tokens that enter a module, which is below 1 in a list of
        experts."""
        path = name.split(".")
        for length in range(1, len(path)):
            parent = self.loaded.module.get_submodule(".".join(path[:length]))
            if isinstance(parent, nn.ModuleList) and len(parent) == self.experts > 1:
                return self.per_token / self.experts
        return 1.0

    def of(self, name: str) -> Iterator[Matmul]:
        """Yield the products with a submodule's own weights, without those of its children."""
        module = self.loaded.module.get_submodule(name)
        if isinstance(module, _ConvNd):
            if "weight" not in vars(module):  # otherwise another module has the parameter
                yield self._convolution(name, module)
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return
        for leaf, weight in module._parameters.items():
            if weight is None:
                continue
            if is_adapter(leaf):
                if weight.dim() == 2:
                    yield self._low_rank(name, leaf, weight)
            elif weight.dim() == 2 and leaf.endswith("weight"):
                yield self._product(name, module, leaf, weight)
            elif weight.dim() == 3 and weight.shape[0] == self.experts > 1:
                yield self._bank(name, leaf, weight)

    def _product(self, name: str, module: nn.Module, leaf: str, weight: torch.Tensor) -> Matmul:
        outer, inner = weight.shape
        if isinstance(module, AdaptedLayer):
            outer, inner = module.widths
        elif isinstance(module, nn.Linear):
            outer, inner = module.out_features, module.in_features
        elif type(module).__name__ == "Conv1D":  # of GPT-2, which stores its weight transposed
            inner, outer = weight.shape
        share = self._share(name)
        rows = self.loaded.rows(name) * share
        if leaf == "in_proj_weight" and self.loaded.pools(name):
            # The query has one token per sample; keys and values have all tokens.
            rows = (self.loaded.load.samples + 2 * self.loaded.load.total) / 3
        is_head = module is self.loaded.head
        if is_head and self.loaded.load.labels is not None:
            rows = float(self.loaded.load.labels)
        numel = inner * outer
        return Matmul(
            name, inner, outer, rows, numel, numel * min(1.0, rows),
            "gate" in name.rpartition(".")[2] and outer > inner, is_head, rows * inner,
            self.adapted,
        )

    def _low_rank(self, name: str, leaf: str, weight: torch.Tensor) -> Matmul:
        outer, inner = weight.shape
        rows = self.loaded.rows(name) * self._share(name)
        return Matmul(
            f"{name}.{leaf}", inner, outer, rows, weight.numel(),
            weight.numel() * min(1.0, rows), False, False, rows * inner,
        )

    def _bank(self, name: str, leaf: str, weight: torch.Tensor) -> Matmul:
        """Return the product of experts in one tensor: (E, out, in) or, in some models, (E, in,
        out)."""
        first, second = weight.shape[1:]
        narrow = self.loaded.hidden if self.loaded.hidden in (first, second) else second
        wide = first if narrow == second else second
        comes_back = any(fragment in leaf for fragment in ("down", "w2", "out"))
        inner, outer = (wide, narrow) if comes_back else (narrow, wide)
        rows = self.loaded.rows(name) * self.per_token
        touched = min(float(self.experts), rows)
        return Matmul(
            f"{name}.{leaf}", inner, outer, rows, inner * outer,
            inner * outer * touched, "gate" in leaf, False, rows * inner, self.adapted,
        )

    def _convolution(self, name: str, module: _ConvNd) -> Matmul:
        rows = self.loaded.rows(name)
        if name not in self.loaded.places:
            rows *= self.strides[id(module)]
        numel = (
            module.out_channels * module.in_channels // module.groups
            * math.prod(module.kernel_size)
        )
        return Matmul(
            name, module.in_channels, module.out_channels, rows, numel, numel, False, False,
            rows * module.in_channels * math.prod(module.stride), self.adapted,
        )


def expanded_elements(matmul: Matmul) -> float:
    """Return the elements of a product's output with its activation function's result, and of a
    gate with a separate product."""
    fused = "up" in matmul.name.rpartition(".")[2]  # gate_up_proj
    return matmul.rows * matmul.outer * (3 if matmul.gated and not fused else 2)


def _sizes(module: nn.Module, name: str) -> tuple[int, ...]:
    """Return a convolution's or pooling's kernel or stride, one number per dimension."""
    value = getattr(module, name)
    if isinstance(value, tuple):
        return value
    return (value,) * int(type(module).__name__[-2])  # MaxPool2d
