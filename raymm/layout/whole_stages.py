"""Builders of the stages of a whole model under a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.whole.cut import cut_tower
from raymm.actors.probe.whole.history import check_whole_history
from raymm.actors.probe.whole.shares import (
    draws_of_training_in,
    probe_item_tokens,
    probe_items,
    probe_packing,
    probe_rows,
    probe_tokens,
    probe_whole_tensor,
)
from raymm.actors.probe.whole.towers import Tower
from raymm.actors.probe.whole.zero_items import leaves_out_zeros
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.actors.sharding.tensor_plan import TensorPlan
from raymm.actors.stages.encoder import EncoderStage, encoder_stage_parameters
from raymm.actors.stages.language import LanguageStage
from raymm.actors.stages.language_parameters import language_stage_parameters
from raymm.actors.stages.tower import FeaturedTowerStage, TowerSpec, TowerStage
from raymm.actors.stages.whole_language import WholeLanguageSpec, WholeLanguageStage
from raymm.errors import ProbeError
from raymm.layout.stage_builders import (
    SHARDED_NORMS,
    StageBuilders,
    check_norms,
    check_training_draws,
    recomputing,
    shard_spec,
)
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import WholeModel
from raymm.scheduler.plan.plan import Plan

AnySpec = TowerSpec | WholeLanguageSpec


@plain_torch()
def whole_stage_builders(
    model: WholeModel, plan: Plan, kept: Collection[str] = ()
) -> StageBuilders:
    """Return the builders of a whole model; ``kept`` are towers whose features are cached.

    Raises:
        ProbeError: a module cannot be cut or sharded as planned.
        PlanError: the model's sizes do not fit the plan's degrees.
    """
    builders = StageBuilders({}, {}, {})
    for node in plan.graph.nodes:
        first = plan.replicas(node.name)[0][0]
        is_cut = first.layers[1] < node.num_blocks
        check_whole_history(model.spec(node.name), *_tried_with(model, node.name))
        spec: Any = cut_module(model, node.name) if is_cut else model.spec(node.name)
        spec, builders.shard_specs[node.name] = _shared(model, plan, spec)
        if node.name == LANGUAGE_MODEL:
            builders.add(plan, node.name, spec, language_stage_parameters, _build_language)
            continue
        if node.name in kept:
            spec = replace(spec, root=model.root_form(node.name))
        builders.add(plan, node.name, spec, encoder_stage_parameters, _build_tower)
    return builders


def _shared(model: WholeModel, plan: Plan, spec: AnySpec) -> tuple[AnySpec, ShardSpec]:
    """Return a module's spec for its sharding, and the shards of its parameters by process."""
    first, name = plan.replicas(spec.name)[0][0], spec.name
    towers, inputs = _tried_with(model, name)
    if isinstance(spec, WholeLanguageSpec) and spec.packing:
        with _refused("packing is true; accepted: false"):
            spec = replace(spec, mixers=probe_packing(spec, towers, inputs))
    if first.cp > 1:
        with _refused(f"cp of {name!r} is {first.cp}; accepted: 1"):
            mixers = probe_shared_tokens_of(model, spec)
        if isinstance(spec, WholeLanguageSpec):
            spec = replace(spec, mixers=mixers)
    if first.fsdp > 1:
        check_norms(spec, SHARDED_NORMS.format(name))
        with _refused(f"sharding of {name!r} is 'fsdp'; accepted: 'none', 'zero1'"):
            if isinstance(spec, WholeLanguageSpec):
                probe_rows(spec, towers, inputs)
            else:
                spec = replace(
                    spec, layers=probe_items(spec, inputs),
                    zeros_left_out=leaves_out_zeros(spec, inputs),
                )
    if max(first.cp, first.fsdp) > 1:
        check_training_draws(spec, first, draws_of_training_in(spec, towers, inputs))
    return spec, shard_spec(spec, first, partial(probe_tensor_of, model, spec, first.tp))


def _tried_with(model: WholeModel, name: str) -> tuple[tuple[Tower, ...], Mapping[str, Any]]:
    """Return the towers that a module reads, and the inputs to try it with."""
    if name == LANGUAGE_MODEL:
        return model.towers, model.example
    return (), model.tower(name).inputs(model.example) or {}


def probe_shared_tokens_of(model: WholeModel, spec: AnySpec) -> frozenset[str]:
    """Check that processes can split the tokens of a module, and return the classes of layers that
    must be called with all tokens. Raises ProbeError if the module's code does not allow it."""
    towers, inputs = _tried_with(model, spec.name)
    if isinstance(spec, WholeLanguageSpec):
        return probe_tokens(spec, towers, inputs)
    probe_item_tokens(spec, inputs)
    return frozenset()


def probe_tensor_of(model: WholeModel, spec: AnySpec, tp: int) -> TensorPlan:
    """Return the shards of a module's parameters under ``tp`` processes. Raises ProbeError if the
    module's code does not allow it, and PlanError if its sizes do not."""
    return probe_whole_tensor(spec, tp, *_tried_with(model, spec.name))


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except ProbeError as error:
        raise ProbeError(f"{what}. {error}") from error


@plain_torch()
def cut_module(model: WholeModel, name: str) -> TowerSpec | WholeLanguageSpec:
    """Return the spec of a module that is cut into several stages. Raises ProbeError if the module
    cannot be cut."""
    if name == LANGUAGE_MODEL:
        return model.cut_language_spec()
    return cut_tower(model.tower_spec(name), model.tower(name).inputs(model.example) or {})


def _build_tower(
    spec: TowerSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> EncoderStage:
    kind = TowerStage if spec.root is None else FeaturedTowerStage
    return recomputing(kind.build(spec, lo, hi), spec, lo, layer_options)


def _build_language(
    spec: WholeLanguageSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> LanguageStage:
    return recomputing(WholeLanguageStage.build(spec, lo, hi), spec, lo, layer_options)
