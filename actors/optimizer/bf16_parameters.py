"""Trained weights in bf16, with gradients in bf16. Used for weights of matrix products, which
autocast would round to bf16 anyway.

Updates are computed in fp32. They change either an fp32 master copy, or the bf16 weights
themselves: these are rounded up or down at random according to the distance (stochastic rounding).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod

import torch
from torch import nn

from raymm.actors.modules.draws import derive_seed
from raymm.actors.modules.precision import CAST_BY_AUTOCAST
from raymm.actors.optimizer.optimizer_config import FP32, MASTER, OptimizerConfig
from raymm.actors.sharding.parameter_shards import ParameterPart
from raymm.scheduler.plan.stage import StageId

Key = tuple[StageId, str]
# Bits of fp32's mantissa that bf16 lacks.
_DROPPED = 16
NOISE_BLOCK = 2**22
"""Elements whose noise is drawn at a time, rounded to whole rows of the whole parameter."""


class Bf16Parameter:
    """Trained parameter in bf16, with the fp32 values that its updates use.

    Args:
        key: stage and name; random numbers depend on them, ``seed``, the step and the whole
            parameter.
        parameter: fp32 parameter, which is converted to bf16 in place.
        part: part of the whole parameter that this process holds; None for all of it.

    Attributes:
        wide: fp32 values; empty between steps without a master.
    """

    def __init__(
        self, key: Key, parameter: nn.Parameter, master: bool,
        part: ParameterPart | None = None, seed: int = 0,
    ) -> None:
        stage, name = key
        self._place = seed, stage.module, name
        self._part = part
        self.parameter, self.master = parameter, master
        self._scale: torch.Tensor | None = None
        self.wide = nn.Parameter(parameter.detach().clone())
        parameter.data = parameter.data.bfloat16()
        if not master:
            self._release()

    def scale_gradient(self, scale: torch.Tensor | None) -> None:
        """Set the factor of the gradient, a scalar on the device. :meth:`open` applies it in fp32,
        because clipping in bf16 would round the gradient a second time."""
        self._scale = scale

    def open(self) -> None:
        """Make values and the scaled gradient available in fp32."""
        if not self.master:
            self.wide.data = self.parameter.detach().float()
        gradient = self.parameter.grad
        self.wide.grad = None if gradient is None else gradient.float()
        if self.wide.grad is not None and self._scale is not None:
            self.wide.grad.mul_(self._scale)

    def close(self, step: int) -> None:
        """Copy the updated values to the parameter, rounding at random without a master."""
        values = self.wide.detach()
        if not self.master:
            seed = derive_seed("rounding", step, *self._place)
            values = rounded_at_random(values, seed, self._part)
        self.parameter.data.copy_(values)
        self.wide.grad = None
        if not self.master:
            self._release()

    def follow(self) -> None:
        """Update the master after the parameter was given other values."""
        if self.master:
            values, wide = self.parameter.detach(), self.wide.detach()
            wide.copy_(torch.where(wide.bfloat16() == values, wide, values.float()))

    def _release(self) -> None:
        self.wide.data = self.wide.data.new_empty((0, *self.parameter.shape[1:]))


def rounded_at_random(
    values: torch.Tensor, seed: int, part: ParameterPart | None = None
) -> torch.Tensor:
    """Round fp32 values to one of the two neighbouring bf16 values, with probabilities that
    preserve the mean. Values that bf16 represents exactly are unchanged. A ``part`` is
    rounded as it would be within the whole parameter; None if ``values`` are the whole."""
    noise = _noise(part or ParameterPart.from_whole(values.shape), seed, values.device)
    bits = values.contiguous().view(torch.int32) + noise.view(values.shape)
    rounded = (bits >> _DROPPED << _DROPPED).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _noise(part: ParameterPart, seed: int, device: torch.device) -> torch.Tensor:
    """Return the part's int32 random numbers below 2**16. Each block of whole rows has its own
    seed, so rows can be drawn without the others."""
    generator = torch.Generator(device)
    count, *rest = part.shape
    height = max(1, NOISE_BLOCK // max(1, prod(rest)))
    blocks = []
    for start, stop in part.ranges if part.dim == 0 else ((0, count),):
        for block in range(start // height, -(-stop // height)):
            first = block * height
            drawn = torch.randint(
                0, 1 << _DROPPED, (min(height, count - first), *rest), dtype=torch.int32,
                generator=generator.manual_seed(derive_seed(seed, block)), device=device,
            )
            rows = drawn[max(start - first, 0) : stop - first]
            if part.dim:
                columns = [rows.narrow(part.dim, a, b - a) for a, b in part.ranges]
                rows = torch.cat(columns, part.dim)
            blocks.append(rows)
    return torch.cat(blocks)


def keep_in_bf16(
    parameters: Mapping[Key, nn.Parameter], config: OptimizerConfig, modules: Iterable[nn.Module],
    parts: Mapping[Key, ParameterPart], seed: int, elsewhere: Collection[Key] = (),
) -> dict[int, Bf16Parameter]:
    """Convert parameters to bf16 in place, according to the rules of their modules; return them by
    id. Parameters in ``elsewhere`` have their master in another process."""
    products = products_of(modules)
    converted: dict[int, Bf16Parameter] = {}
    for key, parameter in parameters.items():
        mode = config.rule_of(key[0].module, key[1]).parameters
        if mode != FP32 and id(parameter) in products and parameter.dtype == torch.float32:
            converted[id(parameter)] = Bf16Parameter(
                key, parameter, mode == MASTER and key not in elsewhere, parts.get(key), seed
            )
    return converted


def products_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return ids of parameters that only matrix products use."""
    inside: set[int] = set()
    outside: set[int] = set()
    for module in modules:
        for child in module.modules():
            ids = {id(p) for p in child._parameters.values() if p is not None}
            (inside if isinstance(child, CAST_BY_AUTOCAST) else outside).update(ids)
    return inside - outside
