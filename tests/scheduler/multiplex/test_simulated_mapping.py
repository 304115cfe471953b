"""The simulator's timeline of a mapping: slots take what the performance model says of stages, and
GPUs that go on as soon as they can are never later than in lockstep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapping_problems import problems

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.multiplex.mapped_plan import mapped_plan
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.multiplex.surface_seconds import SurfaceSeconds
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.program import BACKWARDS
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate


def simulated(
    problem: MappingProblem, mapping: Mapping, microbatches: int
) -> tuple[Plan, Timeline]:
    """A plan and its timeline; modules that nothing reads compute losses."""
    read = {producer for producer, _ in problem.edges}
    graph = ModuleGraph(
        tuple(ModuleNode(name, (True,), loss=name not in read) for name in problem.names),
        problem.edges,
    )
    plan = mapped_plan(graph, mapping, microbatches)
    samples = [Samples(mapping.gpus)] * microbatches
    program = lower(plan, [list(problem.names)] * microbatches, samples=samples)
    seconds = SurfaceSeconds(problem, plan)
    return plan, simulate(program, seconds.whole(), group_seconds=seconds)


@given(problems(limits=(None,)), st.integers(1, 2))
def test_slots_take_what_the_performance_model_says(problem, microbatches):
    mapping = solve(problem)
    plan, timeline = simulated(problem, mapping, microbatches)
    for microbatch in range(microbatches):
        longest = {}
        for span in timeline.spans:
            if span.microbatch == microbatch:
                stage = plan.by_id[span.stage]
                place = stage.slot, span.stage.module, span.op in BACKWARDS
                longest[place] = max(longest.get(place, 0.0), span.end - span.start)
        for slot, stage in enumerate(mapping.stages):
            modules = {p.module for p in stage.placements}
            took = max(longest[slot, m, False] + longest[slot, m, True] for m in modules)
            assert took == pytest.approx(stage.seconds)
    assert timeline.makespan <= microbatches * mapping.seconds * (1 + 1e-9)


def test_without_surfaces_a_quota_takes_as_many_times_more():
    graph = ModuleGraph(
        (ModuleNode("a", (True,), loss=True), ModuleNode("b", (True,), loss=True)), ()
    )
    stage = MultiplexStage((Placement("a", (0,), 1), Placement("b", (0,), 3)), 1.0)
    plan = mapped_plan(graph, Mapping(1, 4, (stage,)))
    program = lower(plan, [["a", "b"]])
    costs = {(s.id, i.op): 3.0 for s in plan.stages for rank in program for i in rank}
    spans = simulate(program, costs).spans
    assert {(s.stage.module, s.end - s.start) for s in spans} == {("a", 12.0), ("b", 4.0)}
