"""Workload of all contenders: a chain of stages, forward and backward, 1F1B.

A stage multiplies its input by one trainable weight. There are two forms. The *scaled* form
multiplies every element; contenders are checked with it before anything is timed. The timed form
multiplies only the first element, by a weight of exactly 1, which is the identity: nothing is
computed or copied, yet the weight's gradient still shows that every microbatch arrived, in both
directions.
"""

import dataclasses
import time
from typing import Literal

import torch
from torch import Tensor, nn

HIDDEN = 1024
BURN_SIZE = 128
Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """Point of the grid.

    Attributes:
        message_bytes: size of one fp32 hidden state of shape (rows, HIDDEN).
        burn_repeats: matrix products of a stage per forward and per backward; 0 for none.
        scaled: True to multiply every element (to check numbers), False for the first (to time).
        stages: length of the chain, one process each.
    """

    message_bytes: int
    microbatches: int
    burn_repeats: int = 0
    scaled: bool = False
    stages: int = 4

    @property
    def rows(self) -> int:
        """Return the rows of one microbatch's hidden state."""
        return self.message_bytes // (4 * HIDDEN)


@dataclasses.dataclass(frozen=True)
class ChainResult:
    """Loss of one step, summed over microbatches, and each stage's gradient."""

    loss: float
    weight_gradients: tuple[float, ...]


class Burn:
    """Fixed amount of CPU work: `repeats` products of small matrices, without allocation."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._a = torch.full((BURN_SIZE, BURN_SIZE), 0.5)
        self._out = torch.empty(BURN_SIZE, BURN_SIZE)

    def __call__(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self._a, self._a, out=self._out)


def calibrate_burn(milliseconds: float) -> int:
    """Return the repeats of `Burn` that take `milliseconds` of one core on this machine."""
    probe = Burn(200)
    probe()
    durations = []
    for _ in range(9):
        start = time.thread_time()
        probe()
        durations.append(time.thread_time() - start)
    per_repeat = sorted(durations)[len(durations) // 2] / probe.repeats
    return max(1, round(milliseconds / 1e3 / per_repeat))


class _Scale(torch.autograd.Function):
    """Product of x (rows, HIDDEN) and a scalar weight; for `scaled` see the module's docstring."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scaled: bool, burn: Burn) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaled, ctx.burn = scaled, burn
        burn()
        return x * weight if scaled else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        ctx.burn()
        if ctx.scaled:
            return gradient * weight, (gradient * x).sum(), None, None
        # Return a new view, so that autograd uses it as x.grad instead of cloning it.
        return gradient.view_as(gradient), gradient[0, 0] * x[0, 0], None, None


class _HalfSquare(torch.autograd.Function):
    """0.5·Σy², with gradient y; the value covers only the first element unless `full`."""

    @staticmethod
    def forward(ctx, y: Tensor, full: bool) -> Tensor:
        ctx.save_for_backward(y)
        return 0.5 * y.square().sum() if full else 0.5 * y[0, 0].square()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (y,) = ctx.saved_tensors
        # The incoming gradient is 1 by construction: this avoids a product over 4 MB.
        return y.view_as(y), None


class ChainStage(nn.Module):
    """Stage `index` of the chain: (rows, HIDDEN) fp32 to the same."""

    def __init__(self, config: ChainConfig, index: int) -> None:
        super().__init__()
        self.scaled = config.scaled
        self.burn = Burn(config.burn_repeats)
        self.weight = nn.Parameter(torch.tensor(1.0 + 0.01 * (index + 1) * config.scaled))

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self.weight, self.scaled, self.burn)


class ChainLoss(nn.Module):
    """Loss of one microbatch: 0.5·Σy² (its first term only when timing), gradient y."""

    def __init__(self, config: ChainConfig) -> None:
        super().__init__()
        self.full = config.scaled

    def forward(self, y: Tensor, target: Tensor | None = None) -> Tensor:
        return _HalfSquare.apply(y, self.full)


