"""The simulator's timeline of a mapping.

Slots take the time of the performance model, and GPUs that continue as soon as possible are never
later than in lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping as ByModule
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.multiplex.mapping import (
    Mapping,
    MultiplexStage,
    Placement,
    mapped_plan,
    module_seconds,
)
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage, StageId
from raymm.scheduler.program.program import BACKWARDS, FORWARDS, Instruction, Op
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.plan_drift import PlanDrift, device_costs
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import edge_bytes, op_seconds, stage_costs
from raymm.scheduler.search.evaluation import evaluate, step_timeline
from tests.support.mapping_problems import problems


@dataclass(frozen=True)
class SurfaceSeconds:
    """Implementation of :data:`raymm.scheduler.schedule.simulate.GroupSeconds`.

    It includes interference on the module's GPU (eq. 7 and 8). Modules outside the problem take no
    time.

    Attributes:
        problem: problem with surfaces and interference.
        plan: plan of a mapping of the problem.
        forward_share: share of the forward in a module's iteration.
    """

    problem: MappingProblem
    plan: Plan
    forward_share: float = 1 / 3

    def __call__(self, instruction: Instruction, quotas: ByModule[str, float]) -> float:
        """Return the seconds of an instruction in a group of modules with these quotas."""
        module = instruction.stage.module
        if module not in self.problem.names:
            return 0.0
        steps = self.problem.steps
        own = Placement(
            module, tuple(range(len(self.plan.replicas(module)))), round(quotas[module] * steps)
        )
        others = [
            Placement(name, (0,), round(quota * steps)) for name, quota in quotas.items()
            if name != module and name in self.problem.names
        ]
        return self._share(instruction.op) * module_seconds(self.problem, [own, *others])[0]

    def whole(self) -> dict[tuple[StageId, Op], float]:
        """Return the seconds per stage and operation, on a whole device."""
        return {
            (stage.id, op): self(Instruction(op, stage.id), {stage.module: 1.0})
            for stage in self.plan.stages for op in (*FORWARDS, Op.BACKWARD)
        }

    def _share(self, op: Op) -> float:
        return 1 - self.forward_share if op in BACKWARDS else self.forward_share


def graph_of(problem: MappingProblem) -> ModuleGraph:
    """Return the graph; modules without a reader compute losses."""
    read = {producer for producer, _ in problem.edges}
    return ModuleGraph(
        tuple(ModuleNode(name, (True,), loss=name not in read) for name in problem.names),
        problem.edges,
    )


def simulated(
    problem: MappingProblem, mapping: Mapping, microbatches: int
) -> tuple[Plan, Timeline]:
    """Return a plan and its timeline."""
    plan = mapped_plan(graph_of(problem), mapping, microbatches)
    samples = [Samples(mapping.gpus)] * microbatches
    program = lower(plan, [list(problem.names)] * microbatches, samples=samples)
    seconds = SurfaceSeconds(problem, plan)
    return plan, simulate(program, seconds.whole(), group_seconds=seconds)


@given(problems(limits=(None,)), st.integers(1, 2))
def test_slots_take_the_modelled_time(problem, microbatches):
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


def test_without_surfaces_time_is_inverse_to_the_quota():
    graph = ModuleGraph(
        (ModuleNode("a", (True,), loss=True), ModuleNode("b", (True,), loss=True)), ()
    )
    stage = MultiplexStage((Placement("a", (0,), 1), Placement("b", (0,), 3)), 1.0)
    plan = mapped_plan(graph, Mapping(1, 4, (stage,)))
    program = lower(plan, [["a", "b"]])
    costs = {(s.id, i.op): 3.0 for s in plan.stages for rank in program for i in rank}
    spans = simulate(program, costs).spans
    assert {(s.stage.module, s.end - s.start) for s in spans} == {("a", 12.0), ("b", 4.0)}


@given(problems(limits=(None,)), st.integers(1, 2))
def test_surfaces_of_a_profile_predict_its_plan(problem, microbatches):
    """Compare with the surfaces themselves, not seconds over quota; bytes are those of shares."""
    mapping = solve(problem)
    plan, expected = simulated(problem, mapping, microbatches)
    modules = {}
    for name, by_degree in zip(problem.names, problem.seconds, strict=True):
        alone = by_degree[0][-1]
        modules[name] = (LayerCost(
            alone / 3, 0.0 if not plan.graph.producers(name) else alone / 3,
            alone / 3 * (2 if not plan.graph.producers(name) else 1),
            activation_bytes=840, output_bytes=8400,
        ),)  # fmt: skip
    sharing = DeviceSharing(problem.surfaces, problem.interference)
    profile = CostProfile(modules, sharing=sharing)
    profile = CostProfile.from_json(profile.to_json())
    assert profile.sharing == sharing
    plan = Plan.from_json(replace(plan, profile=profile).to_json())
    found = step_timeline(plan, Network())
    assert found.makespan == pytest.approx(expected.makespan)
    option, _ = evaluate(plan, Network())
    assert option.seconds == pytest.approx(expected.makespan)
    for stage in plan.stages:
        replicas = len(plan.replicas(stage.module))
        cost = stage_costs(plan)[stage.id]
        assert cost.output_bytes == 8400 // replicas
        handed = cost.output_bytes if plan.stage_consumers[stage.id] else 0
        assert cost.activation_bytes == 840 // replicas + handed
    sent = edge_bytes(plan, stage_costs(plan))
    for producer, consumer in plan.graph.edges:
        assert sum(
            size for (a, b), size in sent.items() if (a.module, b.module) == (producer, consumer)
        ) == pytest.approx(8400, abs=len(sent))


def test_surfaces_predict_colocated_quotas_of_a_pipeline():
    graph = ModuleGraph(
        (ModuleNode("a", (True,)), ModuleNode("b", (True,)), ModuleNode("llm", (True,))),
        (("a", "llm"), ("b", "llm")),
    )
    stages = (
        Stage("a", 0, (0, 1), 0, quota=0.5), Stage("b", 0, (0, 1), 0, quota=0.5),
        Stage("llm", 0, (0, 1), 1),
    )
    # Half of a device is enough for one module and makes the other a third slower.
    surfaces = (
        ScalingSurface("a", (1,), (1, 2), 2, ((3.0, 3.0),), (0,), (0.5, 0.5)),
        ScalingSurface("b", (1,), (1, 2), 2, ((4.0, 3.0),), (0,), (0.5, 0.5)),
    )
    layer = LayerCost(1.0, 0.0, 2.0)
    profile = CostProfile(
        {"a": (layer,), "b": (layer,), "llm": (LayerCost(1.0, 1.0, 1.0),)},
        sharing=DeviceSharing(surfaces, Interference(product=0.4, coupling="own")),
    )
    plan = Plan(graph, stages, 4, profile=profile)
    spans = step_timeline(plan, Network()).spans
    took = {(s.stage.module, s.op): s.end - s.start for s in spans if s.quota < 1}
    assert took["a", "forward"] == pytest.approx(1.1)
    assert took["b", "forward"] == pytest.approx(4 / 3 * 1.1)
    # The measured costs, scaled back to whole devices, are those of the simulation.
    measured = step_timeline(plan, Network())
    costs = device_costs(plan, full_program(plan), measured)
    assert costs == pytest.approx({key: op_seconds(plan)[key] for key in costs})
    assert PlanDrift(plan).observe(measured).excess == pytest.approx(0)
    without = replace(plan, profile=replace(profile, sharing=None))
    assert evaluate(plan, Network())[0].seconds < evaluate(without, Network())[0].seconds
