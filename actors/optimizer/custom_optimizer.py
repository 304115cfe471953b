"""Optimizers of users: a factory that takes parameter groups, tried on small tensors before a
run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.optimizer.averages import AVERAGE_NAME
from raymm.actors.optimizer.optimizer_config import ACCEPTED_NAMES, Named, UpdateRule
from raymm.errors import USER_CODE_RAISES, ConfigError
from raymm.kernels.collectives.waiting import waits_for_others
from raymm.packages import user_function

# Names in the state of a parameter that belong to raymm.
MASTER_NAME = "master"
RESERVED = (MASTER_NAME, AVERAGE_NAME)
Groups = list[dict[str, Any]]
# Steps of a trial; the last is repeated by an optimizer that resumes from the state before it.
_STEPS = 3
_SHAPES = ((32, 16), (64,))


class OptimizerTraits(NamedTuple):
    """Behaviour of an optimizer, found by a trial.

    Attributes:
        elementwise: True if an update of a part of a parameter equals the part of its update.
        tensors: tensors of a matrix's state, without scalars, as multiples of the matrix.
        scalars: number of scalars in the state of a parameter.
    """

    elementwise: bool
    tensors: float
    scalars: int


class CustomOptimizer:
    """Optimizer of a user, whose step is skipped where ``refused`` is 1. The host waits for the
    device to know it, because the code of the step may do anything.

    Args:
        groups: each with ``params``, ``lr`` and ``weight_decay``.
    """

    def __init__(self, name: Named, groups: Groups) -> None:
        self._name, self._groups = name, [dict(group) for group in groups]
        self.forget()

    def forget(self) -> None:
        """Return to the state before the first step."""
        factory = user_function("optimizer.name", self._name, ACCEPTED_NAMES)
        self._optimizer = factory([dict(group) for group in self._groups])

    @property
    def param_groups(self) -> Groups:
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    def step(self, refused: torch.Tensor) -> None:
        """Update the parameters of the groups that have gradients."""
        if not _is_set(refused):
            self._optimizer.step()


@waits_for_others
def _is_set(flag: torch.Tensor) -> bool:
    return bool(flag)


def optimizer_traits(field: str, rule: UpdateRule) -> OptimizerTraits:
    """Try the custom optimizer of a rule on the CPU. Each step must follow from the gradients, the
    rates and the state of each parameter alone, so that stages, replicas and resumed runs give the
    same bits.

    Args:
        field: name of the field in errors.

    Raises:
        ConfigError: the function fails, or training with it would not be exact; names the field,
            the value and what is accepted.
    """
    user_function(field, rule.name, ACCEPTED_NAMES)
    try:
        return _traits(rule.name)
    except ConfigError as error:
        raise ConfigError(f"{field} is {rule.name!r}: {error}; accepted: {ACCEPTED_NAMES}") from (
            error.__cause__
        )


@functools.cache
def _traits(name: Named) -> OptimizerTraits:
    factory = user_function("optimizer.name", name, ACCEPTED_NAMES)
    try:
        with torch.random.fork_rng(devices=[]):
            return _tried(factory)
    except ConfigError:
        raise
    except USER_CODE_RAISES as error:
        raise ConfigError(f"it raised {type(error).__name__}: {error}") from error


def _tried(factory: Callable[[Groups], Any]) -> OptimizerTraits:
    together = _Trial(factory, _values(0))
    for step in range(_STEPS - 1):
        together.step(step)
    states = together.states()
    resumed = _Trial(factory, [p.detach().clone() for p in together.parameters])
    resumed.load(states)
    torch.manual_seed(1)
    together.step(_STEPS - 1)
    torch.manual_seed(2)
    resumed.step(_STEPS - 1)
    if not together.equals(resumed):
        raise ConfigError(
            "a resumed run would differ, because a step reads more than the gradient, the lr and "
            "Optimizer.state of a parameter (random numbers, or values of a group or of the "
            "optimizer)"
        )
    separate = _Trial(factory, _values(0))
    for step in range(_STEPS):
        for position in range(len(_SHAPES)):
            separate.step(step, [position])
    if not together.equals(separate):
        raise ConfigError(
            "the update of a parameter depends on other parameters, which other ranks may hold"
        )
    split = [half.clone() for value in _values(0) for half in value.chunk(2)]
    parts = _Trial(factory, split)
    for step in range(_STEPS):
        parts.step(step)
    joined = [torch.cat(pair) for pair in list(pairwise(parts.parameters))[::2]]
    matrix, state = together.parameters[0], together.states()[0]
    full = [v for v in state.values() if v.dim()]
    elementwise = all(
        torch.allclose(whole, parts, 1e-6, 1e-9)
        for whole, parts in zip(together.parameters, joined, strict=True)
    ) and all(value.shape == matrix.shape for value in full)
    elements = sum(value.nbytes for value in full) / matrix.nbytes
    return OptimizerTraits(elementwise, elements, len(state) - len(full))


def _values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in _SHAPES]


class _Trial:
    """Optimizer with small parameters, in two groups if there are at least two."""

    def __init__(self, factory: Callable[[Groups], Any], values: Sequence[torch.Tensor]) -> None:
        self.parameters = [nn.Parameter(value) for value in values]
        middle = len(values) // 2
        members = [self.parameters[:middle], self.parameters[middle:]]
        self._optimizer = factory([
            {"params": list(group), "lr": 1e-2, "weight_decay": decay, "rule": None}
            for group, decay in zip(members, (0.1, 0.0), strict=True)
        ])
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ConfigError(f"it returned {type(self._optimizer).__name__}")
        groups = self._optimizer.param_groups
        if [[*map(id, group["params"])] for group in groups] != [
            [*map(id, group)] for group in members
        ] or any("rule" not in group for group in groups):
            raise ConfigError("it does not pass the groups that it receives to its optimizer")
        self._members = members

    def step(self, number: int, positions: Sequence[int] | None = None) -> None:
        """Take a step, of all parameters or of those at some positions."""
        chosen = range(len(self.parameters)) if positions is None else positions
        ids = {id(self.parameters[position]) for position in chosen}
        gradients = [half for value in _values(number + 1) for half in value.chunk(
            len(self.parameters) // len(_SHAPES)
        )]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        groups = self._optimizer.param_groups
        for group, members in zip(groups, self._members, strict=True):
            group["lr"] = 1e-2 / (number + 1)
            group["params"] = [p for p in members if id(p) in ids]
        self._optimizer.step()
        for group, members in zip(groups, self._members, strict=True):
            group["params"] = members

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of the parameters' states."""
        return [dict(_copied(self._optimizer.state[p])) for p in self.parameters]

    def load(self, states: Sequence[dict[str, torch.Tensor]]) -> None:
        for parameter, state in zip(self.parameters, states, strict=True):
            if state:
                self._optimizer.state[parameter] = dict(state)

    def equals(self, other: _Trial) -> bool:
        """Return True if parameters and states have the same bits."""
        return all(map(torch.equal, self.parameters, other.parameters)) and all(
            mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)
            for mine, theirs in zip(self.states(), other.states(), strict=True)
        )


def _copied(state: Mapping[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if not isinstance(key, str) or not key.isidentifier() or key in RESERVED:
            raise ConfigError(
                f"its state has {key!r}; names must be identifiers, and none of {RESERVED}"
            )
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{key!r} of its state is a {type(value).__name__}, not a tensor")
        yield key, value.detach().clone()
