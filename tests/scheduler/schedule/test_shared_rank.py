"""A rank that encoders share with the language model must not drain the pipeline after it."""

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, Op
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate

FROZEN_WITH_PROJECTOR = (False, True)


def alignment_plan(microbatches: int) -> Plan:
    graph = ModuleGraph(
        (
            ModuleNode("vision", FROZEN_WITH_PROJECTOR, True),
            ModuleNode("audio", FROZEN_WITH_PROJECTOR, True),
            ModuleNode("llm", (False, False)),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = (
        Stage("vision", 0, (0, 2), 0), Stage("audio", 0, (0, 2), 0),
        Stage("llm", 0, (0, 1), 0), Stage("llm", 1, (1, 2), 1),
    )
    return Plan(graph, stages, microbatches)


def test_language_stages_alternate_without_known_costs():
    program = lower(alignment_plan(6), [("vision", "audio")] * 6)
    first = [
        f"{'B' if i.op is Op.BACKWARD else 'F'}{i.microbatch}"
        for i in program.ranks[0] if i.op in COMPUTE and i.stage == StageId("llm", 0)
    ]
    assert first == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5".split()


def test_second_rank_is_idle_only_at_both_ends():
    program = lower(alignment_plan(6), [("vision", "audio")] * 6)
    costs = {}
    for stage, forward, backward in (
        (StageId("vision", 0), 0.1, 0.02),
        (StageId("audio", 0), 0.1, 0.02),
        (StageId("llm", 0), 1.0, 1.0),
        (StageId("llm", 1), 1.2, 1.2),
    ):
        costs[stage, Op.FORWARD] = forward
        costs[stage, Op.BACKWARD] = backward
    timeline = simulate(program, costs)
    spans = [span for span in timeline.compute() if span.rank == 1]
    idle = sum(b.start - a.end for a, b in zip(spans, spans[1:], strict=False))
    assert idle < 0.2  # of 14.4 units of work
