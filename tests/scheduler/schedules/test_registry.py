"""Custom schedules: names, orders that are refused, and the example of ``docs/extending.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.config.planning_options import PlanOptions, named_schedule
from raymm.errors import ConfigError, PlanError
from raymm.layout.plan_check import check_fits
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import full_program, iteration_time, lower
from raymm.scheduler.schedule.memory import rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedules.base import Schedule, Task
from raymm.scheduler.schedules.gpipe import GPipe
from raymm.scheduler.schedules.registry import find_schedule, register
from raymm.scheduler.search.evaluation import evaluate, step_timeline
from tests.docs.page_schedule import limited_forwards
from tests.scheduler.schedule.test_bounds import chain
from tests.support.random_plans import contents, profiled_plans


class AnyOrder(Schedule):
    """Order that a function returns."""

    def __init__(self, order: Callable[[Any, int], Sequence[Any]]) -> None:
        self._order = order

    def order(self, step: Any, rank: int) -> Sequence[Task]:
        return self._order(step, rank)


def scheduled(order: Callable[[Any, int], Sequence[Any]], name: str) -> Plan:
    """Return a plan of two ranks and two microbatches with an order."""
    return replace(chain(2, 2), schedule=register(AnyOrder(order), name))


def forwards_then_backwards(step: Any, rank: int) -> list[Task]:
    (stage,) = step.stages(rank)
    return [
        task for tasks in (step.forwards, step.backwards)
        for microbatch in range(step.num_microbatches) for task in tasks(stage, microbatch)
    ]


def one_at_a_time(step: Any, rank: int) -> list[Task]:
    (stage,) = step.stages(rank)
    return [
        task for microbatch in range(step.num_microbatches)
        for tasks in (step.forwards, step.backwards) for task in tasks(stage, microbatch)
    ]


def waiting(step: Any, rank: int) -> list[Task]:
    return (forwards_then_backwards if rank else one_at_a_time)(step, rank)


def raising(step: Any, rank: int) -> list[Task]:
    raise KeyError("gpu")


REFUSED = {
    "deadlock": (waiting, "cannot run: deadlock: rank 0 waits forever in recv"),
    "backward first": (
        lambda step, rank: forwards_then_backwards(step, rank)[::-1], "before its forward",
    ),
    "missing task": (
        lambda step, rank: forwards_then_backwards(step, rank)[:-1],
        "runs backward of llm.0 on microbatch 1 0 times on rank 0",
    ),
    "task twice": (
        lambda step, rank: one_at_a_time(step, rank) + one_at_a_time(step, rank)[:1],
        "runs forward of llm.0 on microbatch 0 2 times on rank 0",
    ),
    "no task": (lambda step, rank: [*one_at_a_time(step, rank), "x"], "runs 'x' 1 times"),
    "exception": (raising, "raised KeyError for rank 0: 'gpu'"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_an_order_that_cannot_run_is_refused(wrong: str) -> None:
    order, message = REFUSED[wrong]
    name = f"refused:{wrong}"
    for check in (check_fits, full_program, iteration_time):
        with pytest.raises(PlanError, match="schedule 'refused:") as caught:
            check(scheduled(order, name))
        assert message in str(caught.value) and name in str(caught.value)


def test_gpipe_written_by_hand_equals_gpipe() -> None:
    plan = chain(3, 4)
    by_hand = replace(plan, schedule=register(AnyOrder(forwards_then_backwards), "by:hand"))
    gpipe = replace(plan, schedule=GPipe.name)
    assert full_program(by_hand) == full_program(gpipe)
    assert iteration_time(by_hand) == iteration_time(gpipe)
    network = Network()
    ours, theirs = evaluate(by_hand, network)[0], evaluate(gpipe, network)[0]
    assert (ours.seconds, ours.memory) == (theirs.seconds, theirs.memory)


@given(st.data(), st.integers(1, 4))
def test_the_example_runs_every_plan(data: st.DataObject, limit: int) -> None:
    schedule = register(limited_forwards()(limit), f"limited:{limit}")
    plan = replace(data.draw(profiled_plans()), schedule=schedule)
    program = lower(plan, data.draw(contents(plan)))
    report = check_program(program)
    assert max(report.live_activations.values(), default=0) <= limit
    option, _ = evaluate(plan, Network())
    assert option.seconds == step_timeline(plan, Network()).makespan
    assert Plan.from_json(plan.to_json()) == plan


def test_the_limit_of_the_example_fits_in_less_memory() -> None:
    made = limited_forwards()
    names = [register(made(limit), f"limited:{limit}") for limit in (2, 4)]
    plan = chain(2, 4, activation_bytes=1000)
    tight, wide = (replace(plan, schedule=name) for name in names)
    needed = max(need.total for need in rank_memory(tight, full_program(tight)))
    check_fits(replace(tight, memory_limit=needed))
    with pytest.raises(PlanError, match="memory_limit"):
        check_fits(replace(wide, memory_limit=needed))


def test_an_object_and_a_path_name_a_schedule(monkeypatch, tmp_path) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "from tests.scheduler.schedules.test_registry import AnyOrder, one_at_a_time\n"
        "class Serial(AnyOrder):\n"
        "    def __init__(self):\n"
        "        super().__init__(one_at_a_time)\n"
        "PIPE = AnyOrder(one_at_a_time)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_schedules", raising=False)
    for name in ("my_schedules:Serial", "my_schedules:PIPE"):
        assert named_schedule("parallel.schedule", name) == name
        assert PlanOptions(schedules=(name,)).schedules == (name,)
        full_program(replace(chain(2, 2), schedule=name))
    with pytest.raises(ConfigError, match=r"parallel.schedule: .*my_schedules:None_"):
        named_schedule("parallel.schedule", "my_schedules:None_")
    import my_schedules

    for schedule in (my_schedules.Serial, my_schedules.Serial()):
        assert MultimodalParallelSpec(schedule=schedule).schedule == "my_schedules:Serial"
        assert replace(chain(2, 2), schedule=schedule).schedule == "my_schedules:Serial"
        assert PlanOptions(schedules=[schedule]).schedules == ("my_schedules:Serial",)


def test_names_are_not_taken_twice() -> None:
    first = AnyOrder(waiting)
    assert register(first, "twice:used") == register(AnyOrder(waiting), "twice:used")
    with pytest.raises(PlanError, match="the name 'twice:used' of another schedule"):
        register(AnyOrder(one_at_a_time), "twice:used")
    with pytest.raises(PlanError, match="the name 'gpipe' of another schedule"):
        register(first, "gpipe")
    assert isinstance(find_schedule("gpipe"), GPipe)


@pytest.mark.parametrize("wrong", [Schedule, AnyOrder, int, 7, None, "2f2b", "no_module:Class"])
def test_what_is_no_schedule_is_refused(wrong: Any) -> None:
    with pytest.raises(PlanError, match="schedule"):
        replace(chain(2, 2), schedule=wrong)
    with pytest.raises(PlanError, match="schedule"):
        MultimodalParallelSpec(schedule=wrong)


def test_slots_are_no_schedule_of_pipelines() -> None:
    with pytest.raises(PlanError, match="schedule is 'slots'; accepted: 1f1b, zero_bubble, gpipe"):
        MultimodalParallelSpec(schedule="slots")
    with pytest.raises(PlanError, match="schedules has 'slots'; accepted: 1f1b"):
        PlanOptions(schedules=("slots",))
