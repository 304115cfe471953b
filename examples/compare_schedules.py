"""Compare pipeline schedules of a vision-audio-language model on paper: a table and a picture.

    python -m examples.compare_schedules [--microbatches 12] [--out docs/images/zero_bubble.png]

Costs are plain numbers below, so it runs anywhere, without a GPU, Ray or torch.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from raymm.draw import draw_timelines
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.memory import GIB, rank_memory
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
MIB = 2**20


class Module(NamedTuple):
    """A module of equal layers: per layer and microbatch, milliseconds of a forward (each half
    of a backward takes as long) and MiB; and where its layers are cut, a rank per stage."""

    forward_ms: float
    activation: int
    parameters: int
    output: int
    cuts: tuple[int, ...]
    trained: bool
    recompute: bool


# Encoders frozen but for a projector (their last layer), the language model trained with
# recomputation of all stages but the loss's, which would run its forward twice in a row.
MODULES = {
    "vision": Module(1.9, 90, 60, 10, (0, 13, 25), trained=False, recompute=False),
    "audio": Module(1.6, 60, 40, 6, (0, 17), trained=False, recompute=False),
    "llm": Module(3.0, 300, 420, 16, (0, 8, 16, 24, 32), trained=True, recompute=True),
}


def model_plan(schedule: str, microbatches: int) -> Plan:
    """Vision on two ranks, audio on one, the language model on four."""
    nodes, stages, costs = [], [], {}
    for name, module in MODULES.items():
        layers = module.cuts[-1]
        encoder = name != "llm"
        nodes.append(ModuleNode(
            name, (module.trained,) * (layers - 1) + (True,), projector=encoder
        ))
        seconds = module.forward_ms / 1e3
        costs[name] = (LayerCost(
            seconds, seconds, seconds, module.activation * MIB, module.parameters * MIB,
            module.output * MIB,
        ),) * layers
        last = len(module.cuts) - 2
        for index in range(last + 1):
            computes_loss = not encoder and index == last
            stages.append(Stage(
                name, index, module.cuts[index:index + 2], len(stages),
                recompute=module.recompute and not computes_loss,
            ))
    graph = ModuleGraph(tuple(nodes), (("vision", "llm"), ("audio", "llm")))
    return Plan(graph, tuple(stages), microbatches, schedule, CostProfile(costs))


class Outcome(NamedTuple):
    """Simulated figures of one schedule; ``activations`` is bytes on the fullest rank."""

    schedule: str
    timeline: Timeline
    activations: int

    @property
    def bubble(self) -> float:
        """Mean over ranks."""
        ranks = range(self.timeline.num_ranks)
        return sum(map(self.timeline.bubble, ranks)) / len(ranks)


def compare(microbatches: int) -> list[Outcome]:
    """Lower, check and simulate the model under every schedule."""
    outcomes = []
    for schedule in SCHEDULES:
        plan = model_plan(schedule, microbatches)
        program = lower(plan, [list(MODULES)] * microbatches)
        check_program(program)
        peak = max(need.activations for need in rank_memory(plan, program))
        timeline = simulate(program, op_seconds(plan), posted=plan.posted_receives)
        outcomes.append(Outcome(schedule, timeline, peak))
    return outcomes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=12, help="per step")
    parser.add_argument("--out", default="zero_bubble.png", help="picture, .png or .svg")
    options = parser.parse_args(arguments)
    outcomes = compare(options.microbatches)
    table = Table(title=f"{options.microbatches} microbatches, recomputation on")
    for name in ("schedule", "iteration", "against 1f1b", "mean bubble", "peak activations"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for outcome in outcomes:
        seconds = outcome.timeline.makespan
        table.add_row(
            outcome.schedule, f"{1e3 * seconds:.1f} ms",
            f"{seconds / outcomes[0].timeline.makespan - 1:+.1%}", f"{outcome.bubble:.1%}",
            f"{outcome.activations / GIB:.2f} GiB",
        )
    console = Console()
    console.print(table)
    path = draw_timelines(
        [(outcome.schedule, outcome.timeline) for outcome in outcomes], options.out,
        title="One step of a vision-audio-language model, recomputation on",
    )
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
