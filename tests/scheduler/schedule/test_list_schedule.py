"""The list scheduler on plain arrays, in Python and in machine code, equals the readable one.

The same tasks in the same order, and bitwise the same seconds; its replay equals the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.graph.sample_ranges import Range, union
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.schedule.compiled import machine_code
from raymm.scheduler.schedule.list_schedule import ListScheduler
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.planned_step import to_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from raymm.scheduler.schedules.policy import Rules, policies
from tests.support.random_plans import contents, profiled_plans
from tests.support.reference_list_schedule import ListScheduler as Reference

NETWORK = Network(Link(0.125, 8.0), Link(0.5, 2.0), 3)


@st.composite
def rules(draw: st.DrawFn, plan: Plan) -> Rules:
    """Draw 1F1B, GPipe, or a policy within random limits."""
    kind = draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble"]))
    if kind != "zero_bubble":
        return Rules(flush=kind == "gpipe")
    tried = [*policies(False), *policies(True), *policies(False, recompute=True)]
    policy = draw(st.sampled_from(tried))
    if draw(st.booleans()):
        policy = replace(policy, ahead=tuple(
            tuple(draw(st.integers(1, 8)) for _ in plan.module_stages(node.name))
            for node in plan.graph.nodes
        ))
    limits = tuple(draw(st.integers(0, 300)) for _ in range(plan.num_ranks))
    return Rules(policy, split=True, early_recompute=True, byte_limits=limits)


@st.composite
def with_quotas(draw: st.DrawFn) -> Plan:
    """Draw plans in which some ranks have quotas for their modules."""
    plan = draw(profiled_plans())
    shares = {}
    for rank in range(plan.num_ranks):
        modules = sorted({stage.module for stage in plan.rank_stages(rank)})
        if len(modules) > 1 and draw(st.booleans()):
            shares |= {(rank, module): 1 / len(modules) for module in modules}
    stages = [replace(s, quota=shares.get((s.rank, s.module))) for s in plan.stages]
    return replace(plan, stages=tuple(stages))


@st.composite
def samples_of(draw: st.DrawFn, modules: set[str]) -> Samples:
    """Draw the samples of a microbatch; some have no input for a module."""
    size = draw(st.integers(1, 4))
    filled = []
    for module in sorted(modules):
        numbers = draw(st.sets(st.integers(0, size - 1), min_size=1))
        if len(numbers) < size:
            filled.append((module, union(Range(n, n + 1) for n in sorted(numbers))))
    return Samples(size, tuple(filled))


def plain(tasks):
    """Return tasks with group numbers in the order of the rank."""
    ranks = []
    for rank in tasks:
        numbers: dict[int, int] = {-1: -1}
        ranks.append([t._replace(group=numbers.setdefault(t.group, len(numbers))) for t in rank])
    return ranks


@pytest.fixture(scope="module", autouse=True, params=[math.inf, 0.0])
def patience(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run everything in Python, and everything in machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code, "PATIENCE_S", request.param)
        yield


@given(profiled_plans())
def test_arrays_of_all_steps_have_one_memory_layout(plan: Plan) -> None:
    """Check this because machine code is compiled per memory layout."""
    step = active_stages(plan, full_step(plan))
    for part in ListScheduler(plan, step, op_seconds(plan)).parts:
        for name, array in part.arrays._asdict().items():
            assert array.flags.c_contiguous, name


@given(st.data())
def test_machine_code_equals_python(data) -> None:
    plan = data.draw(with_quotas())
    split = data.draw(st.sets(st.sampled_from([node.name for node in plan.graph.nodes])))
    plan = replace(plan, stages=tuple(
        replace(s, split="samples") if s.module in split else s for s in plan.stages
    ))
    present = data.draw(contents(plan))
    samples = [data.draw(samples_of(modules)) for modules in present]
    active = active_stages(plan, present, samples=samples if plan.splits_samples else ())
    delays = NETWORK.delays(plan) if data.draw(st.booleans()) else {}
    chosen = data.draw(rules(plan))
    step = plan, active, op_seconds(plan), stage_costs(plan), delays
    scheduler = ListScheduler(*step)
    try:
        expected = Reference(*step).run(chosen)
    except NoPlanError as error:
        try:
            scheduler.run(chosen)
        except NoPlanError as own:
            assert str(own).split(" leave ")[0] == str(error).split(" leave ")[0]
            return
        raise AssertionError("there was room") from None
    schedule = scheduler.run(chosen)
    assert schedule.makespan == expected.makespan
    assert plain(schedule.tasks) == plain(expected.tasks)

    program = to_program(plan, active, schedule.tasks, schedule.early)
    transfers = NETWORK.transfers(plan)
    posted = plan.posted_receives
    timeline = simulate(program, op_seconds(plan), transfers=transfers, posted=posted)
    assert scheduler.replayed(schedule, transfers, op_seconds(plan)) == timeline.makespan
    assert scheduler.activation_peaks(schedule) == activation_peaks(program, stage_costs(plan))
