"""AdamW with 8-bit moments (Dettmers et al., 8-bit optimizers via block-wise quantization, 2021),
with the map, blocks and exceptions of ``torchao.optim.AdamW8bit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from raymm.actors.sharding.parameter_shards import ParameterPart

Agree = Callable[[nn.Parameter, torch.Tensor], None]

BLOCK = 256
"""Number of elements that share a scale."""
LEAST_QUANTISED = 4096
"""Smallest number of elements with 8-bit moments. Smaller parameters, and parameters whose size is
not a multiple of :data:`BLOCK`, have fp32 moments, however they are sharded."""
_EXPONENT_BITS = 7
_LEAST_SCALE = 2.0**-40
# Bits of a scale's mantissa. With so few bits, a scale survives a multiplication and a division
# exactly.
_SCALE_BITS = 16


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """Return the (256,) fp32 values of the codes, increasing and dense near zero (Dettmers et al.,
    §1.3)."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENT_BITS):
        fractions = 2 ** (exponent + (0 if signed else 1)) + 1
        ends = torch.linspace(0.1, 1, fractions)
        means = 10.0 ** (exponent - _EXPONENT_BITS + 1) * (ends[:-1] + ends[1:]) / 2
        values += means.tolist() + (-means).tolist() * signed
    return torch.tensor(sorted(values))


