"""Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024) of linear layers, in place.

A layer keeps its name, its weight and its bias; the adapter's parameters are added to the layer. So
code that cuts, shards, counts, loads and saves a model by names needs no other names, and a product
that is sharded over processes needs one all-reduce with its adapter, not two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.new_rows import merge_rows
from raymm.actors.adapters.quantised import (
    GROUP,
    INT4,
    SCALE,
    dequantised,
    quantise,
    quantised_product,
)
from raymm.actors.modules.draws import derive_seed
from raymm.errors import ModelError

LOW, HIGH, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
ADAPTER_NAMES = frozenset({LOW, HIGH, MAGNITUDE})
"""Names of an adapter's parameters, as in ``peft``."""


class AdaptedLayer(nn.Module):
    """Mixin for a linear layer with ``weight`` W (out, in): W x + bias + s B A dropout(x), where A
    is (r, in), B is (out, r) and s is :attr:`LoraConfig.scaling`.

    With a magnitude m (DoRA), each row of W + s B A is scaled to the norm given by m. No gradient
    flows through the rows' norms (DoRA §4.3), and dropout applies to the adapted part only, as in
    ``peft``.

    A quantised weight holds codes, and ``weight_scale`` holds their scales
    (:mod:`raymm.actors.adapters.quantised`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None
    weight_scale: nn.Parameter | None
    lora: LoraConfig
    _left_out: bool = False

    def attach(self, config: LoraConfig, low: nn.Parameter, high: nn.Parameter) -> None:
        """Add an adapter with A ``low`` and B ``high`` to a layer that has become an adapted one.
        """
        self.lora, self.lora_A, self.lora_B = config, low, high

    def leave_out(self, left_out: bool) -> None:
        """Leave the adapter out of the following forwards, or include it again."""
        self._left_out = left_out

    def disable_dropout(self) -> None:
        self.lora = replace(self.lora, dropout=0.0)

    def detach(self, merged: bool) -> None:
        """Become the plain layer, in place, whose weight includes the adapter if ``merged``."""
        if merged or self._parameters.get(SCALE) is not None:
            self.weight = nn.Parameter(self.plain(merged), requires_grad=False)
        for name in ADAPTER_NAMES | {SCALE}:
            self._parameters.pop(name, None)
        del self.lora
        cast(Any, self).__class__ = _PLAIN[type(self)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the layer: (..., in) -> (..., out)."""
        dropped = F.dropout(hidden, self.lora.dropout, self.training)
        if self._left_out:
            out = self.summed(self._product(hidden))
        elif self._parameters.get(MAGNITUDE) is None:
            out = self.summed(self._product(hidden) + self._low_rank(dropped))
        elif dropped is hidden or not (self.training and self.lora.dropout):
            out = self._scale() * self.summed(self._product(hidden) + self._low_rank(hidden))
        else:
            adapted = self.summed(self._product(dropped) + self._low_rank(dropped))
            base = self.summed(self._product(hidden - dropped))
            out = base + self._scale() * adapted
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return a product with this process's shard of the inputs, summed over the processes with
        the other shards. Overridden by sharded layers."""
        return part

    def summed_squares(self, part: torch.Tensor) -> torch.Tensor:
        """Return the same sum as :meth:`summed`, without gradients."""
        return part

    def _matrix(self) -> torch.Tensor:
        """Return W as (out, in)."""
        scale = self._parameters.get(SCALE)
        return self._kept() if scale is None else dequantised(self._kept(), scale)

    @property
    def widths(self) -> tuple[int, int]:
        return len(self.lora_B), self.lora_A.shape[1]

    @property
    def packed(self) -> bool:
        scale = self._parameters.get(SCALE)
        return scale is not None and scale.dim() > 1

    def _kept(self) -> torch.Tensor:
        """Return the stored weight as (out, in)."""
        return self.weight.T if isinstance(self, Conv1D) else self.weight

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self._parameters.get(SCALE)
        if scale is None:
            return F.linear(hidden, self._kept())
        return quantised_product(hidden, self._kept(), scale)

    def _low_rank(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(hidden, self.lora_A), self.lora_B) * self.lora.scaling

    def _scale(self) -> torch.Tensor:
        """Return the magnitudes divided by the rows' norms, which are constants: (out,), fp32."""
        # Use the stored parameters, not the copies for autocast that modules show.
        parameters = cast(dict[str, torch.Tensor], self._parameters)
        with torch.no_grad(), torch.autocast(parameters[LOW].device.type, enabled=False):
            rows = self._matrix() + self.lora.scaling * (parameters[HIGH] @ parameters[LOW])
            norms = self.summed_squares(rows.square().sum(dim=1)).sqrt()
        return parameters[MAGNITUDE] / norms

    def plain(self, merged: bool) -> torch.Tensor:
        """Return the weight of a plain layer, in the stored shape, that computes the same without
        dropout, including the adapter if ``merged``."""
        with torch.no_grad():
            rows = self._matrix()
            if merged:
                rows = rows + self.lora.scaling * (self.lora_B @ self.lora_A)
                if self._parameters.get(MAGNITUDE) is not None:
                    rows = self._scale()[:, None] * rows
            return rows.T.contiguous() if isinstance(self, Conv1D) else rows


