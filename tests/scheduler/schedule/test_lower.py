"""All schedules on random plans: their tasks, memory and speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost, trainable_before
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS, Op, Program
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program, iteration_time, lower, one_f_one_b_limits
from raymm.scheduler.schedule.memory import GIB, activation_peaks, check_memory, rank_memory
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.random_plans import profiled_plans, steps


@st.composite
def layers(draw: st.DrawFn) -> LayerCost:
    """Draw whole numbers; every layer takes time and memory."""
    small = st.integers(0, 9)
    return LayerCost(
        1 + draw(small), draw(small), draw(small), 1 + draw(small) * 10, draw(small),
        1 + draw(small),
    )


@st.composite
def any_plans(draw: st.DrawFn) -> Plan:
    """Draw plans of any schedule."""
    return replace(draw(profiled_plans(layers())), schedule=draw(st.sampled_from(SCHEDULES)))


def ops_of(program: Program) -> dict[tuple[str, int], Counter[Op]]:
    found: dict[tuple[str, int], Counter[Op]] = {}
    for rank in program:
        for i in rank:
            if i.op in COMPUTE:
                found.setdefault((i.stage, i.microbatch), Counter())[i.op] += 1
    return found


@given(steps(any_plans()))
def test_every_schedule_runs_the_tasks_of_1f1b(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    program = lower(plan, present)
    check_program(program)
    reference = ops_of(lower(replace(plan, schedule="1f1b"), present))
    found = ops_of(program)
    assert found.keys() == reference.keys()
    for key, ops in found.items():
        stage = plan.by_id[key[0]]
        assert plan.runs(stage, key[1])
        assert sum(ops[op] for op in FORWARDS) == 1
        wanted = reference[key]
        assert bool(ops[Op.FORWARD_NO_GRAD]) == bool(wanted[Op.FORWARD_NO_GRAD])
        # Both halves of a backward, or one full one.
        halves = ops[Op.BACKWARD_INPUT], ops[Op.BACKWARD_WEIGHT]
        assert (halves == (0, 0) and ops[Op.BACKWARD] == wanted[Op.BACKWARD]) or (
            halves == (1, 1) and not ops[Op.BACKWARD] and wanted[Op.BACKWARD]
        )
        assert ops[Op.RECOMPUTE] == ops[Op.FORWARD_CHECKPOINTED]
        if not stage.recompute:
            assert not ops[Op.RECOMPUTE]


@given(any_plans())
def test_time_memory_and_bounds(plan: Plan) -> None:
    costs, sizes = op_seconds(plan), stage_costs(plan)
    one = replace(plan, schedule="1f1b")
    baseline = full_program(one)
    program = full_program(plan)
    seconds = simulate(program, costs, posted=plan.posted_receives).makespan
    # The list scheduler gives a task without cost a moment.
    assert iteration_time(plan) == pytest.approx(seconds, abs=1e-5)
    assert lower_bound(plan) <= seconds + 1e-6
    if plan.schedule == "zero_bubble":
        limits = one_f_one_b_limits(one, baseline, sizes)
        peaks = activation_peaks(program, sizes)
        assert all(a <= b for a, b in zip(peaks, limits, strict=True))
        # No device needs more than the fullest one under 1F1B.
        assert max(peaks) <= max(activation_peaks(baseline, sizes))
        assert max(n.total for n in rank_memory(plan, program)) <= max(
            n.total for n in rank_memory(one, baseline)
        )
        assert seconds <= simulate(baseline, costs).makespan + 1e-5
        assert lower_bound(plan, None, dict(enumerate(limits))) <= seconds + 1e-6


@given(st.data())
def test_limits_and_delays(data: st.DataObject) -> None:
    """Check that within any limit for one microbatch the schedule ends and keeps the limit."""
    plan = replace(data.draw(any_plans()), schedule="zero_bubble", num_microbatches=5)
    stages = tuple(replace(s, rank=i) for i, s in enumerate(plan.stages) if not s.replica)
    plan = replace(plan, stages=stages, shared_ranks=None)
    sizes = stage_costs(plan)
    least = [0] * plan.num_ranks
    for stage in plan.stages:
        size = sizes[stage.id]
        least[stage.rank] += size.activation_bytes + size.input_bytes
    limits = tuple(n + data.draw(st.integers(0, 200)) for n in least)
    delays = {
        edge: data.draw(st.integers(0, 5))
        for src, dst in plan.stage_edges for edge in ((src, dst), (dst, src))
        if plan.by_id[src].rank != plan.by_id[dst].rank
    }
    program = full_program(replace(plan, activation_limits=limits), delays=delays)
    check_program(program)
    peaks = activation_peaks(program, sizes)
    assert all(a <= b for a, b in zip(peaks, limits, strict=True))


def chain(ranks: int, microbatches: int, schedule: str, trainable: bool = True,
          recompute: bool = False) -> Plan:
    """Return an LLM of equal stages (F = B_d = B_w = 1 s) behind a free projector."""
    graph = ModuleGraph(
        (ModuleNode("projector", (True,)), ModuleNode("llm", (trainable,) * ranks)),
        (("projector", "llm"),),
    )
    profile = CostProfile({
        "projector": (LayerCost(0, 0, 0, 0, 0, 1),),
        "llm": (LayerCost(1, 1, 1, 50, 0, 1),) * ranks,
    })
    stages = (
        Stage("projector", 0, (0, 1), 0),
        *(Stage("llm", i, (i, i + 1), i, recompute=recompute) for i in range(ranks)),
    )
    return Plan(graph, stages, microbatches, schedule, profile)


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("microbatches", [6, 12])
def test_closed_forms(ranks: int, microbatches: int) -> None:
    """Compare with closed forms.

    1F1B: (M+P-1)(f+b). The hand-made zero-bubble schedule of the same memory (ZB-H1, Qi et al.)
    idles (P-1)(F+B_d-B_w), here a third of 1F1B's; list scheduling reaches that, or misses it by
    one task.
    """
    total = iteration_time(chain(ranks, microbatches, "1f1b"))
    assert total == pytest.approx((microbatches + ranks - 1) * 3, abs=1e-5)
    better = iteration_time(chain(ranks, microbatches, "zero_bubble"))
    assert microbatches * 3 + ranks - 1 - 1e-5 <= better <= microbatches * 3 + ranks + 1e-5


def test_recomputation_hides_behind_the_wait_for_gradients() -> None:
    """Freeze the LLM, which has no B_w: early recomputation removes F from the way back."""
    plain = iteration_time(chain(4, 12, "1f1b", trainable=False, recompute=True))
    early = iteration_time(chain(4, 12, "zero_bubble", trainable=False, recompute=True))
    assert plain == pytest.approx(12 * 3 + 3 * 3, abs=1e-5)
    assert early == pytest.approx(12 * 3 + 3 * 2, abs=1e-5)


def test_a_full_program_has_every_modality_in_every_microbatch() -> None:
    plan = chain(3, 8, "gpipe")
    assert [node.name for node in plan.graph.nodes] == ["projector", "llm"]
    assert full_program(plan) == lower(plan, [["projector", "llm"]] * 8)
    assert full_program(plan) != lower(plan, [["projector", "llm"]] * 7 + [["llm"]])


def test_gpipe_holds_everything() -> None:
    plan = chain(3, 8, "gpipe")
    report = check_program(full_program(plan))
    assert {report.live_activations[StageId("llm", i)] for i in range(3)} == {8}


def test_frozen_rules_across_modules() -> None:
    graph = ModuleGraph(
        (ModuleNode("vision", (False, True, False)), ModuleNode("audio", (False,)),
         ModuleNode("llm", (False, True))),
        (("vision", "llm"), ("audio", "llm")),
    )
    assert trainable_before(graph) == {
        # The first trainable layer's own input needs no gradient.
        "vision": (False, False, True), "audio": (False,), "llm": (True, True),
    }
    assert trainable_before(graph, ["audio", "llm"])["llm"] == (False, False)


def test_too_small_a_limit_is_refused() -> None:
    plan = replace(chain(2, 4, "zero_bubble"), activation_limits=(49, 49))
    with pytest.raises(ValueError, match="activation limits .* a rank needs room for one"):
        full_program(plan)


def test_memory_over_the_limit_is_refused() -> None:
    plan = chain(2, 4, "1f1b")
    program = full_program(plan)
    need = rank_memory(plan, program)
    # Two microbatches of 50, outputs of both stages (1 each); four gradients are posted, four sent.
    assert [(n.activations, n.messages) for n in need] == [(105, 4), (50, 8)]
    check_memory(replace(plan, memory_limit=109), program)
    with pytest.raises(PlanError, match=r"rank 0 \(projector.0, llm.0\) needs .* memory_limit is"):
        check_memory(replace(plan, memory_limit=108), program)
    assert GIB == 1024**3


def test_full_backwards_on_a_single_rank() -> None:
    """Use one full backward if no rank waits for its halves, even when backwards are split."""
    plan = chain(1, 3, "zero_bubble")
    ops = {i.op for rank in full_program(plan) for i in rank} & BACKWARDS
    assert ops <= {Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
    assert Op.BACKWARD in {
        i.op for rank in full_program(plan) for i in rank if i.stage == StageId("projector", 0)
    }
