"""Builders of the stages of a model under a plan, and the parameters that each stage owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.cut import own_buffers
from raymm.actors.probe.attention import find_mixers, probe_shared_tokens
from raymm.actors.probe.callbacks import Cuts, check_chain, module_inputs, probe_chain
from raymm.actors.probe.cut import draws_of_training, probe_language_model
from raymm.actors.probe.experts.parallel import probe_experts
from raymm.actors.probe.items import probe_shared_items
from raymm.actors.probe.node import probe_node, read_of
from raymm.actors.probe.outputs import check_node_history
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.stage_comparison import TrainingDraws
from raymm.actors.probe.tensor import probe_tensor
from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.actors.sharding.fully_sharded import block_units, fully_sharded_plan, language_units
from raymm.actors.sharding.parameter_shards import ShardPlan, ShardSpec
from raymm.actors.sharding.sample_rows import count_items
from raymm.actors.sharding.tensor_plan import TensorPlan, tensor_plan
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage, encoder_stage_parameters
from raymm.actors.stages.feature_stage import FeatureStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.stages.language_parameters import language_stage_parameters
from raymm.actors.stages.node import NodeStage, NodeStageSpec
from raymm.actors.weights.source import LiveSource, set_mode
from raymm.errors import ModelError, PlanError, ProbeError
from raymm.model.module_dag import ModuleDag
from raymm.model.module_kind import LANGUAGE_MODEL, ModuleKind, module_kind
from raymm.model.multimodal import MultimodalModule
from raymm.model.ports import merged_arguments
from raymm.scheduler.graph.module_graph import ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.plan.stage_edges import SAMPLES

# Beginnings of messages about batch norms in modules whose samples are split.
_SPLIT_NORMS = "{!r} has replicas that split samples (use one replica, or freeze it), and it"
SHARDED_NORMS = (
    "sharding of {!r} is 'fsdp', accepted: 'none', 'zero1' (with dp); fsdp splits samples over "
    "processes, and it"
)
_LAYER_DROP = (
    "{!r} skips layers at random in training (layer drop), which is not supported with cp above 1 "
    "or sharding 'fsdp'; set the probability in its config to 0 (layerdrop)"
)
_HOST_DRAWS = (
    "{!r} draws random numbers with NumPy or Python in its training forward, and {}, because "
    "processes with part of the samples or tokens would draw other numbers than one process does. "
    "Set the probability in its config to 0 (mask_time_prob and mask_feature_prob of speech "
    "models), or freeze the module"
)

Retry = Callable[[Mapping[str, Any]], None]
AnySpec = EncoderSpec | LanguageSpec
AnyStage = TypeVar("AnyStage", bound=EncoderStage | LanguageStage)


def reloadable_modules(model: MultimodalModule) -> frozenset[str]:
    """Return the modules whose frozen weights can be loaded from their source instead of a
    checkpoint."""
    sources = {name: encoder.source() for name, encoder in model.encoders.items()}
    sources[LANGUAGE_MODEL] = model.language_model.source(ModuleKind.LANGUAGE_MODEL)
    return frozenset(
        name for name, source in sources.items() if not isinstance(source, LiveSource)
    ) - model.changing


@dataclass(frozen=True)
class StageBuilders:
    """Builders of the ranks of a plan.

    Attributes:
        build: picklable function by stage that builds its full, unsharded module.
        owned: elements of the parameters that a stage owns, by stage and name; 0 for frozen ones.
        shard_specs: by module, the shard of each parameter that a process holds.
        retries: by encoder that is cut or sharded, a function that tries other inputs and raises a
            ``ProbeError`` if the builders do not suit them.
    """

    build: dict[StageId, Callable[[], EncoderStage | LanguageStage]]
    owned: dict[StageId, dict[str, int]]
    shard_specs: dict[str, ShardSpec]
    retries: dict[str, Retry] = field(default_factory=dict)

    def add(
        self, plan: Plan, module: str, spec: AnySpec,
        names: Callable[[Any, int, int], list[str]], build: Callable[..., Any],
    ) -> None:  # fmt: skip
        """Add all stages of a module.

        Args:
            names: returns the names of the parameters that layers [lo, hi) of a spec own.
            build: builds the stage of these layers, with the activation option of each block.
        """
        sizes = parameter_sizes(spec)
        built: dict[tuple, tuple[dict[str, int], Callable[[], Any]]] = {}
        for stage in plan.module_stages(module):
            (lo, hi), options = key = stage.layers, stage.layer_options
            if key not in built:  # replicas of the module share the entry
                stage_sizes = {name: sizes[name] for name in names(spec, lo, hi)}
                built[key] = (
                    stage_sizes,
                    partial(build, _slim(spec, stage_sizes, lo, hi), lo, hi, options),
                )
            self.owned[stage.id], self.build[stage.id] = built[key]


@plain_torch()
def stage_builders(
    model: MultimodalModule, plan: Plan, kept: Collection[str] = ()
) -> StageBuilders:
    """Return the builders of a model of parts; ``kept`` are encoders whose features are cached.

    Raises:
        ProbeError: a module cannot be cut or sharded as planned.
        PlanError: the model's sizes do not fit the plan's degrees.
    """
    builders = StageBuilders({}, {}, {})
    for node in plan.graph.nodes:
        first = plan.replicas(node.name)[0][0]
        is_cut = first.layers[1] < node.num_blocks
        kind = module_kind(node.name)
        if kind is ModuleKind.LANGUAGE_MODEL:
            ports = plan.graph.ports_of(node.name)
            spec: Any = replace(model.language_spec(), ports=ports)
            example, cuts = None, Cuts(False, False)
            if first.cp > 1 and not spec.mixers:  # with neither a mask nor packing
                spec = replace(spec, mixers=find_mixers(spec.source))
            if is_cut:
                arguments = partial(merged_arguments, spec) if spec.ports else None
                spec = replace(spec, cut=probe_language_model(spec.source, arguments))
            names, build = language_stage_parameters, _build_language
        else:
            spec = model.encoder_spec(node.name)
            example = model.encoders[node.name].example_inputs
            cuts = _cuts(plan, node)
            if node.name in kept and not cuts.blocks:
                cuts = Cuts(False, False)  # features alone need no further probe
            spec = probe_chain(spec, cuts, example)
            names = encoder_stage_parameters
            build = _build_featured if node.name in kept else _build_encoder
        builders.shard_specs[node.name] = shard_spec = _shared(plan, node.name, spec, example)
        if kind is ModuleKind.ENCODER and (cuts or max(first.tp, first.cp) > 1):
            builders.retries[node.name] = partial(_try_inputs, spec, cuts, first, shard_spec)
        builders.add(plan, node.name, spec, names, build)
    return builders


@plain_torch()
def dag_stage_builders(dag: ModuleDag, plan: Plan) -> StageBuilders:
    """Return the builders of a graph of modules. Raises as :func:`stage_builders` does."""
    builders = StageBuilders({}, {}, {})
    for node in plan.graph.nodes:
        first = plan.replicas(node.name)[0][0]
        spec, example = dag.stage_spec(node.name), dag.nodes[node.name].modality.example_inputs
        spec = replace(spec, ports=plan.graph.ports_of(node.name))
        check_node_history(spec, example)
        spec = probe_node(spec, _cuts(plan, node), example, plan.graph.backward)
        if first.fsdp > 1 and any(read.every for read in dag.nodes[node.name].parsed_inputs()):
            raise PlanError(
                f"sharding of {node.name!r} is 'fsdp', but the module reads every(); accepted: "
                "'none', 'zero1'"
            )
        builders.shard_specs[node.name] = _shared(plan, node.name, spec, example)
        builders.add(plan, node.name, spec, encoder_stage_parameters, _build_node)
    return builders


def _shared(
    plan: Plan, module: str, spec: AnySpec, example: dict[str, Any] | None
) -> ShardSpec:
    """Return the shards of a module's parameters that each process of a rank holds."""
    first = plan.replicas(module)[0][0]
    if (
        isinstance(spec, EncoderSpec) and example is not None
        and max(first.tp, first.cp, first.fsdp) > 1
    ):
        example = module_inputs(spec, example)
    if first.cp > 1:
        _check_tokens(module, spec, example, first.cp)
    shares_samples = first.split == SAMPLES and len(plan.replicas(module)) > 1
    if shares_samples:
        check_norms(spec, _SPLIT_NORMS.format(module))
    if first.fsdp > 1:
        _check_samples(module, spec, example)
    if first.cp > 1 or first.fsdp > 1 or shares_samples:
        language = isinstance(spec, LanguageSpec)
        try:
            draws = draws_of_training(
                spec.source, language, example, read_of(spec),
                cuts_rows=(first.fsdp > 1 or shares_samples) and not getattr(spec, "packing", False)
            )
        except ProbeError:
            if (first.cp > 1 or first.fsdp > 1) and find_blocks(spec.source.skeleton()) is not None:
                raise
            draws = TrainingDraws()  # not every module of a graph can be tried alone
        check_training_draws(spec, first, draws)
    tensors = partial(probe_tensor, spec.source, first.tp, module, example, read_of(spec))
    return shard_spec(spec, first, tensors)