class Blocks:
    """Quantisation blocks of a whole parameter, in element order. A process holds a part of them.

    Attributes:
        aligned: True if every process holds whole blocks only.
    """

    def __init__(self, part: ParameterPart) -> None:
        self._part = part
        self.quantised = is_quantised(prod(part.shape))
        self.aligned = all(edge * prod(part.shape[part.dim + 1 :]) % BLOCK == 0
                           for edge in part.edges)  # fmt: skip

    def bounds(self, values: torch.Tensor) -> torch.Tensor:
        """Return (2, blocks): the largest value of each block, and of its negated values. If blocks
        are not aligned, the result has all blocks of the whole parameter. Elements of other
        processes then count as zeros. ``values`` are local and contiguous."""
        if self.aligned:
            blocks = values.view(-1, BLOCK)
            return torch.stack([blocks.amax(dim=1), -blocks.amin(dim=1)])
        zeros = values.new_zeros(prod(self._part.shape) // BLOCK)
        numbers, flat = self._numbers(values.device), values.flatten()
        return torch.stack([
            zeros.scatter_reduce(0, numbers, signed, "amax") for signed in (flat, -flat)
        ])

    def apply(
        self, operation: Callable[..., torch.Tensor], values: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Return ``operation(value, scale)`` of each element and the scale of its block. ``values``
        are local and contiguous, ``scales`` (blocks,)."""
        if self.aligned:
            return operation(values.view(-1, BLOCK), scales[:, None]).view(values.shape)
        return operation(values, scales[self._numbers(scales.device)].view(values.shape))

    def _numbers(self, device: torch.device) -> torch.Tensor:
        outer, length, inner = self._part.folded
        positions = torch.cat([
            torch.arange(start, stop, device=device) for start, stop in self._part.ranges
        ])
        rows = torch.arange(outer, device=device)[:, None] * length + positions
        columns = torch.arange(inner, device=device)
        return (rows[..., None] * inner + columns).div(BLOCK, rounding_mode="floor").flatten()


class Moment(NamedTuple):
    """Quantised moment of a parameter: codes in its shape, and the scales of their blocks."""

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool
    blocks: Blocks

    @classmethod
    def of(
        cls, values: torch.Tensor, signed: bool, again: bool | torch.Tensor = False,
        blocks: Blocks | None = None, bounds: torch.Tensor | None = None,
    ) -> Moment:
        """Quantise values to the nearest codes.

        Args:
            values: fp32, contiguous, whole blocks.
            again: True if the values come from :meth:`values`; the result then equals the original
                moment bit for bit. May be a scalar tensor.
            blocks: blocks of the parameter; None if ``values`` are the whole parameter.
            bounds: (2, blocks), largest values of each block and of its negated values over all
                processes; None to compute them from ``values``.
        """
        table = dynamic_map(signed).to(values.device)
        blocks = blocks or Blocks(ParameterPart.from_whole(values.shape))
        high, low = blocks.bounds(values) if bounds is None else bounds
        scales = high.maximum(low)
        if signed:
            # The map reaches 1 but not -1, so the lowest value of a block is restored as the map's
            # lowest value.
            negative = (low >= high) & again
            scales = torch.where(negative, scales / -table[0], scales)
        scales = _rounded(scales).clamp(min=_LEAST_SCALE)
        between = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(blocks.apply(torch.div, values, scales), between, right=True)
        return cls(codes.to(torch.uint8), scales, signed, blocks)

    def values(self) -> torch.Tensor:
        """Return the values in fp32, in the parameter's shape."""
        table = dynamic_map(self.signed).to(self.codes.device)
        return self.blocks.apply(torch.mul, table[self.codes.int()], self.scales)


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    dropped = 23 - _SCALE_BITS
    bits = scales.view(torch.int32) + (1 << (dropped - 1))
    return (bits >> dropped << dropped).view(torch.float32)


def needs_agreement(part: ParameterPart) -> bool:
    """Return True if the processes that share a parameter must agree on its moments' scales in each
    step."""
    blocks = Blocks(part)
    return blocks.quantised and not blocks.aligned


def is_quantised(elements: int) -> bool:
    """Return True if a parameter with this number of elements has 8-bit moments."""
    return elements >= LEAST_QUANTISED and elements % BLOCK == 0


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments. A step changes nothing where ``refused`` is 1.

    Moments do not depend on how parameters are sharded: blocks are those of the whole parameter,
    and where shards end within blocks, the processes agree on the scales.

    Args:
        groups: groups of fp32 parameters, with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        parts: by id, the part of each sharded parameter that this process holds; in the same order
            on all processes that share them.
        agree: all-reduces a tensor in place to its elementwise maximum over the processes that
            share a parameter; called by all of them in the same order.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]],
        parts: Mapping[int, ParameterPart] = MappingProxyType({}),
        agree: Agree | None = None,
    ) -> None:
        super().__init__(groups, {})
        self._parts, self._agree = parts, agree
        self._order = {key: number for number, key in enumerate(parts)}

    @torch.no_grad()
    def step(self, refused: torch.Tensor) -> None:
        """Update one parameter after another, with its moments in fp32 meanwhile; sharded
        parameters in the same order on all processes."""
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        for parameter, group in sorted(pairs, key=lambda pair: self._order.get(id(pair[0]), -1)):
            if parameter.grad is not None:
                self._update(parameter, group, refused.bool())

    def _update(
        self, parameter: nn.Parameter, group: Mapping[str, Any], refused: torch.Tensor
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        (first, second), rate, gradient = group["betas"], group["lr"], parameter.grad
        assert gradient is not None
        step = state["step"] + 1
        moments = _values(state["exp_avg"]), _values(state["exp_avg_sq"])
        mean = moments[0].lerp(gradient, 1 - first)
        square = moments[1].lerp(gradient.square(), 1 - second)
        size = square.sqrt() / (1 - second**step).sqrt() + group["eps"]
        updated = parameter * (1 - rate * group["weight_decay"])
        updated -= rate * (mean / (1 - first**step)) / size
        parameter.copy_(torch.where(refused, parameter, updated))
        state["step"] = torch.where(refused, state["step"], step)
        mean = torch.where(refused, moments[0], mean)
        square = torch.where(refused, moments[1], square)
        state["exp_avg"], state["exp_avg_sq"] = self._kept(parameter, mean, square, refused)

    def _kept(
        self, parameter: nn.Parameter, mean: torch.Tensor, square: torch.Tensor,
        again: bool | torch.Tensor,
    ) -> tuple[torch.Tensor | Moment, torch.Tensor | Moment]:
        """Return the moments in the form in which they are stored until the next step."""
        blocks = self._blocks(parameter)
        if not blocks.quantised:
            return mean, square
        mean, square = mean.contiguous(), square.contiguous()
        bounds = torch.stack([blocks.bounds(mean), blocks.bounds(square)])
        if not blocks.aligned:
            assert self._agree is not None
            self._agree(parameter, bounds)
        return (
            Moment.of(mean, True, again, blocks, bounds[0]),
            Moment.of(square, False, again, blocks, bounds[1]),
        )

    def _blocks(self, parameter: nn.Parameter) -> Blocks:
        shard = self._parts.get(id(parameter))
        return Blocks(shard or ParameterPart.from_whole(parameter.shape))

    def plain_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a parameter's state as AdamW stores it: in fp32, so that it can be sharded in any
        layout."""
        return {name: _values(value) for name, value in self.state.get(parameter, {}).items()}

    def load_plain_state(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        """Invert :meth:`plain_state`. Moments whose scales need an agreement stay in fp32 until the
        next step, because this method does not communicate."""
        loaded: dict[str, Any] = dict(state)
        moments = [loaded.get(name) for name in ("exp_avg", "exp_avg_sq")]
        if self._blocks(parameter).aligned and all(m is not None for m in moments):
            stored = self._kept(parameter, *cast(Any, moments), again=True)
            loaded["exp_avg"], loaded["exp_avg_sq"] = stored
        self.state[parameter] = loaded


def _values(kept: torch.Tensor | Moment) -> torch.Tensor:
    return kept.values() if isinstance(kept, Moment) else kept
