"""Parameter groups of the optimizer that ``transformers.Trainer`` makes, for oracles."""

from typing import Any

from torch import nn
from transformers import Trainer


def decayed_names(module: nn.Module) -> set[str]:
    """Return names of the parameters that a ``Trainer`` decays by default."""
    self: Any = None  # the method does not use self
    return set(Trainer.get_decay_parameter_names(self, module))


def trainer_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return all parameters of a module in two groups, with and without weight decay."""
    decayed = decayed_names(module)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    # Oracles may have other names for the parameters.
    for name, parameter in nn.Module.named_parameters(module):
        groups[name in decayed].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
