"""Optimizer of one rank, including its communication with other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raymm.actors.optimizer.adamw_8bit import needs_agreement
from raymm.actors.optimizer.averages import AVERAGE_NAME, ParameterAverages
from raymm.actors.optimizer.bf16_parameters import keep_in_bf16
from raymm.actors.optimizer.finite import (
    FiniteObserver,
    Place,
    named_tensors,
    not_finite,
    parameter_places,
)
from raymm.actors.optimizer.gradient_reduction import (
    GradientReduction,
    ParameterOwnership,
    ReductionGroup,
)
from raymm.actors.optimizer.optimizer_config import ADAMW_8BIT, OptimizerConfig
from raymm.actors.optimizer.updates import (
    Agree,
    ParameterUpdates,
    layer_norm_parameters,
    matrices_of,
)
from raymm.actors.sharding.fully_sharded import local_part
from raymm.actors.sharding.parameter_shards import ParameterPart
from raymm.kernels.collectives.waiting import waits_for_others
from raymm.scheduler.plan.stage import StageId

# AdamW keeps squares of gradients in fp32, so gradients with a larger norm count as infinite.
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Update:
    """Result of a step's update.

    Attributes:
        grad_norm: norm before clipping; NaN if a loss is not finite; None if it was not computed.
        learning_rate: rate by the rule for the whole model; None if the step was skipped.
        not_finite: for a skipped step, the non-finite values of this process.
    """

    grad_norm: float | None
    learning_rate: float | None
    not_finite: list[Place] | None = None


class RankOptimizer:
    """Gradient reduction, clipping and updates of the parameters of one process.

    All processes call the same methods in the same order, because most of them are collective. Only
    :meth:`finish`, which ends a step, waits for the device. The device itself decides if a step is
    applied, also for each parameter that has no gradient on this process but may on others.

    A step is skipped on all processes if a loss or the gradient norm is not finite on any of them,
    or if the norm after clipping is above :data:`LARGEST_NORM`. Parameters, optimizer state and
    running statistics then stay as they were. A skipped step still counts as a step: the learning
    rate of step n is the schedule's rate for n.

    Args:
        agree: all-reduces a tensor in place to its maximum over the processes that share a
            parameter.
        frozen: frozen parameters of this process by (stage, name), whose averages continue.

    Attributes:
        updated: parameters that this process updates, as plain tensors: the local part of sharded
            parameters, without parameters that another process owns.
        in_bf16: parameters that are kept in bf16, by id.
    """

    def __init__(
        self,
        process: int,
        parameters: dict[tuple[StageId, str], nn.Parameter],
        config: OptimizerConfig,
        parameter_ownership: ParameterOwnership,
        groups: Mapping[ReductionGroup, dist.ProcessGroup],
        device: torch.device,
        modules: Iterable[nn.Module] = (),
        parts: Mapping[tuple[StageId, str], ParameterPart] | None = None,
        agree: Agree | None = None,
        seed: int = 0,
        frozen: Mapping[tuple[StageId, str], nn.Parameter] | None = None,
    ) -> None:
        self.parameters = parameters
        self.config = config
        modules, parts = list(modules), parts or {}
        elsewhere = {
            (reference.stage, reference.name)
            for shared in parameter_ownership.shared if shared.owner not in (None, process)
            for reference in shared.references if reference.process == process
        }
        # Before the reduction is created, because its buckets have one dtype each.
        self.in_bf16 = keep_in_bf16(parameters, config, modules, parts, seed, elsewhere)
        self._device = device
        self.reduction = GradientReduction(process, parameters, parameter_ownership.shared, groups)
        # All processes that share these parameters take part in their updates, even without
        # elements.
        agreed = {
            key for key, shard in parts.items() if needs_agreement(shard)
            and config.rule_of(key[0].module, key[1]).name == ADAMW_8BIT
        }
        self.updated = {
            key: _plain(p) for key, p in parameters.items()
            if key not in elsewhere and (local_part(p).numel() or key in agreed)
        }
        self._in_grad_norm = [
            p for key, p in self.updated.items() if key in parameter_ownership.in_grad_norm
        ]
        self._others = [
            p for key, p in self.updated.items() if key not in parameter_ownership.in_grad_norm
        ]
        self._steps = self._finished_steps = 0
        self.observer = FiniteObserver(device, modules)
        self._norm: torch.Tensor | None = None  # norm of the current step's gradients
        # 1 if the step must be skipped, else 0.
        self._refused = torch.zeros((), device=device)
        self._rate: float | None = None
        updated = {id(parameters[key]): id(plain) for key, plain in self.updated.items()}
        matrices, layer_norms = (
            {updated[parameter] for parameter in ids if parameter in updated}
            for ids in (matrices_of(modules), layer_norm_parameters(modules))
        )
        self._updates = ParameterUpdates(
            self.updated, config, matrices, layer_norms, self.in_bf16, parts, agree
        )
        self.frozen = frozen or {}
        self.averages = ParameterAverages(self.updated, self.frozen, self.in_bf16, config.ema)
        self._modules = modules

    def clip(self) -> None:
        """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, over the parameters of all ranks
        at once. The norm is NaN if a loss is not finite. From the same all-reduce, all processes
        know if the step is skipped."""
        self._take_local_parts()
        self._norm = norm = self._global_norm(None)
        scale = torch.ones_like(norm)
        if self.config.max_grad_norm is not None:
            scale = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        applied = norm * scale <= LARGEST_NORM  # NaN is not
        self._refused = (~applied).float()
        if self.config.max_grad_norm is not None:
            factor = torch.where(applied, scale, 1.0)
            self._updates.scale_gradients(factor)
            self._scale(factor, [p for p in self.updated.values() if not self._updates.scales(p)])

    def _scale(self, factor: torch.Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply gradients by a factor, a float64 scalar."""
        factors = {torch.float64: factor}
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                dtype = _wide(gradient.dtype)
                cast_factor = factors.setdefault(dtype, factor.to(dtype))
                if (bf16_parameter := self.in_bf16.get(id(parameter))) is not None:
                    bf16_parameter.scale_gradient(cast_factor)
                elif gradient.dtype == dtype:
                    gradient.mul_(cast_factor)
                else:
                    gradient.copy_(gradient.to(dtype) * cast_factor)

    def _global_norm(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the norm of all gradients, each counted once, as a float64 scalar. ``dtype`` is
        the dtype of the computation; None for the gradients' own dtype, and fp32 for bf16."""
        square = self.observer.losses().clone()
        # A replica of a gradient that is counted elsewhere adds nothing, unless it is not finite.
        for parameters, weight in ((self._in_grad_norm, 1.0), (self._others, 0.0)):
            gradients = [p.grad for p in parameters if p.grad is not None]
            norms: dict[int, torch.Tensor] = {}
            for own_dtype in {gradient.dtype for gradient in gradients}:
                # One kernel for many gradients; torch.linalg has none.
                same = [gradient for gradient in gradients if gradient.dtype == own_dtype]
                compute = dtype or _wide(own_dtype)
                norms_of_dtype = torch._foreach_norm(same, 2, compute)  # type: ignore[attr-defined]
                norms |= zip(map(id, same), norms_of_dtype, strict=True)
            if gradients:  # summed in their order, whatever their dtypes are
                ordered = torch.stack([norms[id(gradient)] for gradient in gradients])
                square = square + (ordered.double().square() * weight).sum()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def step(self) -> None:
        self._take_local_parts()
        self._rate = self.config.rate(self._steps)
        self._steps += 1
        self._apply(self._refused)

    def _apply(self, refused: torch.Tensor) -> None:
        """Run the step's updates and send the values to other holders; nothing changes where
        ``refused`` is 1."""
        step = self._steps - 1
        self.averages.begin()
        absent = {id(parameter): flag for parameter, flag in self.reduction.perhaps_absent}
        flags = {key: absent.get(id(self.parameters[key])) for key in self.updated}
        present = [p for key, p in self.updated.items() if flags[key] is None]
        self._updates.step(present, refused, step)
        for key, flag in flags.items():
            if flag is not None:
                self._updates.step([self.updated[key]], flag.maximum(refused), step)
        self.averages.follow(refused, step)
        self.reduction.send_updates()

    def show_averages(self) -> None:
        """Replace parameters by their averages on all processes until :meth:`hide_averages`. Before
        the first step, parameters are unchanged. Collective."""
        self._gather_nothing()
        self._take_local_parts()
        self.averages.show(self.parameters.values())
        self.reduction.send_updates()

    def hide_averages(self) -> None:
        """Restore the parameters; not collective."""
        self._gather_nothing()
        self.averages.hide()

    def _gather_nothing(self) -> None:
        """Drop sharded parameters that a forward has gathered, so that stale values are not
        used."""
        for module in self._modules:
            for child in module.modules():
                if isinstance(child, FSDPModule):
                    child.reshard()

    @property
    def stepped(self) -> bool:
        return self._rate is not None

    @waits_for_others
    def finish(self, check: Callable[[], None] = lambda: None) -> Update:
        """Finish a step: wait for the device, zero gradients, and return the update's result.

        Args:
            check: called once the device has finished. It raises an error if data that the step
                received may be incomplete; the step then does not count as finished.
        """
        norm, rate, locations = None, self._rate, None
        if self._norm is not None:
            norm = float(self._norm)
            if not math.isfinite(norm) or bool(self._refused):
                norm, locations = self._look_again(norm)
        if locations is not None:
            rate = None
            self.observer.restore_statistics()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        check()
        self.zero_grad()
        self._finished_steps = self._steps
        return Update(norm, rate, locations)

    @property
    def progress(self) -> Progress:
        """Return the number of finished steps, and whether a later step was issued."""
        return Progress(self._finished_steps, self._finished_steps == self._steps)

    def _look_again(self, norm: float) -> tuple[float, list[Place] | None]:
        """Check a rejected step in fp64; return its norm and the non-finite values. If only squares
        of finite gradients had overflowed, the step is applied after all. Called on all processes
        or on none."""
        if not math.isfinite(norm):
            norm = float(self._global_norm(torch.float64))
        scale = 1.0
        if self.config.max_grad_norm is not None:
            scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        if not norm * scale <= LARGEST_NORM:  # NaN, too
            gradients = ((key, parameter.grad) for key, parameter in self.updated.items())
            return norm, self.observer.places() + parameter_places(gradients)
        # Not in the update, whose fp32 scale may be infinite for such a norm.
        self._updates.scale_gradients(None)
        factor = torch.full_like(self._refused, scale, dtype=torch.float64)
        self._scale(factor, self.updated.values())
        self._apply(torch.zeros_like(self._refused))
        return norm, None

    def _take_local_parts(self) -> None:
        """Point the plain tensors at the values and gradients of sharded parameters, in the same
        memory."""
        for key, plain in self.updated.items():
            parameter = self.parameters[key]
            if parameter is not plain:
                plain.data = local_part(parameter.detach())
                plain.grad = None if parameter.grad is None else local_part(parameter.grad)

    def zero_grad(self) -> None:
        self.observer.clear()
        self._norm, self._rate = None, None
        self._refused = torch.zeros_like(self._refused)
        self.reduction.perhaps_absent.clear()
        self._updates.scale_gradients(None)
        for bf16_parameter in self.in_bf16.values():
            bf16_parameter.scale_gradient(None)
        for parameter in (*self.parameters.values(), *self.updated.values()):
            parameter.grad = None

    def gradients(self) -> dict[tuple[StageId, str], torch.Tensor | None]:
        """Return this process's part of each gradient on the host; None if no process has the
        gradient."""
        absent = {id(p) for p, flag in self.reduction.perhaps_absent if bool(flag)}
        return {
            key: None if p.grad is None or id(p) in absent else local_part(p.grad).cpu()
            for key, p in self.parameters.items()
        }

    def not_finite_tensors(self, modules: Mapping[StageId, nn.Module]) -> list[str]:
        """Return checkpoint names of parameters and optimizer state with non-finite values, with
        their number."""
        return not_finite(named_tensors(modules, self.state_tensors()))

    @property
    def state_is_temporary(self) -> bool:
        """Return True if :meth:`state_tensors` creates tensors, because state is stored in fewer
        bits."""
        return self._updates.state_is_temporary

    def state_tensors(self) -> dict[tuple[StageId, str, str], torch.Tensor]:
        return {
            (*parameter_key, key): value
            for parameter_key, state in self._updates.states(self.updated).items()
            for key, value in state.items()
        } | {
            (*parameter_key, key): value
            for parameter_key in (*self.updated, *self.frozen)
            for key, value in self.averages.state(parameter_key).items()
        }

    def forget_state(self) -> None:
        """Reset optimizer state and averages to their state before the first step."""
        self._updates.forget()
        self.averages.forget()

    def load_state_tensors(
        self, tensors: Mapping[tuple[StageId, str, str], torch.Tensor], step: int,
        whole: bool = True,
    ) -> None:  # fmt: skip
        """Invert :meth:`state_tensors`, after ``step`` finished steps. ``whole`` is False if
        parameters and state come from a step that did not finish."""
        self._finished_steps, self._steps = step, step if whole else step + 1
        states: dict[tuple[StageId, str], dict[str, torch.Tensor]] = {}
        for (stage, name, key), value in tensors.items():
            states.setdefault((stage, name), {})[key] = value
        for parameter_key in (*self.updated, *self.frozen):
            state = states.get(parameter_key, {})
            self.averages.load_state(parameter_key, state)
            if parameter_key in self.updated:
                local_state = {key: value for key, value in state.items() if key != AVERAGE_NAME}
                self._updates.load_state(parameter_key, local_state)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are computed."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    local = local_part(parameter)
    return parameter if local is parameter else nn.Parameter(local.detach())


class Progress(NamedTuple):
    """Progress of a process's parameters.

    Attributes:
        whole: False if a later step was issued, which may have changed parameters.
    """

    steps: int
    whole: bool


def same_progress(progress: Collection[Progress | None]) -> int | None:
    """Return the number of steps that all processes have finished; None if processes differ, are
    within a step, or are lost."""
    steps = {each.steps if each is not None and each.whole else None for each in progress}
    return steps.pop() if len(steps) == 1 else None
