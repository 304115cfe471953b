"""The configuration of what updates the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raymm.actors.optimizer.optimizer_config import EmaConfig, OptimizerConfig
from raymm.files.section import Count, NonNegative, Section, Text, Tuple


class UpdateSection(Section):
    """Fields in which a module's updates differ from those of the whole model.

    Attributes:
        warmup_steps: first steps, over which the learning rate rises linearly from 0, as in
            ``transformers.get_scheduler``: step ``n``, from 0, has ``n / warmup_steps`` of ``lr``.
        total_steps: where the schedule ends; by default ``run.steps``.
        min_lr_ratio: of ``lr``, where the schedule ends.
    """

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    parameters: Literal["fp32", "bf16_master", "bf16_stochastic"] = "fp32"
    lr: float = 1e-3
    betas: Tuple[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: Tuple[Text] | None = None
    momentum: float = 0.95
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    total_steps: Count | None = None
    min_lr_ratio: float = 0.0


class EmaSection(Section):
    """An exponential moving average of what trains, kept like an optimizer's state; ``raymm export
    --ema`` writes it.

    Attributes:
        decay: what stays of the average at an update of it; the rest is of the weights.
        every: steps from one update to the next.
        evaluate: held-out losses and texts in the loop are the average's.
    """

    decay: float = 0.999
    every: Count = 1
    evaluate: bool = False


class OptimizerSection(UpdateSection):
    """What updates the model: see
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
        # A run that ends within its warm-up is a short try of a longer one.
        values["total_steps"] = self.total_steps or max(steps, self.warmup_steps)
        values["modules"] = {
            name: section.model_dump(exclude_unset=True) for name, section in self.modules.items()
        }
        for own in values["modules"].values() if self.total_steps is None else ():
            if own.get("warmup_steps", 0) > values["total_steps"]:
                own.setdefault("total_steps", own["warmup_steps"])
        if self.ema is not None:
            try:
                values["ema"] = EmaConfig(**self.ema.model_dump())
            except ValueError as error:
                raise ValueError(f"ema.{error}") from None
        return OptimizerConfig(**values)
