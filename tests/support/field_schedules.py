"""Names of the schedules of other projects, and a plan that distinguishes them."""

from __future__ import annotations

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.step_graph import active_stages, full_step

FIELD = ("megatron", "mimo", "mimo_colocated", "entrain", "dip", "bigmac", "optimus")
RANKS = 4


def replicated_plan(microbatches: int, schedule: str, encoder_seconds: float = 1.0) -> Plan:
    """Return a language model on four ranks, each with a replica of an encoder."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * RANKS)), (("vision", "llm"),)
    )
    profile = CostProfile({
        "vision": (LayerCost(encoder_seconds, encoder_seconds, encoder_seconds, 1000, 1),),
        "llm": (LayerCost(2.0, 2.0, 2.0, 100, 1),) * RANKS,
    })
    stages = [Stage("vision", 0, (0, 1), rank, replica=rank) for rank in range(RANKS)]
    stages += [Stage("llm", i, (i, i + 1), i) for i in range(RANKS)]
    return Plan(graph, tuple(stages), microbatches, schedule, profile)


def most_held(plan: Plan, module: str) -> int:
    report = check_program(full_program(plan))
    return max(
        held for stage, held in report.live_activations.items() if stage.module == module
    )


def stepped(plan: Plan, present=None, loads=None) -> PlannedStep:
    active = active_stages(plan, full_step(plan) if present is None else present)
    return PlannedStep(plan, active, loads=loads)
