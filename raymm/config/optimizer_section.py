"""The ``optimizer:`` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from raymm.actors.optimizer.optimizer_config import (
    EmaConfig,
    OptimizerConfig,
    check_optimizer_name,
    check_schedule_name,
)
from raymm.files.section import Count, NonNegative, Section, Text, Tuple


class UpdateSection(Section):
    """Optimizer settings of a module that differ from those of the whole model.

    Attributes:
        name: ``adamw``, ``adamw_8bit``, ``muon``, or ``module:function`` of a custom optimizer.
        schedule: ``constant``, ``linear``, ``cosine``, or ``module:function`` of a custom schedule.
        warmup_steps: first steps, in which the learning rate rises linearly from 0, as in
            ``transformers.get_scheduler``: step ``n``, from 0, has ``n / warmup_steps`` of ``lr``.
        total_steps: end of the schedule; by default ``run.steps``.
        min_lr_ratio: fraction of ``lr`` at the end of the schedule.
    """

    name: Annotated[Text, AfterValidator(check_optimizer_name)] = "adamw"
    parameters: Literal["fp32", "bf16_master", "bf16_stochastic"] = "fp32"
    lr: float = 1e-3
    betas: Tuple[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: Tuple[Text] | None = None
    momentum: float = 0.95
    schedule: Annotated[Text, AfterValidator(check_schedule_name)] = "constant"
    warmup_steps: NonNegative = 0
    total_steps: Count | None = None
    min_lr_ratio: float = 0.0


class EmaSection(Section):
    """Exponential moving average of the trained weights, stored like optimizer state; ``raymm
    export --ema`` writes it.

    Attributes:
        decay: weight of the old average at an update.
        every: steps between updates.
        evaluate: compute held-out losses and texts with the average.
    """

    decay: float = 0.999
    every: Count = 1
    evaluate: bool = False


class OptimizerSection(UpdateSection):
    """Optimizer of the model: see
    :class:`raymm.actors.optimizer.optimizer_config.OptimizerConfig`."""

    max_grad_norm: float | None = 1.0
    modules: dict[Text, UpdateSection] = Field(default_factory=dict)
    ema: EmaSection | None = None

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> OptimizerSection:
        self.build(steps=1)
        return self

    def build(self, steps: int) -> OptimizerConfig:
        values = self.model_dump()
        # A run that ends within its warm-up is a short trial of a longer run.
        values["total_steps"] = self.total_steps or max(steps, self.warmup_steps)
        values["modules"] = {
            name: section.model_dump(exclude_unset=True) for name, section in self.modules.items()
        }
        for options in values["modules"].values() if self.total_steps is None else ():
            if options.get("warmup_steps", 0) > values["total_steps"]:
                options.setdefault("total_steps", options["warmup_steps"])
        if self.ema is not None:
            try:
                values["ema"] = EmaConfig(**self.ema.model_dump())
            except ValueError as error:
                raise ValueError(f"ema.{error}") from None
        return OptimizerConfig(**values)
