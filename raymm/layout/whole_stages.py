"""From a whole model and a plan to what each rank builds and owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.whole.cut import cut_language_model, cut_tower
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.actors.stages.encoder import EncoderStage, encoder_stage_parameters
from raymm.actors.stages.language import LanguageStage
from raymm.actors.stages.language_parameters import language_stage_parameters
from raymm.actors.stages.tower import TowerSpec, TowerStage
from raymm.actors.stages.whole_language import WholeLanguageSpec, WholeLanguageStage
from raymm.layout.stage_builders import StageBuilders, recomputing
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import WholeModel
from raymm.scheduler.plan.plan import Plan, PlanError


@plain_torch()
def whole_stage_builders(model: WholeModel, plan: Plan) -> StageBuilders:
    """
    Raises:
        ProbeError: if a module cannot be cut as planned.
        PlanError: if processes are to share samples, tokens or parameters of a module.
    """
    builders = StageBuilders({}, {}, {})
    for node in plan.graph.nodes:
        first = plan.replicas(node.name)[0][0]
        for what, degree in first.degrees._asdict().items():
            if degree > 1:
                raise PlanError(
                    f"{what} of {node.name!r} is {degree}; accepted of a module of a whole model: 1"
                )
        is_cut = first.layers[1] < node.num_blocks
        builders.shard_specs[node.name] = ShardSpec()
        spec: Any = cut_module(model, node.name) if is_cut else model.spec(node.name)
        if node.name == LANGUAGE_MODEL:
            builders.add(plan, node.name, spec, language_stage_parameters, _build_language)
            continue
        builders.add(plan, node.name, spec, encoder_stage_parameters, _build_tower)
    return builders


@plain_torch()
def cut_module(model: WholeModel, name: str) -> TowerSpec | WholeLanguageSpec:
    """A module of several stages as data for the ranks.

    Raises:
        ProbeError: it cannot be cut.
    """
    if name == LANGUAGE_MODEL:
        return cut_language_model(model.language_spec(), model.towers, model.example)
    return cut_tower(model.tower_spec(name), model.tower(name).inputs(model.example) or {})


def _build_tower(
    spec: TowerSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> EncoderStage:
    return recomputing(TowerStage.build(spec, lo, hi), spec, lo, layer_options)


def _build_language(
    spec: WholeLanguageSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> LanguageStage:
    return recomputing(WholeLanguageStage.build(spec, lo, hi), spec, lo, layer_options)
