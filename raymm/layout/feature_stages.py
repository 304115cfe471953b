"""Plans under which features of frozen encoders can be kept: their projectors have stages of their
own, which run alone where features are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from raymm.model.multimodal import MultimodalModule
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.rank_quotas import SLOTS
from raymm.scheduler.plan.stage_edges import SAMPLES


def featured_modules(
    model: MultimodalModule, plan: Plan, modalities: Collection[str]
) -> tuple[list[str], list[str]]:
    """Modules whose features can be kept, and why others' cannot.

    Args:
        model: the description.
        plan: of the run.
        modalities: that the data have.
    """
    kept, reasons = [], []
    for name, encoder in model.encoders.items():
        node, stages = plan.graph.node(name), plan.module_stages(name)
        if name not in modalities:
            reason = "the data do not have it"
        elif not node.projector:
            reason = "it has no projector"
        elif not node.gives_features:
            reason = "it is trained"
        elif encoder.postprocess_projector_callback is not None:
            reason = "what comes after its projector reads its inputs"
        elif any(0 < stage.layers[0] < node.num_blocks for stage in stages):
            reason = "its blocks are on several stages"
        elif plan.schedule == SLOTS or stages[0].split == SAMPLES:
            reason = "its plan deals out samples"
        elif max(stages[0].fsdp, stages[0].cp) > 1:
            reason = "its items are shared out among processes"
        else:
            kept.append(name)
            continue
        reasons.append(f"features of {name} are not kept: {reason}")
    return kept, reasons


def with_feature_stages(plan: Plan, modules: Collection[str]) -> Plan:
    """A plan in which the projectors of some modules have stages of their own, where they were.

    Args:
        plan: the plan.
        modules: with projectors.
    """
    stages: list[Stage] = []
    for stage in plan.stages:
        blocks = plan.graph.node(stage.module).num_blocks
        if stage.module in modules:
            stages += _split(stage, blocks)
        else:
            stages.append(stage)
    if len(stages) == len(plan.stages):
        return plan
    # How many microbatches stages hold was decided for other stages.
    policy = None if plan.policy is None else replace(plan.policy, ahead=())
    return replace(plan, stages=tuple(stages), policy=policy, shared_ranks=None)


def _split(stage: Stage, blocks: int) -> Iterator[Stage]:
    lo, hi = stage.layers
    if lo >= blocks or hi <= blocks:
        yield stage
        return
    yield replace(stage, layers=(lo, blocks))
    yield replace(stage, index=stage.index + 1, layers=(blocks, hi), layer_options=())
