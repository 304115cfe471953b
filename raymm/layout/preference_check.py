"""Checks that a plan supports the loss of a model: pairs of answers, or a custom loss of tokens."""

from __future__ import annotations

from torch import nn

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.stages.token_loss import check_token_loss
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.scheduler.plan.plan import Plan


def check_loss(model: Model, plan: Plan | None) -> None:
    """Check the loss of a model before anything starts.

    Args:
        plan: None if it is not known yet.

    Raises:
        ConfigError: a custom loss of tokens cannot be used.
        PlanError: the plan does not support the loss.
    """
    check_preference(model, plan)
    if model.token_loss is None:
        return
    check_token_loss("model.loss", model.token_loss, model.vocabulary)
    if plan is not None and (tp := plan.module_stages(model.text_module)[0].tp) > 1:
        raise PlanError(
            f"tp of {model.text_module!r} is {tp}, under which no process has all logits of a "
            "token, and model.loss is a custom loss, which needs them; accepted: tp 1"
        )


def check_preference(model: Model, plan: Plan | None) -> None:
    """Check a model with a :class:`raymm.kernels.preference.PreferenceLoss` before anything starts.
    Raises PlanError if the model without its adapters is not the reference, or a process would have
    only one answer of a pair. ``plan`` is None if it is not known yet."""
    if model.preference is None:
        return
    if plan is not None and plan.splits_samples:
        raise PlanError(
            "the plan splits microbatches by samples, but a process of the language model needs "
            "both answers of a pair; accepted: pp, tp, cp, dp and sharding, not a mapping"
        )
    if model.preference.asked_once:
        return
    extra = [
        f"{name}/{parameter}"
        for name in model.module_names
        for skeleton in _skeletons(model, name)
        for parameter, value in skeleton.named_parameters()
        if value.requires_grad and not is_adapter(parameter)
    ]
    if extra:
        raise PlanError(
            f"{len(extra)} trained parameters are not adapters ({extra[0]}, ...), but the "
            "reference of the preference loss is the model without its adapters; accepted: "
            "adapters (train: {lora: {r: 16}}) with all else frozen, projectors too, or reference: "
            "initial"
        )


def _skeletons(model: Model, name: str) -> list[nn.Module]:
    spec = model.spec(name)
    projector = getattr(spec, "projector", None)
    return [spec.source.skeleton(), *([] if projector is None else [projector.skeleton()])]
