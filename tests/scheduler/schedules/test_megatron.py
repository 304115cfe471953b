"""Megatron: one pipeline of ranks, which runs the encoders of a rank in sequence."""

from __future__ import annotations

from dataclasses import replace

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedules.megatron import Megatron
from tests.scheduler.schedules.test_one_f_one_b import compute, textbook
from tests.support.field_schedules import replicated_plan, stepped
from tests.support.random_plans import chain


def test_megatron_order_does_not_depend_on_durations() -> None:
    plans = [replicated_plan(8, "megatron", seconds) for seconds in (0.5, 8.0)]
    first, second = map(full_program, plans)
    assert first == second


def test_megatron_on_a_chain_is_textbook_1f1b() -> None:
    program = full_program(replace(chain(4, 9), schedule="megatron"))
    assert [compute(rank) for rank in program] == [textbook(rank, 4, 9) for rank in range(4)]


def test_stages_warm_up_by_the_distance_of_their_rank_to_the_loss() -> None:
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * 3)), (("vision", "llm"),)
    )
    llm = tuple(Stage("llm", i, (i, i + 1), i) for i in range(3))
    plan = Plan(graph, (Stage("vision", 0, (0, 1), 0), *llm), 8, "megatron")
    ahead = Megatron().task_order(stepped(plan)).ahead
    assert ahead == {stage.id: 3 - stage.rank for stage in plan.stages}
