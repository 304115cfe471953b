"""Check that modules can run several microbatches in one forward."""

from __future__ import annotations

from collections.abc import Collection

from torch.nn.modules.dropout import _DropoutNd

from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.errors import PlanError
from raymm.layout.stage_builders import skeletons
from raymm.model.model import Model
from raymm.model.module import EncoderModule, TowerModule
from raymm.scheduler.plan.plan import Plan


@plain_torch()
def check_groups(model: Model, plan: Plan, cached: Collection[str] = ()) -> None:
    """Raise a PlanError, which names the module, for a ``microbatch_factor`` above 1 of a module
    whose results depend on how its items are divided over forwards. ``cached`` are encoders with
    cached features."""
    for name in (node.name for node in plan.graph.nodes):
        stage = plan.module_stages(name)[0]
        if stage.microbatch_factor == 1:
            continue
        module = model.module(name)
        spec = module.spec
        planned = f"microbatch_factor of {name!r} is {stage.microbatch_factor}; the module"
        if not isinstance(module, EncoderModule | TowerModule):
            raise PlanError(f"{planned} must be an encoder of a MultimodalModule or a VLM's tower")
        callbacks = spec.preprocess, spec.postprocess_module, spec.postprocess_projector
        for refused, reason in (
            (name in cached, "cached features"),
            (model.hooks_of(name) is not None, "stage hooks, which see one microbatch"),
            (any(callbacks), "callbacks, which see one microbatch"),
            (_has_dropout(spec) or module.draws(spec, stage, False).drawn,
             "random numbers (dropout), which depend on the microbatch"),
        ):
            if refused:
                raise PlanError(f"{planned} has {reason}; accepted: none, or microbatch_factor 1")


def _has_dropout(spec: EncoderSpec) -> bool:
    """Return True if the module, its projector or their adapters have dropout layers in training
    mode. Other random numbers are found by :meth:`raymm.model.module.Module.draws`."""
    return any(
        isinstance(child, _DropoutNd) and child.p > 0 and child.training
        for skeleton in skeletons(spec).values() for child in skeleton.modules()
    ) or any(
        isinstance(source, AdaptedSource) and source.lora.dropout
        for source in (spec.source, spec.projector)
    )
