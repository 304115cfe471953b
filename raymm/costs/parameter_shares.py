"""Number of processes that tensor parallelism can split each parameter over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from raymm.actors.sharding.tensor_plan import TensorPlan, plan_module
from raymm.costs.load import HEADS, config_number
from raymm.errors import PlanError

_SHARES: WeakKeyDictionary[nn.Module, Mapping[str, int]] = WeakKeyDictionary()


def parameter_shares(module: nn.Module) -> Mapping[str, int]:
    """Return the number of different shards of every split parameter, by name.

    The degree is the largest that the module's plan accepts. Keys and values with few heads have
    fewer shards than there are processes. Parameters that are absent are replicated.
    """
    if module not in _SHARES:
        plan = _largest_plan(module)
        shards = {} if plan is None else plan.shards
        _SHARES[module] = {name: len(set(dims)) for name, dims in shards.items()}
    return _SHARES[module]


def _largest_plan(module: nn.Module) -> TensorPlan | None:
    config: Any = getattr(module, "config", None)
    texts = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = config_number(HEADS, config, texts) or 2
    for tp in range(heads, 1, -1):
        if heads % tp == 0:
            try:
                return plan_module(module, tp, "module")
            except PlanError:
                continue
    return None
