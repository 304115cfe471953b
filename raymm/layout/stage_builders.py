"""Builders of the stages of a model under a plan, and the parameters that each stage owns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.compiled_blocks import compile_blocks
from raymm.actors.modules.cut import own_buffers
from raymm.actors.probe.callbacks import Cuts
from raymm.actors.probe.experts.parallel import probe_experts
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.stage_comparison import TrainingDraws
from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.actors.sharding.fully_sharded import block_units, fully_sharded_plan, language_units
from raymm.actors.sharding.parameter_shards import ShardPlan, ShardSpec
from raymm.actors.sharding.tensor_plan import TensorPlan, tensor_plan
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.stages.stage_hook import StageHooks
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.model.module import Module, refused
from raymm.model.trainable_layers import any_trainable
from raymm.scheduler.graph.module_graph import ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.plan.stage_edges import SAMPLES

# Beginnings of messages about batch norms in modules whose samples are split.
_SPLIT_NORMS = "{!r} has replicas that split samples (use one replica, or freeze it), and it"
_SHARDED_NORMS = (
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


@dataclass(frozen=True)
class StageBuilders:
    """Builders of the ranks of a plan.

    Attributes:
        build: picklable function by stage that builds its full, unsharded module.
        owned: elements of the parameters that a stage owns, by stage and name; 0 for frozen ones.
        shard_specs: by module, the shard of each parameter that a process holds.
        retries: by encoder that is cut or sharded, a function that tries other inputs and raises a
            ``ProbeError`` if the builders do not suit them.
        compiled: True to compile the stages' blocks.
    """

    build: dict[StageId, Callable[[], EncoderStage | LanguageStage]]
    owned: dict[StageId, dict[str, int]]
    shard_specs: dict[str, ShardSpec]
    retries: dict[str, Retry] = field(default_factory=dict)
    compiled: bool = False

    def add(
        self, plan: Plan, module: Module, spec: AnySpec, cached: bool, hooks: StageHooks | None
    ) -> None:
        """Add all stages of a module, with the activation option of each block."""
        sizes = parameter_sizes(spec)
        built: dict[tuple, tuple[dict[str, int], Callable[[], Any]]] = {}
        for stage in plan.module_stages(module.name):
            (lo, hi), options = key = stage.layers, stage.layer_options
            if key not in built:  # replicas of the module share the entry
                stage_sizes = {name: sizes[name] for name in module.stage_parameters(spec, lo, hi)}
                built[key] = (
                    stage_sizes,
                    partial(
                        _build, module.stage_class(lo, cached), _slim(spec, stage_sizes), lo, hi,
                        options, hooks and replace(
                            hooks, first=lo == 0, last=hi == plan.graph.node(module.name).num_layers
                        ),
                        self.compiled,
                    ),
                )
            self.owned[stage.id], self.build[stage.id] = built[key]


@plain_torch()
def stage_builders(
    model: Model, plan: Plan, cached: Collection[str] = (), compiled: bool = False
) -> StageBuilders:
    """Return the builders of a model; ``cached`` are encoders whose features are cached. If
    ``compiled``, blocks are compiled.

    Raises:
        ProbeError: a module cannot be cut or sharded as planned.
        PlanError: the model's sizes do not fit the plan's degrees.
    """
    builders = StageBuilders({}, {}, {}, compiled=compiled)
    for node in plan.graph.nodes:
        name, module = node.name, model.module(node.name)
        first, cuts = plan.replicas(name)[0][0], _cuts(plan, node)
        if name in cached and not cuts.blocks:
            cuts = Cuts(False, False)  # features alone need no further probe
        spec = module.cut(cuts, plan.graph.ports_of(name), name in cached)
        spec = _shared(plan, module, spec)
        shards = shard_spec(spec, first, partial(module.tensor_plan, spec, first.tp))
        builders.shard_specs[name] = shards
        if (retry := module.retry(spec, cuts, first, shards.plans)) is not None:
            builders.retries[name] = retry
        builders.add(plan, module, spec, name in cached, model.hooks_of(name))
    return builders


def _shared(plan: Plan, module: Module, spec: AnySpec) -> AnySpec:
    """Return a module's spec for the processes that split its tokens or samples."""
    name, replicas = module.name, plan.replicas(module.name)
    first = replicas[0][0]
    if first.cp > 1:
        with refused(f"cp of {name!r} is {first.cp}; accepted: 1"):
            spec = module.share_tokens(spec)
    shares_samples = first.split == SAMPLES and len(replicas) > 1
    if shares_samples:
        _check_norms(spec, _SPLIT_NORMS.format(name))
    factor = f"microbatch_factor of {name!r} is {first.microbatch_factor}"
    for applies, planned, norms in (
        (first.fsdp > 1, f"sharding of {name!r} is 'fsdp'; accepted: 'none', 'zero1'",
         _SHARDED_NORMS.format(name)),
        (first.microbatch_factor > 1, f"{factor}; accepted: 1", f"{factor}, and the module"),
    ):
        if applies:
            _check_norms(spec, norms)
            with refused(planned):
                spec = module.share_rows(spec)
    if first.microbatch_factor > 1 and getattr(spec, "zeros_left_out", False):
        raise PlanError(f"{factor}; accepted: 1, because padding items of the module are left out")
    if first.cp > 1 or first.fsdp > 1 or shares_samples:
        draws = module.draws(spec, first, cuts_rows=first.fsdp > 1 or shares_samples)
        _check_training_draws(module, first, draws)
    return spec


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