def chain_inputs(config: ChainConfig) -> Tensor:
    """Return seeded inputs of the first stage for all microbatches, (microbatches · rows, HIDDEN).
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randn(config.microbatches * config.rows, HIDDEN, generator=generator)


class StageRunner:
    """Runs one stage of the chain, one microbatch and direction at a time.

    Used by the contenders without a pipeline runtime.
    """

    def __init__(self, config: ChainConfig, index: int) -> None:
        self.config, self.index = config, index
        self.is_first, self.is_last = index == 0, index == config.stages - 1
        self.stage = ChainStage(config, index)
        self.loss = ChainLoss(config)
        self.inputs = chain_inputs(config).chunk(config.microbatches) if self.is_first else ()
        self._live: dict[int, tuple[Tensor, Tensor]] = {}
        self.loss_sum = 0.0

    def reset(self) -> None:
        """Reset gradient and loss at the start of a step."""
        self.stage.weight.grad = None
        self.loss_sum = 0.0

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Return the output to send, or None on the last stage. `x` is None on the first."""
        if microbatch == 0:
            self.reset()
        x = self.inputs[microbatch] if self.is_first else x.detach().requires_grad_()
        y = self.stage(x)
        if self.is_last:
            y = self.loss(y)
            self.loss_sum += y.item()
        self._live[microbatch] = x, y
        return None if self.is_last else y.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient to send back, or None on the first stage.

        `gradient` is None on the last stage.
        """
        x, y = self._live.pop(microbatch)
        torch.autograd.backward(y, gradient)
        return x.grad

    def facts(self) -> tuple[float, float]:
        """Return the last step's loss sum (0 except on the last stage) and weight gradient."""
        return self.loss_sum, self.stage.weight.grad.item()


def one_f_one_b(config: ChainConfig, index: int) -> list[tuple[Direction, int]]:
    """Return stage `index`'s 1F1B order: (direction, microbatch)."""
    warm_up = min(config.stages - 1 - index, config.microbatches)
    order: list[tuple[Direction, int]] = [("forward", m) for m in range(warm_up)]
    for m in range(config.microbatches - warm_up):
        order += [("forward", warm_up + m), ("backward", m)]
    first_left = config.microbatches - warm_up
    return order + [("backward", m) for m in range(first_left, config.microbatches)]


def global_one_f_one_b(config: ChainConfig) -> list[tuple[int, Direction, int]]:
    """Merge all stages' 1F1B orders into one (stage, direction, microbatch) order.

    Every entry follows its dependencies.
    """
    waiting = [one_f_one_b(config, index) for index in range(config.stages)]
    positions = [0] * config.stages
    done: set[tuple[int, Direction, int]] = set()
    merged: list[tuple[int, Direction, int]] = []
    total = sum(len(order) for order in waiting)
    while len(merged) < total:
        before = len(merged)
        for index, order in enumerate(waiting):
            if positions[index] == len(order):
                continue
            direction, microbatch = order[positions[index]]
            neighbour = index - 1 if direction == "forward" else index + 1
            needs = (neighbour, direction, microbatch)
            if 0 <= neighbour < config.stages and needs not in done:
                continue
            positions[index] += 1
            merged.append((index, direction, microbatch))
            done.add(merged[-1])
        if len(merged) == before:
            raise RuntimeError(f"1F1B order of {config} deadlocks after {before} operations")
    return merged


def reference(config: ChainConfig) -> ChainResult:
    """Compute the same step in this process, one microbatch after the other, as the reference."""
    stages = [ChainStage(config, index) for index in range(config.stages)]
    loss_of, loss_sum = ChainLoss(config), 0.0
    for x in chain_inputs(config).chunk(config.microbatches):
        for stage in stages:
            x = stage(x)
        loss = loss_of(x)
        loss.backward()
        loss_sum += loss.item()
    return ChainResult(loss_sum, tuple(stage.weight.grad.item() for stage in stages))
