"""Checks that a plan fits its model, optimizer, compilation and devices, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.nn.modules.dropout import _DropoutNd

from raymm.actors.modules.blocks import find_blocks
from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.optimizer_config import (
    FP32,
    MUON,
    PROJECTOR,
    OptimizerConfig,
    UpdateRule,
)
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.quota import Multiprocessors, partition
from raymm.actors.stages.encoder import EncoderSpec
from raymm.actors.stages.language import LanguageSpec
from raymm.actors.weights.adapted_source import AdaptedSource
from raymm.errors import PlanError
from raymm.layout.stage_builders import skeletons
from raymm.model.model import Model
from raymm.model.module import EncoderModule, TowerModule
from raymm.plural import plural
from raymm.scheduler.costs.recomputation import ALL, KEEP
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.minibatch.step_choice import check_loads
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import check_memory
from raymm.scheduler.schedules.registry import find_schedule


def check_fits(plan: Plan) -> None:
    """Raise a PlanError if the order of a custom schedule cannot run, or a rank needs more memory
    than the plan's limit."""
    has_limit = plan.memory_limit is not None and plan.profile is not None
    if has_limit or not find_schedule(plan.schedule).proven:
        check_memory(plan, full_program(plan))


def chosen_per_batch(plan: Plan, schedules: Sequence[str]) -> Plan:
    """Return a plan whose steps choose among its schedule and those of ``schedules`` under which
    its stages can run and fit in memory (``planning.per_batch``). Raise a PlanError if the order of
    its microbatches cannot be chosen."""
    check_loads(plan)
    accepted = [plan.schedule]
    for name in schedules:
        try:
            changed = replace(plan, schedule=name)
            check_loads(changed)
            check_fits(changed)
        except PlanError:
            continue
        accepted.append(name)
    return replace(plan, step_schedules=tuple(dict.fromkeys(accepted)))


def check_grants(plan: Plan, gpu: Multiprocessors) -> None:
    """Raise a PlanError if the device cannot partition its multiprocessors into the quotas of a
    rank: a quota is below the granularity, or there are too many."""
    for rank in range(plan.num_ranks):
        try:
            for quotas in plan.quota_sets(rank):
                partition(quotas, gpu)
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}") from None


def differences(planned: ModuleGraph, model: ModuleGraph) -> list[str]:
    """Return the differences between a plan's graph and a model's as texts; empty if they are
    equal."""
    texts = []
    nodes = {node.name: node for node in planned.nodes}
    model_nodes = {node.name: node for node in model.nodes}
    for name in sorted(nodes.keys() - model_nodes.keys()):
        texts.append(f"the plan has a module {name!r}, the model does not")
    for name in sorted(model_nodes.keys() - nodes.keys()):
        texts.append(f"the model has a module {name!r}, the plan does not")
    for name, node in model_nodes.items():
        if name not in nodes:
            continue
        in_plan = nodes[name]
        if in_plan.num_blocks != node.num_blocks:
            texts.append(
                f"{name!r} has {plural(in_plan.num_blocks, 'block')} in the plan, "
                f"{node.num_blocks} in the "
                "model"
            )
        elif in_plan.projector != node.projector:
            where = "plan" if in_plan.projector else "model"
            texts.append(f"{name!r} has a projector in the {where} only")
        elif in_plan.trainable != node.trainable:
            layer = next(
                i for i, (a, b) in enumerate(zip(in_plan.trainable, node.trainable, strict=True))
                if a != b
            )
            states = ("frozen", "trained")
            texts.append(
                f"layer {layer} of {name!r} is {states[in_plan.trainable[layer]]} in the plan, "
                f"{states[node.trainable[layer]]} in the model"
            )
    if not texts and set(planned.edges) != set(model.edges):
        texts.append(f"the plan's edges are {planned.edges}, the model's {model.edges}")
    if not texts and model.ports and planned.ports != model.ports:
        texts.append(f"layers read {planned.ports} in the plan, {model.ports} in the model")
    if not texts and replace(planned, ports=()) != replace(model, ports=()):
        texts.append("modules or edges are in another order")
    return texts


