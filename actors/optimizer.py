"""The optimizer of one rank, and what it must agree on with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

# Gradients of shared parameters are summed this many bytes at a time.
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Attributes:
        lr: peak learning rate.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        max_grad_norm: clip gradients to this global norm over all ranks; None for no clipping.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` decay to ``min_lr_ratio * lr``
            at ``total_steps``, after ``warmup_steps`` of linear warm-up.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; accepted: constant, linear, cosine")
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps")
        if self.lr < 0:
            raise ValueError(f"lr is {self.lr}; it must not be negative")

    def factor(self, step: int) -> float:
        """Learning rate of a step (from 0) as a fraction of ``lr``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        span = max(self.total_steps - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / span, 1.0)
        decay = 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * decay

    def build(
        self, parameters: Iterable[nn.Parameter]
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The torch optimizer and scheduler for these parameters."""
        optimizer = torch.optim.AdamW(
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
        )
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that lives in several stages (tied embeddings, copies of a module).

    Attributes:
        holders: (stage, name in the stage), first holder first; it alone counts the
            parameter in the gradient norm.
        ranks: the ranks of the holders, ascending, without repeats.
    """

    holders: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]


def reduce_in_buckets(
    tensors: Iterable[torch.Tensor],
    reduce: Callable[[torch.Tensor], object],
    limit: int = BUCKET_BYTES,
) -> None:
    """Apply an in-place collective to many tensors, a flat bucket of them at a time.

    Args:
        tensors: changed in place; any shapes and dtypes.
        reduce: gets one flat tensor, of one dtype.
        limit: bytes per bucket; only a tensor larger than that makes a larger one.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > limit):
            _reduce_bucket(bucket, reduce)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        _reduce_bucket(bucket, reduce)


def _reduce_bucket(
    tensors: list[torch.Tensor], reduce: Callable[[torch.Tensor], object]
) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


class RankOptimizer:
    """Gradient reduction, clipping and AdamW for the parameters of one rank.

    Every rank calls every method in the same order: they are collective.

    Args:
        parameters: the rank's trainable parameters by (stage, name).
        config: the optimizer's.
        shared: the plan's shared parameters, all of them, in one order on all ranks.
        groups: process group per entry of ``shared`` with more than one rank, else None;
            entries with the same ranks have the same group.
    """

    def __init__(
        self,
        parameters: dict[tuple[str, str], nn.Parameter],
        config: OptimizerConfig,
        shared: tuple[SharedParameter, ...],
        groups: tuple[dist.ProcessGroup | None, ...],
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.config = config
        self._shared: dict[
            tuple[int, ...], tuple[dist.ProcessGroup | None, list[list[nn.Parameter]]]
        ] = {}
        for one, group in zip(shared, groups, strict=True):
            mine = [parameters[holder] for holder in one.holders if holder in parameters]
            if mine:
                self._shared.setdefault(one.ranks, (group, []))[1].append(mine)
        self._device = device
        counted_elsewhere = {holder for one in shared for holder in one.holders[1:]}
        self._counted = [p for key, p in parameters.items() if key not in counted_elsewhere]
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if parameters:
            self.optimizer, self.scheduler = config.build(parameters.values())

    def reduce_tied(self) -> None:
        """Give every holder of a shared parameter the sum of all holders' gradients.

        A holder without a gradient counts as zero; where none has one, all stay without, so
        that AdamW leaves the parameter alone.
        """
        for group, shared in self._shared.values():
            present = torch.tensor(
                [any(p.grad is not None for p in mine) for mine in shared],
                dtype=torch.int32, device=self._device,
            )
            if group is not None:
                dist.all_reduce(present, group=group)
            due = [mine for mine, count in zip(shared, present.tolist(), strict=True) if count]
            for first, *others in due:
                if first.grad is None:
                    first.grad = torch.zeros_like(first)
                for other in others:
                    if other.grad is not None:
                        first.grad += other.grad
            if group is not None:
                reduce_in_buckets(
                    [first.grad for first, *_ in due], partial(dist.all_reduce, group=group)
                )
            for first, *others in due:
                for other in others:
                    other.grad = first.grad.clone()

    def clip(self) -> float:
        """Scale gradients to ``max_grad_norm``; returns the global norm before.

        As ``torch.nn.utils.clip_grad_norm_`` over all ranks' parameters at once.
        """
        norms = [torch.linalg.vector_norm(p.grad) for p in self._counted if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if norms:
            square = torch.stack(norms).double().square().sum()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(square)
        norm = float(square.sqrt())
        if self.config.max_grad_norm is not None:
            scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
            for parameter in self.parameters.values():
                if parameter.grad is not None and scale < 1.0:
                    parameter.grad.mul_(scale)
        return norm

    def step(self) -> float:
        """AdamW and scheduler step; zeroes gradients. Returns the learning rate used."""
        if self.optimizer is None:
            return self.config.lr
        used = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.zero_grad()
        return used

    def zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state as flat tensors, named ``stage/name/key``."""
        tensors = {}
        for (stage, name), parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{stage}/{name}/{key}"] = value
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Inverse of :meth:`state_tensors`; ``step`` is the number of steps taken."""
        if self.optimizer is None:
            return
        for (stage, name), parameter in self.parameters.items():
            prefix = f"{stage}/{name}/"
            state = {
                key.removeprefix(prefix): value.clone()
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if state:
                self.optimizer.state[parameter] = state
        self.scheduler.last_epoch = step
        rate = self.config.lr * self.config.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scheduler._last_lr = [rate]
