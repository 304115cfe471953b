"""Plans under which features of frozen encoders, or of their frozen first blocks, can be kept:
what comes after these has stages of its own, which run alone where features are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.weights.model_part import is_within
from raymm.errors import ProbeError
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.rank_quotas import SLOTS
from raymm.scheduler.plan.stage_edges import SAMPLES


def featured_modules(
    model: MultimodalModule, plan: Plan, modalities: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """Modules whose features can be kept, each with the number of its first blocks that make them;
    and why others' cannot.

    These are the frozen ones before anything that is trained, as far as the module's first stage
    has them.

    Args:
        model: the description.
        plan: of the run.
        modalities: that the data have.
    """
    kept: dict[str, int] = {}
    reasons = []
    for name, encoder in model.encoders.items():
        node, first = plan.graph.node(name), plan.module_stages(name)[0]
        blocks = min(node.frozen_blocks, first.layers[1])
        whole = blocks == node.num_blocks
        if name not in modalities:
            reason = "the data do not contain it"
        elif not blocks:
            reason = "its first layer is trained"
        elif name in model.changing:
            reason = "run.at changes what is frozen"
        elif whole and not node.projector:
            reason = "it has no projector"
        elif whole and encoder.postprocess_projector_callback is not None:
            reason = "postprocess_projector_callback reads its inputs"
        elif plan.schedule == SLOTS or first.split == SAMPLES:
            reason = "its plan splits microbatches by samples"
        elif max(first.fsdp, first.cp) > 1:
            reason = "its items are sharded over processes"
        else:
            kept[name] = blocks
            continue
        reasons.append(f"features of {name} are not kept: {reason}")
    return kept, reasons


@plain_torch()
def featured_towers(model: WholeModel, plan: Plan) -> tuple[list[str], list[str]]:
    """Towers of a whole model whose features can be kept, and why others' cannot.

    Args:
        model: the description.
        plan: of the run.
    """
    kept, reasons = [], []
    for name in model.tower_names:
        (first, *others) = plan.replicas(name)[0]
        reason = None
        if any(is_within(p, (model.tower(name).root,)) for p in model.trained[name]):
            reason = "it is trained"
        elif name in model.changing:
            reason = "run.at changes what is frozen"
        elif others:
            reason = "its blocks are on several stages"
        elif first.split == SAMPLES:
            reason = "its plan splits microbatches by samples"
        elif max(first.fsdp, first.cp, first.tp) > 1:
            reason = "it is sharded over processes"
        else:
            try:
                model.root_form(name)
            except ProbeError as error:
                reason = str(error)
        if reason is None:
            kept.append(name)
        else:
            reasons.append(f"features of {name} are not kept: {reason}")
    return kept, reasons


def with_feature_stages(plan: Plan, modules: Mapping[str, int]) -> Plan:
    """A plan in which the first blocks of some modules have stages of their own, where they were.

    Args:
        plan: the plan.
        modules: with the number of these blocks.
    """
    stages: list[Stage] = []
    for stage in plan.stages:
        stages += _split(stage, modules.get(stage.module, 0))
    if len(stages) == len(plan.stages):
        return plan
    # Of a module that was split, later stages have later places.
    places: dict[tuple[str, int], int] = {}
    for number, stage in enumerate(stages):
        key = stage.module, stage.replica
        places[key] = places.get(key, -1) + 1
        if stage.module in modules:
            stages[number] = replace(stage, index=places[key])
    # How many microbatches stages hold was decided for other stages.
    policy = None if plan.policy is None else replace(plan.policy, ahead=())
    return replace(plan, stages=tuple(stages), policy=policy, shared_ranks=None)


def _split(stage: Stage, blocks: int) -> Iterator[Stage]:
    lo, hi = stage.layers
    if not lo < blocks < hi:
        yield stage
        return
    options = stage.layer_options
    yield replace(stage, layers=(lo, blocks), layer_options=options[: blocks - lo])
    yield replace(stage, layers=(blocks, hi), layer_options=options[blocks - lo :])
