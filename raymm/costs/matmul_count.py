"""Counts of products with weights.

Every weight matrix multiplies every row of its layer once (2 FLOPs per element), and an expert only
the share of rows that is routed to it. Convolutions before the blocks end at the module's number of
tokens, so an earlier one runs at that number times the strides after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from raymm.actors.adapters.lora import AdaptedLayer, has_adapters, is_adapter
from raymm.costs.load import POOLING, LoadedModule, config_number

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts",
)


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