def check_optimizer(config: OptimizerConfig, plan: Plan, bf16: bool) -> None:
    """Raise a PlanError for an unknown module, a module whose sharding the optimizer does not
    support, or parameters in another dtype than the computation."""
    check_modules(config, plan.graph, bf16)
    for node in plan.graph.nodes:
        prefixes = ("module.", "projector.") if node.projector else ("module.",)
        dtype = config.rule_of(node.name, "module.").parameters
        if dtype != FP32 and plan.module_stages(node.name)[0].shards > 1:
            raise PlanError(
                f"sharding of {node.name!r} is 'fsdp', which already gathers weights in bf16, and "
                f"parameters of its optimizer is {dtype!r}; accepted: parameters {FP32}, or "
                "sharding zero1"
            )
        rules = [config.rule_of(node.name, prefix) for prefix in prefixes]
        name = next((rule.name for rule in rules if _needs_full_parameters(rule)), None)
        if name is None:
            continue
        stage = plan.module_stages(node.name)[0]
        for option, degree, fits in (("tp", stage.tp, "1"), ("sharding", stage.shards, "zero1")):
            if degree > 1:
                shown = "'fsdp'" if option == "sharding" else degree
                raise PlanError(
                    f"{option} of {node.name!r} is {shown}, under which no process has a full "
                    f"matrix, and its optimizer is {name!r}, which needs full matrices; accepted: "
                    f"{option} {fits}, or adamw"
                )


def _needs_full_parameters(rule: UpdateRule) -> bool:
    if rule.is_custom:
        return not optimizer_traits("optimizer.name", rule).elementwise
    return rule.name == MUON


def check_modules(config: OptimizerConfig, graph: ModuleGraph, bf16: bool) -> None:
    """Raise a PlanError for an unknown module, or parameters in another dtype than the
    computation, and a ConfigError for a custom optimizer that cannot be used."""
    rules = {"": config} | {f"modules.{name}.": config.rule(name) for name in config.modules}
    for where, rule in rules.items():
        if rule.is_custom:
            optimizer_traits(f"optimizer.{where}name", rule)
        if rule.parameters != FP32 and not bf16:
            raise PlanError(
                f"optimizer.{where}parameters is {rule.parameters!r}, and run.precision 'fp32'; "
                f"accepted: {FP32}, or precision bf16"
            )
    accepted = [node.name for node in graph.nodes]
    accepted += [f"{node.name}{PROJECTOR}" for node in graph.nodes if node.projector]
    for module in config.modules:
        if module not in accepted:
            raise PlanError(
                f"optimizer.modules has {module!r}; the model's modules are {', '.join(accepted)}"
            )


def check_compiled(model: Model, plan: Plan, kernels: str) -> None:
    """Raise a PlanError for ``run.compile: blocks`` where blocks cannot be compiled, or where
    compiled blocks would compute something else. Names the module, the setting and what is
    accepted."""
    if kernels == "auto":
        raise PlanError(
            "run.compile is 'blocks' and run.kernels 'auto', which measures kernels in the middle "
            "of a block; accepted: kernels raymm or raymm_unordered, or compile null"
        )
    if find_schedule(plan.schedule).splits_backward:
        raise PlanError(
            f"run.compile is 'blocks' and schedule {plan.schedule!r}, which splits the backward of "
            "a block in two; accepted: a schedule that does not, such as 1f1b, or compile null"
        )
    for node in plan.graph.nodes:
        spec = model.spec(node.name)
        if isinstance(spec, LanguageSpec) and spec.mixture is not None:
            raise _refused(node.name, "is a mixture of experts", "a dense model")
        if isinstance(spec, LanguageSpec) and spec.mixers:
            layers = ", ".join(sorted(spec.mixers))
            raise _refused(node.name, f"gets documents apart in {layers}", "attention layers")
        if find_blocks(spec.source.skeleton()) is None:
            raise _refused(node.name, "has no list of blocks", "a module with one")
        for stage in plan.module_stages(node.name):
            _check_stage(plan, stage)


def _check_stage(plan: Plan, stage: Stage) -> None:
    name = stage.module
    for degree, value in (("tp", stage.tp), ("cp", stage.cp), ("fsdp", stage.shards)):
        if value > 1:
            raise _refused(name, f"has {degree} {value}", f"{degree} 1")
    if stage.split == SAMPLES and len(plan.replicas(name)) > 1:
        raise _refused(name, "has replicas that split microbatches by samples", "one replica")
    if stage.quota is not None:
        raise _refused(name, f"has a quota of {stage.quota:g} of a device", "no quotas")
    if options := sorted(set(stage.layer_options) - {KEEP, ALL}):
        raise _refused(
            name, f"has recompute_layers {options[0]!r}, which selects operators within a block",
            f"{KEEP} or {ALL}",
        )  # fmt: skip


def _refused(name: str, reason: str, accepted: str) -> PlanError:
    return PlanError(
        f"run.compile is 'blocks', but {name!r} {reason}; accepted: {accepted}, or compile null"
    )


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