def _try_inputs(
    spec: EncoderSpec, cuts: Cuts, stage: Stage, shard_spec: ShardSpec, example: Mapping[str, Any]
) -> None:
    """Raise a ``ProbeError`` if stages and shards that were made for other inputs do not suit
    these."""
    check_chain(spec, cuts, example)
    inputs = module_inputs(spec, example) if max(stage.tp, stage.cp) > 1 else None
    if stage.cp > 1:
        _check_tokens(spec.name, spec, inputs, stage.cp)
    if stage.tp > 1 and probe_tensor(spec.source, stage.tp, spec.name, inputs) != (
        shard_spec.plans["module"]
    ):
        raise ProbeError(
            f"tp of {spec.name!r} is {stage.tp}, and these inputs need other shards of it"
        )


def _cuts(plan: Plan, node: ModuleNode) -> Cuts:
    starts = {stage.layers[0] for stage in plan.module_stages(node.name)}
    return Cuts(any(0 < lo < node.num_blocks for lo in starts), node.num_blocks in starts)


def skeletons(spec: EncoderSpec | LanguageSpec) -> dict[str, nn.Module]:
    """Return the structures of a module and its projector, by the prefix of their parameter
    names."""
    skeletons = {"module": spec.source.skeleton()}
    if isinstance(spec, EncoderSpec) and spec.projector is not None:
        skeletons["projector"] = spec.projector.skeleton()
    return skeletons


