"""Timelines: their sums, their JSON, and the trace for viewers."""

from __future__ import annotations

import json

import pytest

from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Span, Timeline, chrome_trace
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from tests.support.random_plans import chain, uniform

TIMELINE = Timeline((
    Span(0, "forward", StageId("a", 0), 0, 1.0, 2.0),
    Span(0, "send", StageId("a", 0), 0, 2.0, 2.5, StageId("b", 0)),
    Span(0, "backward", StageId("a", 0), 0, 4.0, 6.0),
    Span(0, "step", NO_STAGE, -1, 6.0, 11.0),
    Span(1, "recv", StageId("b", 0), 0, 1.0, 2.0, StageId("a", 0)),
    Span(1, "forward_no_grad", StageId("b", 0), 0, 2.0, 2.5),
    Span(1, "forward_no_grad", StageId("b", 0), 1, 2.5, 3.5),
    Span(1, "forward_no_grad", StageId("b", 0), 2, 3.5, 9.5),
), 3)


def test_sums() -> None:
    assert TIMELINE.makespan == 10.0
    assert [TIMELINE.busy(rank) for rank in range(3)] == [3.0, 7.5, 0.0]
    assert [TIMELINE.bubble(rank) for rank in range(3)] == pytest.approx([0.7, 0.25, 1.0])
    assert TIMELINE.stage_busy() == {StageId("a", 0): 3.0, StageId("b", 0): 7.5}
    assert [s.op for s in TIMELINE.compute()] == [
        "forward", "backward", "forward_no_grad", "forward_no_grad", "forward_no_grad",
    ]


def test_costs_are_medians_that_the_simulator_takes() -> None:
    costs = TIMELINE.costs()
    assert costs == {
        (StageId("a", 0), Op.FORWARD): 1.0,
        (StageId("a", 0), Op.BACKWARD): 2.0,
        (StageId("b", 0), Op.FORWARD_NO_GRAD): 1.0,
    }
    assert all(isinstance(op, Op) for _, op in costs)
    plan = chain(3, 5)
    program = lower(plan, [()] * 5)
    run = simulate(program, uniform(plan, 2, 3))
    again = Timeline.from_json(run.to_json())
    assert simulate(program, again.costs()) == run


def test_empty() -> None:
    empty = Timeline((), 2)
    assert empty.makespan == 0.0 and empty.bubble(1) == 0.0 and empty.costs() == {}
    assert Timeline.from_json(empty.to_json()) == empty


def test_json_round_trip() -> None:
    again = Timeline.from_json(TIMELINE.to_json())
    assert again == TIMELINE and isinstance(again.spans[0], Span)


def test_chrome_trace() -> None:
    other = Timeline((Span(0, Op.FORWARD, StageId("a", 0), 7, 0.5, 0.75),), 1)
    trace = json.loads(json.dumps(chrome_trace(
        [("measured", TIMELINE), ("predicted", other)], rank_names={1: "llm on node7"}
    )))
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"]
             for e in events if e["ph"] == "M"}
    assert named == {
        ("process_name", 0, None): "measured", ("process_name", 1, None): "predicted",
        ("thread_name", 0, 0): "rank 0", ("thread_name", 0, 1): "llm on node7",
        ("thread_name", 0, 2): "rank 2", ("thread_name", 1, 0): "rank 0",
    }
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(TIMELINE.spans) + 1 and len(events) == len(spans) + len(named)
    assert spans[0] == {
        "ph": "X", "name": "forward a.0 #0", "cat": "forward", "pid": 0, "tid": 0,
        "ts": 1e6, "dur": 1e6, "args": {"stage": "a.0", "microbatch": 0, "peer": ""},
    }
    assert spans[3]["name"] == "step"
    assert spans[4]["args"]["peer"] == "a.0"
    assert spans[-1]["pid"] == 1 and spans[-1]["ts"] == 5e5 and spans[-1]["dur"] == 2.5e5
    assert spans[-1]["name"] == "forward a.0 #7"