class AdaptedLinear(AdaptedLayer, nn.Linear):
    """``nn.Linear`` with an adapter."""


class AdaptedConv1D(AdaptedLayer, Conv1D):
    """Hugging Face's ``Conv1D`` (a linear layer with a transposed weight) with an adapter."""


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable the adapters of a module's layers for the length of the block."""
    layers = [layer for layer in module.modules() if isinstance(layer, AdaptedLayer)]
    for layer in layers:
        layer.leave_out(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.leave_out(False)


_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: AdaptedLinear, Conv1D: AdaptedConv1D,
}
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}


def adapt(
    module: nn.Module, targets: Iterable[str], config: LoraConfig, seed: int,
    among: Callable[[str], bool] = lambda _: True,
) -> nn.Module:  # fmt: skip
    """Freeze a module, or a part of it, and add adapters to its linear layers, in place. Raise a
    ``ModelError`` if a weight to be quantised is shared with another module, or its number of
    inputs is not supported.

    Args:
        module: whole module, module pruned to a stage, or skeleton. Layers that a stage lacks, or
            has without weights, are skipped.
        seed: determines the initial values together with the layer's name: A is uniform as in
            ``peft`` (Kaiming with a = √5), B is zero, magnitudes are the norms of the weight's
            rows.
        among: returns True for names of parameters in the part to freeze.
    """
    for name, parameter in module.named_parameters():
        if among(name):
            parameter.requires_grad_(False)
    for name in targets:
        layer = _find(module, name)
        if layer is not None and layer._parameters.get("weight") is not None:
            if config.base is not None:
                _check_base(module, name, layer, config.base)
            _adapt_layer(layer, config, derive_seed(seed, "lora", name))
    return module


def _check_base(module: nn.Module, name: str, layer: nn.Module, base: str) -> None:
    weight = cast(nn.Parameter, layer.weight)
    inner = weight.shape[0 if isinstance(layer, Conv1D) else 1]
    if base == INT4 and inner % GROUP:
        raise ModelError(
            f"base is {base!r}, but {name!r} has {inner} inputs; accepted: targets whose number "
            f"of inputs is a multiple of {GROUP}, the inputs that share a scale"
        )
    for module_name, child in module.named_modules():
        if child is not layer and any(p is layer.weight for p in child._parameters.values()):
            raise ModelError(
                f"base is {base!r}, but {name!r} shares its weight with {module_name!r}; "
                "accepted: targets without shared weights"
            )


def _find(module: nn.Module, name: str) -> nn.Module | None:
    for component in filter(None, name.split(".")):
        child = module._modules.get(component)
        if child is None:
            return None
        module = child
    return module


def _adapt_layer(layer: nn.Module, config: LoraConfig, seed: int) -> None:
    weight = cast(nn.Parameter, layer.weight)
    transposed = isinstance(layer, Conv1D)
    matrix = weight.T if transposed else weight
    scale = None
    if config.base is not None:
        codes, scale = quantise(matrix, config.base)
        matrix = dequantised(codes, scale)
        stored_codes = codes.T.contiguous() if transposed else codes
        layer._parameters["weight"] = nn.Parameter(stored_codes, requires_grad=False)
    out, inner = matrix.shape
    low = torch.empty(config.r, inner, device=weight.device)
    if not weight.is_meta:
        bound = 1 / math.sqrt(inner)
        low.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    adapted = cast(Any, layer)
    adapted.__class__ = _ADAPTED[type(layer)]
    high = torch.zeros(out, config.r, device=weight.device)
    adapted.attach(config, nn.Parameter(low), nn.Parameter(high))
    magnitude = nn.Parameter(matrix.detach().norm(dim=1)) if config.dora else None
    layer.register_parameter(MAGNITUDE, magnitude)
    if scale is not None:
        layer.register_parameter(SCALE, nn.Parameter(scale, requires_grad=False))


def disable_dropout(module: nn.Module) -> None:
    """Set the probability of all dropout layers and adapters to 0 in place, as `trl` does. Dropout
    inside attention that is not a layer stays, as in `trl`."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        if isinstance(layer, AdaptedLayer):
            layer.disable_dropout()


def set_trained(module: nn.Module, trained: bool) -> None:
    """Train or freeze a whole module, or only its adapters if it has any."""
    adapters = [p for name, p in module.named_parameters() if is_adapter(name)]
    for parameter in adapters or module.parameters():
        parameter.requires_grad_(trained)


def plain_copy(module: nn.Module, merged: bool) -> nn.Module:
    """Return a copy of a whole module without adapters, with new tokens' rows written into its
    weights.

    Args:
        merged: True to add the adapters to the weights. Quantised weights are dequantised.
    """
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, AdaptedLayer):
            layer.detach(merged)
    merge_rows(module)
    return module


def has_adapters(module: nn.Module) -> bool:
    return any(isinstance(child, AdaptedLayer) for child in module.modules())


def is_of_base(name: str) -> bool:
    """Return True if a parameter name belongs to the module without adapters."""
    return not is_adapter(name) and name.rpartition(".")[2] != SCALE


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTER_NAMES