def parameter_sizes(spec: EncoderSpec | LanguageSpec) -> dict[str, int]:
    """Return the elements of every parameter of a module and its projector; 0 for frozen ones."""
    return {
        f"{prefix}.{name}": parameter.numel() if parameter.requires_grad else 0
        for prefix, skeleton in skeletons(spec).items()
        for name, parameter in skeleton.named_parameters()
    }


def check_training_draws(spec: AnySpec, stage: Stage, draws: TrainingDraws) -> None:
    """Raise a PlanError if processes that share a microbatch make different random decisions in
    training.

    A process that skips a layer would not enter the collectives of the others in it. Numbers that
    are drawn with NumPy or Python for part of the samples differ from those of one process.
    """
    if draws.skips_blocks and max(stage.cp, stage.fsdp) > 1:
        raise PlanError(_LAYER_DROP.format(spec.name))
    # The processes of an encoder have all tokens until its first block.
    cuts_tokens = stage.cp > 1 and spec.name == LANGUAGE_MODEL
    if stage.fsdp > 1:
        planned = "sharding is 'fsdp'; accepted: 'none', 'zero1' (with dp)"
    elif stage.split == SAMPLES:
        planned = "its replicas split every microbatch by samples; accepted: one replica"
    else:
        planned = f"cp is {stage.cp}; accepted: 1"
    cuts_samples = stage.fsdp > 1 or stage.split == SAMPLES
    if draws.on_host_in_blocks or (draws.on_host and (cuts_samples or cuts_tokens)):
        raise PlanError(_HOST_DRAWS.format(spec.name, planned))
    if draws.refused:
        raise PlanError(f"{spec.name!r} cannot share samples ({planned}): {draws.refused}")


def _check_tokens(
    module: str, spec: EncoderSpec | LanguageSpec, example: dict[str, Any] | None, cp: int
) -> None:
    """Raise a ``ProbeError`` if a module's tokens cannot be split over processes."""
    try:
        if isinstance(spec, LanguageSpec):
            probe_shared_tokens(spec.source, spec.mask is not None)
        else:
            probe_shared_items(spec.source, example, read_of(spec))
    except ProbeError as error:
        raise ProbeError(f"cp of {module!r} is {cp}; accepted: 1. {error}") from error


