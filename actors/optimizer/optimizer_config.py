"""Configuration of the optimizer: update rules and learning rates, for the whole model and per
module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from raymm.errors import USER_CODE_RAISES, ConfigError
from raymm.packages import is_import_path, user_function

# Larger hyperparameters would overflow within the first step.
_MOST = 1e30
_RANGES = (
    ("lr", f"a number from 0 to {_MOST:g}", lambda x: x >= 0),
    ("eps", f"a number above 0, at most {_MOST:g}", lambda x: x > 0),
    ("weight_decay", f"a number from 0 to {_MOST:g}", lambda x: x >= 0),
    ("momentum", "a number from 0 to below 1", lambda x: 0 <= x < 1),
    ("min_lr_ratio", "a number from 0 to 1", lambda x: 0 <= x <= 1),
)
ADAMW, ADAMW_8BIT, MUON = "adamw", "adamw_8bit", "muon"
ALGORITHMS = (ADAMW, ADAMW_8BIT, MUON)
# Import path of a user's function, or the function.
Named = str | Callable[..., Any]
ACCEPTED_NAMES = (
    f"{', '.join(ALGORITHMS)}, or module:function, which returns a torch.optim.Optimizer for the "
    "parameter groups that it receives"
)
SCHEDULES = ("constant", "linear", "cosine")
ACCEPTED_SCHEDULES = (
    f"{', '.join(SCHEDULES)}, or module:function, which returns the fraction of lr for a step "
    "(from 0), a number that is not negative"
)
FP32, MASTER, STOCHASTIC = "fp32", "bf16_master", "bf16_stochastic"
PARAMETERS = (FP32, MASTER, STOCHASTIC)
PROJECTOR = "_projector"
# Lower-case parameter names that ``transformers.Trainer.get_decay_parameter_names`` exempts.
_TRAINER_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True)
class UpdateRule:
    """Rule for updating parameters, and the schedule of their learning rate.

    Attributes:
        name: ``"adamw"``; ``"adamw_8bit"`` for 8-bit moments; ``"muon"``, which updates weight
            matrices except embedding and head by ``torch.optim.Muon`` with AdamW's learning rates
            (``match_rms_adamw``), and all other parameters by AdamW; or a function, or its import
            path ``"module:function"``, that returns a ``torch.optim.Optimizer`` for a list of
            parameter groups with ``params``, ``lr`` and ``weight_decay``. It sets all other
            hyperparameters.
        parameters: storage of trained weights of matrix products. ``"fp32"`` keeps fp32 weights,
            and a copy in the compute dtype during a step. With bf16 compute, ``"bf16_master"``
            keeps weights and gradients in bf16 and updates an fp32 master, which with ZeRO-1 only
            the parameter's owner holds. ``"bf16_stochastic"`` does without a master and rounds
            updates at random.
        lr: peak learning rate.
        betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        no_decay: parameters without weight decay. None for the parameters that
            ``transformers.Trainer`` exempts: biases, parameters of ``torch.nn.LayerNorm`` and
            parameters with a norm in their names. Otherwise patterns for names within the module,
            such as ``"*.bias"`` or ``"*norm*"``; an empty list decays everything.
        momentum: momentum of Muon.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` decay to ``min_lr_ratio * lr`` at
            ``total_steps``, after ``warmup_steps`` of linear warm-up from 0. The rates equal those
            of ``transformers.get_scheduler`` at every step. Steps after ``total_steps`` have the
            last rate. Or a function, or its import path, that returns the fraction of ``lr`` for a
            step, from 0; it includes any warm-up.

    Raises:
        ValueError: an invalid field; names the field, its value and what is accepted.
    """

    name: Named = ADAMW
    parameters: Literal["fp32", "bf16_master", "bf16_stochastic"] = FP32
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] | None = None
    momentum: float = 0.95
    schedule: Named = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_optimizer_name(self.name)
        if self.parameters not in PARAMETERS:
            raise ValueError(
                f"parameters is {self.parameters!r}; accepted: {', '.join(PARAMETERS)}"
            )
        check_schedule_name(self.schedule)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas!r}; accepted: two numbers, from 0 to below 1")
        for beta in self.betas:
            check_number("betas", beta, "two numbers, from 0 to below 1", lambda x: 0 <= x < 1)
        if self.no_decay is not None and (
            not isinstance(self.no_decay, tuple | list)
            or not all(isinstance(p, str) for p in self.no_decay)
        ):
            raise ValueError(
                f"no_decay is {self.no_decay!r}; accepted: a list of patterns, or none for "
                "biases and norms"
            )
        for name, accepted, fits in _RANGES:
            check_number(name, getattr(self, name), accepted, fits)
        defaults = UpdateRule.__dataclass_fields__
        for name in ("betas", "eps", "momentum") if self.is_custom else ():
            if getattr(self, name) != (default := defaults[name].default):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, and name {self.name!r}, whose function "
                    f"sets it; accepted: {default!r}"
                )
        self._check_steps()

    @property
    def is_custom(self) -> bool:
        """True if a user's function creates the optimizer."""
        return self.name not in ALGORITHMS

    def _check_steps(self) -> None:
        for name, least in (("warmup_steps", 0), ("total_steps", 1)):
            value = getattr(self, name)
            if name == "total_steps" and value is None:
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; accepted: a whole number from {least}")
        if self.schedule not in SCHEDULES:
            for name in ("warmup_steps", "min_lr_ratio"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name} is {value!r}, and schedule {self.schedule!r}, whose function "
                        "returns the rate of every step; accepted: 0"
                    )
            return
        if self.schedule == "constant":
            return
        if self.total_steps is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_steps")
        if self.total_steps < self.warmup_steps:
            raise ValueError(
                f"total_steps is {self.total_steps} and warmup_steps {self.warmup_steps}; "
                "warmup_steps must not be larger"
            )

    def factor(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a fraction of ``lr``. Equal to
        ``transformers.get_scheduler`` for steps below ``total_steps``. The cosine of
        ``transformers`` rises again after ``total_steps``; this one stays at its final value."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.schedule not in SCHEDULES:
            return self._custom_factor(step, "optimizer.schedule")
        if self.schedule == "constant":
            return 1.0
        assert self.total_steps is not None  # decay schedules have it
        span = max(self.total_steps - self.warmup_steps, 1)
        if self.schedule == "linear":
            decay = max(self.total_steps - step, 0) / span
        else:
            decay = 0.5 * (1 + math.cos(math.pi * min((step - self.warmup_steps) / span, 1.0)))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * decay

    def check_schedule(self, field: str, steps: int) -> None:
        """Raise a ConfigError, which names the field, if a custom schedule has a step without a
        valid rate, or no step with a rate above 0."""
        if self.schedule in SCHEDULES:
            return
        if not any([self._custom_factor(step, field) for step in range(steps)]):
            raise ConfigError(
                f"{field} is {self.schedule!r}: it is 0 for all {steps} steps; accepted: "
                f"{ACCEPTED_SCHEDULES}"
            )

    def _custom_factor(self, step: int, field: str) -> float:
        function = user_function(field, self.schedule, ACCEPTED_SCHEDULES)
        try:
            value = function(step)
        except USER_CODE_RAISES as error:
            raise ConfigError(
                f"{field} is {self.schedule!r}: for step {step} it raised "
                f"{type(error).__name__}: {error}; accepted: {ACCEPTED_SCHEDULES}"
            ) from error
        what = f"{field} is {self.schedule!r}: for step {step} its value"
        try:
            check_number(what, value, ACCEPTED_SCHEDULES, lambda x: x >= 0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return float(value)

    def rate(self, step: int) -> float:
        return self.lr * self.factor(step)

    def decay(self, parameter: str, in_layer_norm: bool) -> float:
        """Return the weight decay of a parameter.

        Args:
            parameter: its name within the module.
            in_layer_norm: True if a ``torch.nn.LayerNorm`` holds it.
        """
        if self.no_decay is None:
            exempt = in_layer_norm or _TRAINER_NO_DECAY.search(parameter.lower()) is not None
        else:
            exempt = any(fnmatchcase(parameter, pattern) for pattern in self.no_decay)
        return 0.0 if exempt else self.weight_decay


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of trained weights.

    Attributes:
        decay: share of the old average in an update; the rest is the share of the weights.
        every: number of steps between two updates of the average.
        evaluate: True to evaluate the average during training.

    Raises:
        ValueError: an invalid field; names the field, its value and what is accepted.
    """

    decay: float = 0.999
    every: int = 1
    evaluate: bool = False

    def __post_init__(self) -> None:
        check_number("decay", self.decay, "a number from 0 to below 1", lambda x: 0 <= x < 1)
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every is {self.every!r}; accepted: a whole number from 1")


@dataclass(frozen=True)
class OptimizerConfig(UpdateRule):
    """Update rule of a model, with different values for some modules.

    Attributes:
        max_grad_norm: limit of the gradient norm over all ranks; None for no clipping.
        modules: fields that differ from this rule, by module name as in plans (``llm``, an
            encoder's name, or the encoder's name with ``_projector`` for its projector).
        ema: moving average of trained weights; None for no average.

    Raises:
        ValueError: an invalid field; names the field, its value and what is accepted.
    """

    max_grad_norm: float | None = 1.0
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ema: EmaConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm is not None:
            check_number(
                "max_grad_norm", self.max_grad_norm,
                f"none, or a number above 0, at most {_MOST:g}", lambda x: x > 0,
            )
        accepted = [f.name for f in fields(UpdateRule)]
        for module, values in self.modules.items():
            for name in values:
                if name not in accepted:
                    raise ValueError(
                        f"modules.{module}.{name} is not a field; accepted: {', '.join(accepted)}"
                    )
            try:
                self.rule(module)
            except ValueError as error:
                raise ValueError(f"modules.{module}.{error}") from None

    def rule(self, name: str) -> UpdateRule:
        values = {f.name: getattr(self, f.name) for f in fields(UpdateRule)}
        values |= self.modules.get(name, {})
        for several in ("betas", "no_decay"):
            if isinstance(values[several], list):
                values[several] = tuple(values[several])
        return UpdateRule(**values)

    def notes(self, steps: int, modules: Iterable[str]) -> Iterator[str]:
        """Yield a line for modules whose learning rate is 0 in all steps of a run."""
        idle = {
            name: rule.warmup_steps for name in modules
            if (rule := self.rule(name)).lr and rule.warmup_steps
            and not any(map(rule.factor, range(steps)))
        }
        for warmup in sorted(set(idle.values())):
            names = ", ".join(name for name, its in idle.items() if its == warmup)
            yield (
                f"note: run.steps is {steps} and optimizer.warmup_steps is {warmup}: a warm-up "
                f"begins with a learning rate of 0, so this run does not train {names}. Set "
                "optimizer.warmup_steps to 0 for such a short run"
            )

    def rule_of(self, module: str, parameter: str) -> UpdateRule:
        """Return the rule of a parameter, whose name begins with ``module.`` or ``projector.``."""
        projector = parameter.startswith("projector.")
        return self.rule(module + PROJECTOR if projector else module)


def check_optimizer_name(name: Named) -> Named:
    """Return a name. Raise a ``ValueError`` if it is not an algorithm, a function or a path."""
    if name not in ALGORITHMS and not callable(name) and not is_import_path(name):
        raise ValueError(f"name is {name!r}; accepted: {ACCEPTED_NAMES}")
    return name


def check_schedule_name(name: Named) -> Named:
    """Return a name. Raise a ``ValueError`` if it is not a schedule, a function or a path."""
    if name not in SCHEDULES and not callable(name) and not is_import_path(name):
        raise ValueError(f"schedule is {name!r}; accepted: {ACCEPTED_SCHEDULES}")
    return name


def check_number(name: str, value: object, accepted: str, fits: Callable[[float], bool]) -> None:
    """Check that a hyperparameter is a finite number in its range. Raise a ``ValueError`` if
    ``fits`` is False for the value; the error says what is ``accepted``."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not -_MOST <= number <= _MOST or not fits(number):  # NaN fails, too
        raise ValueError(f"{name} is {value!r}; accepted: {accepted}")
