"""Selection of encoders whose frozen features can be cached, and plans that give the layers after
them separate stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from raymm.actors.features.kept_features import every_item
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.cut import prune
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.callbacks import Cuts, Inputs, chain_example, module_inputs, probe_chain
from raymm.actors.probe.draws import NotedDraws
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.quota.generators import generators_kept, host_states
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.stage_inputs import joined, kept_entries
from raymm.actors.weights.model_part import is_within
from raymm.actors.weights.source import on_meta, set_mode
from raymm.errors import USER_CODE_RAISES, ProbeError
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage_edges import SAMPLES


def featured_modules(
    model: MultimodalModule, plan: Plan, modalities: Collection[str]
) -> tuple[dict[str, int], list[str]]:
    """Return the number of leading blocks whose features can be cached, by module, and for each
    other module a line with the reason. Only frozen blocks on a module's first stage count."""
    cached_blocks: dict[str, int] = {}
    reasons = []
    for name, encoder in model.encoders.items():
        node, first = plan.graph.node(name), plan.module_stages(name)[0]
        blocks = min(node.frozen_blocks, first.layers[1])
        is_complete = blocks == node.num_blocks
        if name not in modalities:
            reason = "the data do not contain it"
        elif not blocks:
            reason = "its first layer is trained"
        elif name in model.changing:
            reason = "run.at changes what is frozen"
        elif is_complete and not node.projector:
            reason = "it has no projector"
        elif is_complete and encoder.postprocess_projector_callback is not None:
            reason = "postprocess_projector_callback reads its inputs"
        elif plan.uses_slots or first.split == SAMPLES:
            reason = "its plan splits microbatches by samples"
        elif max(first.fsdp, first.cp) > 1:
            reason = "its items are sharded over processes"
        else:
            cached_blocks[name] = blocks
            continue
        reasons.append(f"features of {name} are not kept: {reason}")
    return cached_blocks, reasons


@plain_torch()
def featured_towers(model: PretrainedVlm, plan: Plan) -> tuple[list[str], list[str]]:
    """Return the towers of a whole model whose features can be cached, and why others' cannot."""
    cached, reasons = [], []
    for name in model.tower_names:
        (first, *later_stages) = plan.replicas(name)[0]
        reason = None
        if any(is_within(p, (model.tower(name).root,)) for p in model.trained[name]):
            reason = "it is trained"
        elif name in model.changing:
            reason = "run.at changes what is frozen"
        elif later_stages:
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
            cached.append(name)
        else:
            reasons.append(f"features of {name} are not kept: {reason}")
    return cached, reasons


def with_feature_stages(plan: Plan, modules: Mapping[str, int]) -> Plan:
    """Return a plan in which the given numbers of leading blocks are separate stages on the same
    ranks."""
    stages: list[Stage] = []
    for stage in plan.stages:
        stages += _split(stage, modules.get(stage.module, 0))
    if len(stages) == len(plan.stages):
        return plan
    # Splitting a stage shifts the indices of the module's later stages.
    last_index: dict[tuple[str, int], int] = {}
    for number, stage in enumerate(stages):
        key = stage.module, stage.replica
        last_index[key] = last_index.get(key, -1) + 1
        if stage.module in modules:
            stages[number] = replace(stage, index=last_index[key])
    # The microbatches that each stage may hold were chosen for the stages before the split.
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


def what_changes(spec: EncoderSpec, blocks: int, example: Inputs | None = None) -> str | None:
    """Return why the features of an encoder's first ``blocks`` blocks cannot be cached; None if
    they can.

    A partly frozen encoder runs in training mode, so its frozen blocks may still draw random
    numbers. All of them run on the meta device, since in some models later blocks draw more.
    ``example`` holds inputs of the encoder in a batch; they are guessed if None.
    """
    try:
        spec = probe_chain(spec, Cuts(True, False), example)
        skeleton = set_mode(on_meta(spec.source.skeleton()).to("meta"))
        example = chain_example(spec, skeleton, example)
        inputs = module_inputs(spec, example)
    except ProbeError as error:
        return str(error)
    assert spec.cut is not None  # set by the probe
    module = prune(skeleton, spec.cut, 0, blocks)
    if any(isinstance(child, _BatchNorm) and child.training for child in module.modules()):
        return "they contain batch norms, whose running statistics change in training"
    stage = EncoderStage(replace(spec, preprocess=None), 0, blocks, module, None)
    drawn: list[tuple[int, ...]] = []
    context = MicrobatchContext(1)
    try:
        with generators_kept(), torch.no_grad(), NotedDraws(drawn):
            states_before = host_states()
            hidden = [stage.run(item, {}, context) for item in every_item(_two(inputs))]
            after = host_states()
    except USER_CODE_RAISES as error:  # not every forward runs without data
        return f"they do not run on the meta device{because(error)}"
    if drawn or after != states_before:
        return "they draw random numbers in training, as dropout does"
    entries = kept_entries(joined(hidden))
    if bad := [name for name, entry in entries.items() if len(entry) != 2]:
        return f"their output {bad[0]!r} does not have one row per item"
    return None


def _two(inputs: Inputs) -> dict[str, Any]:
    """Return inputs of two items on the meta device."""
    return {
        name: torch.cat([value[:1]] * 2).to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