def check_norms(spec: EncoderSpec | LanguageSpec, planned: str) -> None:
    """Raise a PlanError, which begins with ``planned``, if a module has a batch norm in training
    mode, whose statistics need all samples."""
    if any(
        isinstance(child, _BatchNorm) and skeleton.training
        for skeleton in (set_mode(module) for module in skeletons(spec).values())
        for buffers in [own_buffers(skeleton)]
        for name, child in skeleton.named_modules()
        if not child._buffers or f"{name}.{next(iter(child._buffers))}".lstrip(".") in buffers
    ):
        raise PlanError(f"{planned} contains batch norms, which need all samples")


def _check_samples(
    module: str, spec: EncoderSpec | LanguageSpec, example: dict[str, Any] | None
) -> None:
    """Raise a ``PlanError`` if a module's samples cannot be split over processes."""
    check_norms(spec, SHARDED_NORMS.format(module))
    if isinstance(spec, EncoderSpec) and example is not None:
        try:
            count_items(example, module)
        except ModelError as error:
            raise PlanError(f"sharding of {module!r}: {error}") from None


def shard_spec(
    spec: EncoderSpec | LanguageSpec, stage: Stage, tensors: Callable[[], TensorPlan]
) -> ShardSpec:
    """Return the shards of a module's parameters that each process of a rank holds. Raises
    PlanError if the parameters cannot be sharded as planned."""
    if stage.shards > 1:
        skeleton = spec.source.skeleton()
        blocks = spec.cut.blocks if spec.cut else find_blocks(skeleton)
        if blocks is None:
            raise PlanError(
                f"sharding of {spec.name!r} is 'fsdp', but no list of blocks to shard was found in "
                "it; accepted: 'none', 'zero1'"
            )
        if any(not parameter.is_floating_point() for parameter in skeleton.parameters()):
            raise PlanError(
                f"sharding of {spec.name!r} is 'fsdp', but the weights under its adapters are "
                "quantised (base); accepted: 'none', 'zero1' (with dp)"
            )
        units = language_units if isinstance(spec, LanguageSpec) else block_units
        plan = fully_sharded_plan(skeleton, units(skeleton, blocks), stage.shards)
        experts = probe_experts(spec.source, stage.ep, spec.name)
        return ShardSpec({"module": replace(plan, experts=experts)}, stage.shards)
    if (tp := stage.tp) == 1:
        return ShardSpec()
    plans: dict[str, ShardPlan] = {"module": tensors()}
    projector = getattr(spec, "projector", None)
    if projector is not None:
        plans["projector"] = tensor_plan(projector, tp, f"{spec.name} projector")
    return ShardSpec(plans)


def _slim(
    spec: EncoderSpec | LanguageSpec, own: Iterable[str], lo: int, hi: int
) -> EncoderSpec | LanguageSpec:
    """Return the spec with only the live tensors that a stage owns."""
    def names(prefix: str) -> list[str]:
        return [n.removeprefix(prefix) for n in own if n.startswith(prefix)]

    slim = replace(spec, source=spec.source.for_names(names("module.")))
    if isinstance(slim, EncoderSpec) and slim.projector is not None:
        slim = replace(slim, projector=slim.projector.for_names(names("projector.")))
    return slim


def _build_encoder(
    spec: EncoderSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> EncoderStage:
    return recomputing(EncoderStage.build(spec, lo, hi), spec, lo, layer_options)


def _build_featured(
    spec: EncoderSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> EncoderStage:
    stage = (EncoderStage if lo else FeatureStage).build(spec, lo, hi)
    return recomputing(stage, spec, lo, layer_options)


def _build_node(
    spec: NodeStageSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> EncoderStage:
    return recomputing(NodeStage.build(spec, lo, hi), spec, lo, layer_options)


def _build_language(
    spec: LanguageSpec, lo: int, hi: int, layer_options: Sequence[str] = ()
) -> LanguageStage:
    return recomputing(LanguageStage.build(spec, lo, hi), spec, lo, layer_options)


def recomputing(
    stage: AnyStage, spec: EncoderSpec | LanguageSpec, lo: int, layer_options: Sequence[str]
) -> AnyStage:
    """Apply the plan's options to the activations of a stage's blocks from ``lo`` on, and return
    it."""
    if layer_options:
        module = stage.module
        assert module is not None  # its layers have options
        blocks = spec.cut.blocks if spec.cut else find_blocks(module)
        all_layers = [module] if blocks is None else list(block_list(module, blocks))
        recompute_layers(all_layers[lo : lo + len(layer_options)], layer_options)
    return stage
