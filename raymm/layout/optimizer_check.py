"""Whether a plan's parameters can be updated as asked for."""

from __future__ import annotations

from raymm.actors.optimizer.optimizer_config import MUON, PROJECTOR, OptimizerConfig
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan, PlanError


def check_optimizer(config: OptimizerConfig, plan: Plan) -> None:
    """Look at an optimizer, before anything starts.

    Args:
        config: of the whole model, and of modules.
        plan: what runs where.

    Raises:
        PlanError: a module that is none, or one whose parameters are shared out as its optimizer
            cannot have them.
    """
    check_modules(config, plan.graph)
    for node in plan.graph.nodes:
        parts = ("module.", "projector.") if node.projector else ("module.",)
        if not any(config.rule_of(node.name, part).name == MUON for part in parts):
            continue
        stage = plan.module_stages(node.name)[0]
        for what, degree, fits in (("tp", stage.tp, "1"), ("sharding", stage.shards, "zero1")):
            if degree > 1:
                shown = "'fsdp'" if what == "sharding" else degree
                raise PlanError(
                    f"{what} of {node.name!r} is {shown}, under which no process has a whole "
                    f"matrix, and its optimizer is {MUON!r}, which needs them; accepted: {what} "
                    f"{fits}, or adamw"
                )


def check_modules(config: OptimizerConfig, graph: ModuleGraph) -> None:
    """Look whether all modules that an optimizer names are a model's.

    Args:
        config: of the whole model, and of modules.
        graph: the model's.

    Raises:
        PlanError: one is not.
    """
    accepted = [node.name for node in graph.nodes]
    accepted += [f"{node.name}{PROJECTOR}" for node in graph.nodes if node.projector]
    for module in config.modules:
        if module not in accepted:
            raise PlanError(
                f"optimizer.modules has {module!r}; the model's are {', '.join(accepted)}"
            )
