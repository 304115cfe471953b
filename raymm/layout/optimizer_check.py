"""Check that the parameters of a plan can be updated by the optimizer."""

from __future__ import annotations

from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.optimizer_config import (
    FP32,
    MUON,
    PROJECTOR,
    OptimizerConfig,
    UpdateRule,
)
from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan


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
