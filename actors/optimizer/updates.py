"""Torch optimizers of one process, and their steps.

A step may have to be skipped because of non-finite values, and the host must not wait to find out.
A scalar on the device decides if parameters and state change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.optimizer.adamw_8bit import AdamW8bit
from raymm.actors.optimizer.bf16_parameters import Bf16Parameter
from raymm.actors.optimizer.custom_optimizer import MASTER_NAME, CustomOptimizer
from raymm.actors.optimizer.optimizer_config import (
    ADAMW,
    ADAMW_8BIT,
    ALGORITHMS,
    MUON,
    Named,
    OptimizerConfig,
    UpdateRule,
)
from raymm.actors.sharding.parameter_shards import ParameterPart
from raymm.scheduler.plan.stage import StageId

Key = tuple[StageId, str]
Agree = Callable[[Key, torch.Tensor], None]


class GuardedMuon(torch.optim.Muon):
    """Muon whose step changes nothing where ``refused`` is 1, like fused AdamW's."""

    @torch.no_grad()
    def step(self, refused: torch.Tensor) -> None:
        """Update one parameter after another, so that only one of them has a backup copy at a
        time."""
        every = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = []
        try:
            for group, parameters in zip(self.param_groups, every, strict=True):
                for parameter in parameters:
                    group["params"] = [parameter]
                    self._guarded(parameter, refused.bool())
                group["params"] = []
        finally:
            for group, parameters in zip(self.param_groups, every, strict=True):
                group["params"] = parameters

    def _guarded(self, parameter: nn.Parameter, refused: torch.Tensor) -> None:
        saved = {name: value.clone() for name, value in self.state[parameter].items()}
        weights = parameter.clone()
        super().step()
        parameter.copy_(torch.where(refused, weights, parameter))
        for name, value in self.state[parameter].items():
            value.copy_(torch.where(refused, saved.get(name, torch.zeros_like(value)), value))