def _check_training_draws(module: Module, stage: Stage, draws: TrainingDraws) -> None:
    """Raise a PlanError if processes that share a microbatch make different random decisions in
    training.

    A process that skips a layer would not enter the collectives of the others in it. Numbers that
    are drawn with NumPy or Python for part of the samples differ from those of one process.
    """
    if draws.skips_blocks and max(stage.cp, stage.fsdp) > 1:
        raise PlanError(_LAYER_DROP.format(module.name))
    # The processes of an encoder have all tokens until its first block.
    cuts_tokens = stage.cp > 1 and module.causal
    if stage.fsdp > 1:
        planned = "sharding is 'fsdp'; accepted: 'none', 'zero1' (with dp)"
    elif stage.split == SAMPLES:
        planned = "its replicas split every microbatch by samples; accepted: one replica"
    else:
        planned = f"cp is {stage.cp}; accepted: 1"
    cuts_samples = stage.fsdp > 1 or stage.split == SAMPLES
    if draws.on_host_in_blocks or (draws.on_host and (cuts_samples or cuts_tokens)):
        raise PlanError(_HOST_DRAWS.format(module.name, planned))
    if draws.refused:
        raise PlanError(f"{module.name!r} cannot share samples ({planned}): {draws.refused}")


def _check_norms(spec: EncoderSpec | LanguageSpec, planned: str) -> None:
    """Raise a PlanError, which begins with ``planned``, if a module has a batch norm in training
    mode, whose statistics need all samples."""
    if any(
        isinstance(child, _BatchNorm)
        for skeleton in skeletons(spec).values() if any_trainable(skeleton)
        for buffers in [own_buffers(skeleton)]
        for name, child in skeleton.named_modules()
        if not child._buffers or f"{name}.{next(iter(child._buffers))}".lstrip(".") in buffers
    ):
        raise PlanError(f"{planned} contains batch norms, which need all samples")


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


def _slim(spec: AnySpec, own: Iterable[str]) -> AnySpec:
    """Return the spec with only the live tensors that a stage owns."""
    def names(prefix: str) -> list[str]:
        return [n.removeprefix(prefix) for n in own if n.startswith(prefix)]

    slim = replace(spec, source=spec.source.for_names(names("module.")))
    if isinstance(slim, EncoderSpec) and slim.projector is not None:
        slim = replace(slim, projector=slim.projector.for_names(names("projector.")))
    return slim


def _build(
    stage_class: Any, spec: AnySpec, lo: int, hi: int, layer_options: Sequence[str],
    hooks: StageHooks | None, compiled: bool,
) -> EncoderStage | LanguageStage:  # fmt: skip
    """Build a stage, whose blocks from ``lo`` on handle activations by the plan's options, and are
    compiled if ``compiled``."""
    stage = stage_class.build(spec, lo, hi)
    stage.attach_hooks(hooks)
    module = stage.module
    if module is not None and (layer_options or compiled):
        blocks = spec.cut.blocks if spec.cut else find_blocks(module)
        all_layers = [module] if blocks is None else list(block_list(module, blocks))
        if compiled:
            compile_blocks(all_layers[lo : min(hi, spec.num_blocks)], spec.name)
        if layer_options:
            recompute_layers(all_layers[lo : lo + len(layer_options)], layer_options)
    return stage
