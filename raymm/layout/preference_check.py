"""Whether a model can be trained on pairs of answers under a plan."""

from __future__ import annotations

from torch import nn

from raymm.actors.adapters.lora import is_adapter
from raymm.errors import PlanError
from raymm.model.multimodal import MultimodalModule
from raymm.scheduler.plan.plan import Plan


def check_preference(model: MultimodalModule, plan: Plan | None) -> None:
    """Look at a model with a :class:`raymm.kernels.preference.PreferenceLoss`, before anything
    starts; at others, nothing.

    Args:
        model: the description.
        plan: what runs where; None if that is not known yet.

    Raises:
        PlanError: without its adapters it would not be its reference, or a process would have one
            answer of a pair.
    """
    if model.preference is None:
        return
    if plan is not None and plan.splits_samples:
        raise PlanError(
            "of pairs of answers, a process of the language model must have both: accepted: pp, "
            "tp, cp, dp and sharding; not a mapping"
        )
    if model.preference.asked_once:
        return
    others = [
        f"{name}/{parameter}"
        for name in model.module_names
        for part in _skeletons(model, name)
        for parameter, value in part.named_parameters()
        if value.requires_grad and not is_adapter(parameter)
    ]
    if others:
        raise PlanError(
            f"{len(others)} parameters are trained that are no adapters ({others[0]}, ...), and "
            "answers are compared with what the model without its adapters says of them; accepted: "
            "adapters (train: {lora: {r: 16}}), all else frozen, projectors too; or reference: "
            "initial"
        )


def _skeletons(model: MultimodalModule, name: str) -> list[nn.Module]:
    spec = model.spec(name)
    projector = getattr(spec, "projector", None)
    return [spec.source.skeleton(), *([] if projector is None else [projector.skeleton()])]