class ParameterUpdates:
    """Updates parameters according to their modules' rules.

    Args:
        matrices: ids of the parameters that Muon may update.
        in_bf16: parameters that are kept in bf16, by id.
        agree: all-reduces a tensor in place to its maximum over the processes that share a
            parameter.
    """

    def __init__(
        self, parameters: Mapping[Key, nn.Parameter], config: OptimizerConfig,
        matrices: Collection[int], layer_norms: Collection[int] = (),
        in_bf16: Mapping[int, Bf16Parameter] = MappingProxyType({}),
        parts: Mapping[Key, ParameterPart] = MappingProxyType({}),
        agree: Agree | None = None,
    ) -> None:
        self.parameters, self._in_bf16 = parameters, in_bf16
        self._grad_scale: torch.Tensor | None = None
        grouped: dict[tuple[Named, UpdateRule, float], list[nn.Parameter]] = {}
        self._optimizer_of: dict[int, Any] = {}
        for (stage, name), parameter in parameters.items():
            rule = config.rule_of(stage.module, name)
            falls_back = rule.name == MUON and id(parameter) not in matrices
            decay = rule.decay(name.partition(".")[2], id(parameter) in layer_norms)
            algorithm = ADAMW if falls_back else rule.name
            grouped.setdefault((algorithm, rule, decay), []).append(self._updated(parameter))
        key_of = {id(self._updated(parameters[key])): key for key in parts if key in parameters}
        make: dict[Any, Any] = _MAKE | {ADAMW_8BIT: partial(
            AdamW8bit, parts={parameter_id: parts[key] for parameter_id, key in key_of.items()},
            agree=None if agree is None else lambda p, bounds: agree(key_of[id(p)], bounds),
        )}
        self._optimizers: list[Any] = []
        for algorithm in dict.fromkeys([*ALGORITHMS, *(by for by, _, _ in grouped)]):
            groups: list[dict[str, Any]] = [
                {"params": members, "rule": rule, "weight_decay": decay, "lr": rule.lr}
                | _hyperparameters(algorithm, rule)
                for (by, rule, decay), members in grouped.items() if by == algorithm
            ]
            if groups:
                create = make.get(algorithm) or partial(CustomOptimizer, algorithm)
                self._optimizers.append(create(groups))
                for group in groups:
                    members = dict.fromkeys(map(id, group["params"]), self._optimizers[-1])
                    self._optimizer_of |= members
        # Optimizer, group and index in the group, by id of the parameter.
        self._positions = {
            id(parameter): (optimizer, number, index)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def scales(self, parameter: nn.Parameter) -> bool:
        """Return True if the update of a parameter multiplies its gradient by the factor of
        :meth:`scale_gradients`, so that the gradient is not read and written once more."""
        gradient, updated = parameter.grad, self._updated(parameter)
        return (
            gradient is not None
            and (updated is not parameter or gradient.dtype == torch.float32)
            and isinstance(self._optimizer_of[id(updated)], torch.optim.AdamW)
        )

    def scale_gradients(self, factor: torch.Tensor | None) -> None:
        """Set the factor of gradients in the next updates, a scalar on the device."""
        # Fused AdamW divides gradients by its scale, which is meant for scaled losses.
        self._grad_scale = None if factor is None else factor.reciprocal().float()

    def step(self, parameters: Iterable[nn.Parameter], refused: torch.Tensor, step: int) -> None:
        """Update parameters that have gradients; nothing changes if the scalar ``refused`` is 1."""
        wide = []
        for parameter in parameters:
            bf16_parameter = self._in_bf16.get(id(parameter))
            if bf16_parameter is None:
                wide.append(parameter)
                continue
            bf16_parameter.open()  # one after another, so that only one has fp32 values at a time
            self._step([bf16_parameter.wide], refused, step, self._grad_scale)
            bf16_parameter.close(step)
        self._step(wide, refused, step, self._grad_scale)

    def _updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that an optimizer updates in place of a parameter."""
        bf16_parameter = self._in_bf16.get(id(parameter))
        return parameter if bf16_parameter is None else bf16_parameter.wide

    def _step(
        self, chosen: Sequence[nn.Parameter], refused: torch.Tensor, step: int,
        grad_scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        by_group: dict[tuple[Any, int], dict[int, nn.Parameter]] = {}
        for parameter in chosen:
            optimizer, number, index = self._positions[id(parameter)]
            by_group.setdefault((optimizer, number), {})[index] = parameter
        for optimizer in self._optimizers:
            every = [group["params"] for group in optimizer.param_groups]
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = group["rule"].rate(step)
                members = by_group.get((optimizer, number), {})
                group["params"] = [members[index] for index in sorted(members)]
            try:
                if isinstance(optimizer, torch.optim.AdamW):
                    # Attributes through which torch.amp.GradScaler also talks to fused optimizers.
                    optimizer.found_inf, optimizer.grad_scale = refused, grad_scale  # type: ignore
                    optimizer.step()
                else:
                    optimizer.step(refused)
            finally:
                for group, parameters in zip(optimizer.param_groups, every, strict=True):
                    group["params"] = parameters

    @property
    def state_is_temporary(self) -> bool:
        """Return True if :meth:`states` creates tensors, from 8-bit moments."""
        return any(isinstance(optimizer, AdamW8bit) for optimizer in self._optimizers)

    def states(self, keys: Iterable[Key]) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the optimizer state of parameters. Before the first applied step it has masters
        only. The host waits for the device once."""
        states = {key: self._state(key) for key in keys}
        counts = {
            key: state["step"] for key, state in states.items()
            if "step" in state and not isinstance(self._optimizer(key), CustomOptimizer)
        }
        stacked = torch.stack([count.float() for count in counts.values()]) if counts else None
        applied = [] if stacked is None else stacked.tolist()
        for key, count in zip(counts, applied, strict=True):
            if not count:
                master = states[key].get(MASTER_NAME)
                states[key] = {} if master is None else {MASTER_NAME: master}
        return states

    def _state(self, key: Key) -> dict[str, torch.Tensor]:
        bf16_parameter = self._in_bf16.get(id(self.parameters[key]))
        parameter, optimizer = self._updated(self.parameters[key]), self._optimizer(key)
        if isinstance(optimizer, AdamW8bit):
            state = optimizer.plain_state(parameter)
        else:
            state = optimizer.state.get(parameter, {})
        master = (
            {MASTER_NAME: parameter.detach()}
            if bf16_parameter is not None and bf16_parameter.master else {}
        )
        return {**state, **master}

    def _optimizer(self, key: Key) -> Any:
        return self._optimizer_of[id(self._updated(self.parameters[key]))]

    def forget(self) -> None:
        for optimizer in self._optimizers:
            if isinstance(optimizer, CustomOptimizer):
                optimizer.forget()
            else:
                optimizer.state.clear()

    def load_state(self, key: Key, state: Mapping[str, torch.Tensor]) -> None:
        """Invert :meth:`states` for one parameter."""
        bf16_parameter = self._in_bf16.get(id(self.parameters[key]))
        parameter, optimizer = self._updated(self.parameters[key]), self._optimizer(key)
        local_state = {name: value.to(parameter.device) for name, value in state.items()}
        master = local_state.pop(MASTER_NAME, None)
        if bf16_parameter is not None:
            if bf16_parameter.master and master is not None:
                bf16_parameter.wide.data.copy_(master)
            bf16_parameter.follow()
        if not local_state:
            return
        if isinstance(optimizer, AdamW8bit):
            optimizer.load_plain_state(parameter, local_state)
        else:
            optimizer.state[parameter] = local_state


def _hyperparameters(algorithm: Named, rule: UpdateRule) -> dict[str, Any]:
    if algorithm == MUON:
        return {"momentum": rule.momentum}
    return {} if rule.is_custom else {"betas": tuple(rule.betas), "eps": rule.eps}


_MAKE: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    ADAMW: partial(torch.optim.AdamW, fused=True),
    MUON: partial(GuardedMuon, adjust_lr_fn="match_rms_adamw"),
}


def matrices_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return ids of the weight matrices of linear layers, except embeddings and heads."""
    linear: set[int] = set()
    ends: set[int] = set()
    for module in modules:
        for child in module.modules():
            ids = {id(p) for p in child._parameters.values() if p is not None and p.dim() == 2}
            if isinstance(child, nn.Linear | Conv1D):
                linear |= ids
            elif isinstance(child, nn.Embedding):
                ends |= ids
            get = getattr(child, "get_output_embeddings", None)
            head = get() if get else None
            if head is not None:
                ends |= {id(p) for p in head.parameters()}
    return linear - ends


def layer_norm_parameters(modules: Iterable[nn.Module]) -> set[int]:
    return {
        id(parameter) for module in modules for child in module.modules()
        if isinstance(child, nn.LayerNorm) for parameter in child.parameters()
    }
