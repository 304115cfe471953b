"""AdamW whose moments take a byte each (Dettmers et al., 8-bit optimizers via block-wise
quantization, 2021), with the map, blocks and exceptions of ``torchao.optim.AdamW8bit``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

BLOCK = 256
"""Elements that have a scale in common."""
LEAST_QUANTISED = 4096
"""Parameters with fewer elements, or others than whole blocks of them, keep moments in fp32."""
_EXPONENT_BITS = 7
_LEAST_SCALE = 2.0**-40
# Of a scale's mantissa. With so few, one that was multiplied and divided again is found again.
_SCALE_BITS = 16


@functools.cache
def dynamic_map(signed: bool) -> torch.Tensor:
    """(256,) fp32, increasing: the values of codes, dense near zero (Dettmers et al., §1.3)."""
    values = [0.0, 1.0]
    for exponent in range(_EXPONENT_BITS):
        fractions = 2 ** (exponent + (0 if signed else 1)) + 1
        ends = torch.linspace(0.1, 1, fractions)
        means = 10.0 ** (exponent - _EXPONENT_BITS + 1) * (ends[:-1] + ends[1:]) / 2
        values += means.tolist() + (-means).tolist() * signed
    return torch.tensor(sorted(values))


class Moment(NamedTuple):
    """A moment of a parameter: codes of its shape, and the scales of their blocks."""

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool

    @classmethod
    def of(cls, values: torch.Tensor, signed: bool, again: bool = False) -> Moment:
        """The nearest that there is.

        Args:
            values: fp32, contiguous, of whole blocks.
            signed: whether some may be below zero.
            again: they are what :meth:`values` gave; then the moment is the one that gave them,
                bit for bit.
        """
        table = dynamic_map(signed).to(values.device)
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1)
        if signed and again:
            # The map goes to 1, but not to -1: what lies lowest comes back as the lowest value.
            negative = -blocks.amin(dim=1) >= blocks.amax(dim=1)
            scales = torch.where(negative, scales / -table[0], scales)
        scales = _rounded(scales).clamp(min=_LEAST_SCALE)
        between = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(blocks / scales[:, None], between, right=True)
        return cls(codes.to(torch.uint8).view(values.shape), scales, signed)

    def values(self) -> torch.Tensor:
        """fp32, of the parameter's shape."""
        table = dynamic_map(self.signed).to(self.codes.device)
        blocks = table[self.codes.view(-1, BLOCK).int()] * self.scales[:, None]
        return blocks.view(self.codes.shape)


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    dropped = 23 - _SCALE_BITS
    bits = scales.view(torch.int32) + (1 << (dropped - 1))
    return (bits >> dropped << dropped).view(torch.float32)


def is_quantised(elements: int) -> bool:
    """Whether a parameter of so many elements has moments of a byte."""
    return elements >= LEAST_QUANTISED and elements % BLOCK == 0


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments of a byte, whose step changes nothing where ``found_inf`` is 1.

    Args:
        groups: of parameters in fp32, with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
    """

    found_inf: torch.Tensor

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One parameter after another, whose moments are fp32 meanwhile."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state, refused = self.state[parameter], self.found_inf.bool()
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _kept(torch.zeros_like(parameter), name, False)
        (first, second), rate, gradient = group["betas"], group["lr"], parameter.grad
        assert gradient is not None
        step = state["step"] + 1
        mean = _values(state["exp_avg"]).lerp(gradient, 1 - first)
        square = _values(state["exp_avg_sq"]).lerp(gradient.square(), 1 - second)
        size = square.sqrt() / (1 - second**step).sqrt() + group["eps"]
        updated = parameter * (1 - rate * group["weight_decay"])
        updated -= rate * (mean / (1 - first**step)) / size
        parameter.copy_(torch.where(refused, parameter, updated))
        state["step"] = torch.where(refused, state["step"], step)
        for name, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            _replace(state[name], _kept(value, name, False), refused)

    def plain_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """What is kept of a parameter, as AdamW has it: in fp32, which any layout can share out."""
        return {name: _values(kept) for name, kept in self.state.get(parameter, {}).items()}

    def load_plain_state(self, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`plain_state`."""
        self.state[parameter] = {
            name: value if name == "step" else _kept(value.contiguous(), name, True)
            for name, value in state.items()
        }


def _kept(values: torch.Tensor, name: str, again: bool) -> torch.Tensor | Moment:
    if not is_quantised(values.numel()):
        return values
    return Moment.of(values.contiguous(), name == "exp_avg", again)


def _values(kept: torch.Tensor | Moment) -> torch.Tensor:
    return kept.values() if isinstance(kept, Moment) else kept


def _replace(
    kept: torch.Tensor | Moment, new: torch.Tensor | Moment, refused: torch.Tensor
) -> None:
    for old, other in zip(_parts(kept), _parts(new), strict=True):
        old.copy_(torch.where(refused, old, other))


def _parts(kept: torch.Tensor | Moment) -> list[torch.Tensor]:
    return [kept.codes, kept.scales] if isinstance(kept, Moment) else [kept]
