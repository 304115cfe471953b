"""From a model description and a plan to what each rank builds and owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from raymm.actors.optimizer import SharedParameter
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage, encoder_stage_parameters
from raymm.actors.stages.language import (
    LanguageSpec,
    LanguageStage,
    language_stage_parameters,
)
from raymm.actors.stages.probe import probe_encoder, probe_language_model
from raymm.actors.stages.probe_attention import probe_shared_tokens
from raymm.actors.stages.source import LiveSource
from raymm.model import LANGUAGE_MODEL, MultimodalModule
from raymm.scheduler.plan import Plan
from raymm.scheduler.shards import Processes, shard_name


def reloadable_modules(model: MultimodalModule) -> frozenset[str]:
    """Modules whose frozen weights can be had again from where they came from, so that no
    checkpoint need hold them."""
    sources = {name: encoder.source() for name, encoder in model.encoders.items()}
    sources[LANGUAGE_MODEL] = model.language_model.source(language_model=True)
    return frozenset(n for n, source in sources.items() if not isinstance(source, LiveSource))


def stage_builders(
    model: MultimodalModule, plan: Plan
) -> tuple[dict[str, Callable[[], nn.Module]], dict[str, list[str]]]:
    """Per stage, a picklable builder and the names of the parameters it owns.

    Raises:
        ProbeError: if a module cannot be cut, or its tokens shared out, as planned.
    """
    builders: dict[str, Callable[[], nn.Module]] = {}
    owned: dict[str, list[str]] = {}
    for node in plan.graph.nodes:
        is_cut = plan.replicas(node.name)[0][0].layers[1] < node.num_blocks
        if node.name == LANGUAGE_MODEL:
            spec: Any = model.language_spec()
            if is_cut:
                spec = replace(spec, cut=probe_language_model(spec.source))
            if plan.module_stages(node.name)[0].cp > 1:
                probe_shared_tokens(spec.source, spec.mask is not None)
            names, build = language_stage_parameters, _build_language
        else:
            spec = model.encoder_spec(node.name)
            if is_cut:
                example = model.encoders[node.name].example_inputs
                spec = replace(spec, cut=probe_encoder(spec.source, example))
            names, build = encoder_stage_parameters, _build_encoder
        parts: dict[tuple[int, int], tuple[list[str], Callable[[], nn.Module]]] = {}
        for stage in plan.module_stages(node.name):
            lo, hi = stage.layers
            if stage.layers not in parts:  # copies of the module have it in common
                own = names(spec, lo, hi)
                parts[lo, hi] = own, partial(build, _slim(spec, own, lo, hi), lo, hi)
            owned[stage.name], builders[stage.name] = parts[lo, hi]
    return builders, owned


def _slim(
    spec: EncoderSpec | LanguageSpec, own: list[str], lo: int, hi: int
) -> EncoderSpec | LanguageSpec:
    """The spec with only the live tensors that a stage owns."""
    def names(prefix: str) -> list[str]:
        return [n.removeprefix(prefix) for n in own if n.startswith(prefix)]

    slim = replace(spec, source=spec.source.for_names(names("module.")))
    if isinstance(slim, EncoderSpec) and slim.projector is not None:
        slim = replace(slim, projector=slim.projector.for_names(names("projector.")))
    return slim


def _build_encoder(spec: EncoderSpec, lo: int, hi: int) -> nn.Module:
    return EncoderStage.build(spec, lo, hi)


def _build_language(spec: LanguageSpec, lo: int, hi: int) -> nn.Module:
    return LanguageStage.build(spec, lo, hi)


def shared_parameters(
    processes: Processes, owned: Mapping[str, Sequence[str]]
) -> tuple[SharedParameter, ...]:
    """Parameters that stages of several processes own: tied embeddings, and all of a module
    that has several copies or is context parallel.

    Args:
        processes: the plan's.
        owned: names of the parameters that each stage of the plan owns.
    """
    holders: dict[str, list[tuple[str, str]]] = {}
    homes = processes.stage_processes
    for stage in processes.plan.topological_stages:
        for name in owned[stage.name]:
            holders.setdefault(f"{stage.module}/{name}", []).extend(
                (shard_name(stage.name, shard), name) for shard in range(stage.cp)
            )
    return tuple(
        SharedParameter(tuple(places), tuple(sorted({homes[stage] for stage, _ in places})))
        for places in holders.values()
        if len(places) > 1
    )

