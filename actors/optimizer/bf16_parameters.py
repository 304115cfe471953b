"""Trained weights that are kept in bf16, with gradients in bf16: of matrix products, where autocast
would round them to it anyway.

What updates them sees fp32 all the same: a master copy that stays, or the weights themselves, to
which a step's result is rounded at random, up or down by how near it is (stochastic rounding).
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
# Of fp32's mantissa, that bf16 lacks.
_DROPPED = 16
NOISE_BLOCK = 2**22
"""Elements of a whole parameter, rounded to whole rows, whose noise is drawn at a time."""


class Bf16Parameter:
    """A trained parameter in bf16, and what its updates are made on.

    Args:
        key: its stage and name, which random numbers follow from.
        parameter: in fp32; becomes bf16 here.
        master: whether its fp32 values stay.
        part: that the process holds of the whole parameter; None if it holds all of it.
        seed: of the run; random numbers follow from it, the step and the whole parameter.

    Attributes:
        wide: fp32; without values between steps if there is no master.
        scale: scalar on the device that the gradient is multiplied with in fp32: clipped in bf16,
            it would be rounded a second time.
    """

    def __init__(
        self, key: Key, parameter: nn.Parameter, master: bool,
        part: ParameterPart | None = None, seed: int = 0,
    ) -> None:
        stage, name = key
        self._place = seed, stage.module, name
        self._part = part
        self.parameter, self.master = parameter, master
        self.scale: torch.Tensor | None = None
        self.wide = nn.Parameter(parameter.detach().clone())
        parameter.data = parameter.data.bfloat16()
        if not master:
            self._release()

    def open(self) -> None:
        """Show values and the scaled gradient in fp32."""
        if not self.master:
            self.wide.data = self.parameter.detach().float()
        gradient = self.parameter.grad
        self.wide.grad = None if gradient is None else gradient.float()
        if self.wide.grad is not None and self.scale is not None:
            self.wide.grad.mul_(self.scale)

    def close(self, step: int) -> None:
        """Take the values over.

        Args:
            step: number of the step.
        """
        values = self.wide.detach()
        if not self.master:
            seed = derive_seed("rounding", step, *self._place)
            values = rounded_at_random(values, seed, self._part)
        self.parameter.data.copy_(values)
        self.wide.grad = None
        if not self.master:
            self._release()

    def follow(self) -> None:
        """Where the parameter was given other values, the master has these."""
        if self.master:
            values, wide = self.parameter.detach(), self.wide.detach()
            wide.copy_(torch.where(wide.bfloat16() == values, wide, values.float()))

    def _release(self) -> None:
        self.wide.data = self.wide.data.new_empty((0, *self.parameter.shape[1:]))


def rounded_at_random(
    values: torch.Tensor, seed: int, part: ParameterPart | None = None
) -> torch.Tensor:
    """bf16 values next to fp32 ones, below or above with the probability that makes their mean the
    value. What bf16 has stays.

    Args:
        values: fp32.
        seed: of the random numbers.
        part: that they are of a whole parameter, whose other parts round as if all were here;
            None if they are all of it.
    """
    noise = _noise(part or ParameterPart.from_whole(values.shape), seed, values.device)
    bits = values.contiguous().view(torch.int32) + noise.view(values.shape)
    rounded = (bits >> _DROPPED << _DROPPED).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _noise(part: ParameterPart, seed: int, device: torch.device) -> torch.Tensor:
    """Return the part's int32 numbers below 2**16. Blocks of whole rows have seeds of their own, so
    that a part of the rows is drawn without the others."""
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
    """Keep the parameters in bf16 that the rules of their modules say, in place; by id.

    Args:
        parameters: trained ones.
        config: says the rules.
        modules: whose parameters these are.
        parts: of those that the process holds a part of.
        seed: of the run.
        elsewhere: of the parameters, those that another process updates and has the master of.
    """
    products = products_of(modules)
    kept: dict[int, Bf16Parameter] = {}
    for key, parameter in parameters.items():
        mode = config.rule_of(key[0].module, key[1]).parameters
        if mode != FP32 and id(parameter) in products and parameter.dtype == torch.float32:
            kept[id(parameter)] = Bf16Parameter(
                key, parameter, mode == MASTER and key not in elsewhere, parts.get(key), seed
            )
    return kept


def products_of(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of parameters that only matrix products use."""
    inside: set[int] = set()
    outside: set[int] = set()
    for module in modules:
        for child in module.modules():
            own = {id(p) for p in child._parameters.values() if p is not None}
            (inside if isinstance(child, CAST_BY_AUTOCAST) else outside).update(own)
    return inside - outside
