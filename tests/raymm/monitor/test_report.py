"""The report of a run: its prediction, pictures and trace."""

import json
from dataclasses import replace

import pytest

from raymm.monitor.report import COST_STEPS, RunReport
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate


def rows(*steps):
    return [{"step": step, "loss": step / 3} for step in steps]


@pytest.fixture
def plan():
    graph = ModuleGraph(
        (ModuleNode("vision", (True, True)), ModuleNode("llm", (True, True))), (("vision", "llm"),)
    )
    stages = (
        Stage("vision", 0, (0, 2), 0), Stage("llm", 0, (0, 1), 1), Stage("llm", 1, (1, 2), 2),
    )
    return Plan(graph, stages, 2)


def measured(plan, factor):
    """Return the modalities of two microbatches, and a timeline of a step with them in which every
    operation takes ``factor`` times its stage's ms.
    """
    present = [["vision"], ["vision"]]
    costs = {
        (stage.id, op): factor * (number + 1) / 1000
        for number, stage in enumerate(plan.stages) for op in (Op.FORWARD, Op.BACKWARD)
    }
    return present, simulate(lower(plan, present), costs)


def scheduled(plan):
    """Return a function that lowers a step of a plan with a schedule."""
    return lambda present, schedule: lower(replace(plan, schedule=schedule), present)


def test_the_prediction_uses_earlier_steps_only(plan, tmp_path):
    """Run three steps of factors 1, 1, 3: the last is shown, and predicted from the first two."""
    report = RunReport(tmp_path, plan, scheduled(plan))
    for step, factor in enumerate((1, 1, 3), start=1):
        report.add(step, *measured(plan, factor), "1f1b")
    files = report.write(rows(1, 2, 3))
    assert all(file.is_file() for file in files.values() if file.name != "metrics.jsonl")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    busy = dict.fromkeys(names.values(), 0.0)
    for event in events:
        if event["ph"] == "X" and event["cat"].startswith(("forward", "backward")):
            busy[names[event["pid"]]] += event["dur"]
    assert busy["measured"] == pytest.approx(3 * busy["predicted"])
    # 2 microbatches, forward and backward, 1 + 2 + 3 ms, in microseconds
    assert busy["predicted"] == pytest.approx(2 * 2 * 6 * 1000)


def test_the_report_keeps_the_last_steps(plan, tmp_path):
    """Check that only recent steps count: the last ones took twice as long."""
    report = RunReport(tmp_path, plan, scheduled(plan))
    for step in range(1, 3 * COST_STEPS):
        report.add(step, *measured(plan, 1 if step < 2 * COST_STEPS - 1 else 2), "1f1b")
    costs = report._predicting_costs()
    assert costs[StageId("llm", 1), Op.FORWARD] == pytest.approx(2 * 3 / 1000)


def test_programs_are_lowered_when_the_report_is_written(plan, tmp_path):
    lowered = []

    def program(present, schedule):
        lowered.append((present, schedule))
        return scheduled(plan)(present, schedule)

    report = RunReport(tmp_path, plan, program)
    for step, schedule in enumerate(("1f1b", "gpipe"), start=1):
        report.add(step, *measured(plan, 1), schedule)
    assert lowered == []
    report.write(rows(1, 2))
    present = [["vision"], ["vision"]]
    assert sorted(lowered) == [(present, "1f1b"), (present, "gpipe")]


def test_a_report_without_steps_has_no_loss_curve(plan, tmp_path):
    report = RunReport(tmp_path, plan, scheduled(plan))
    files = report.write([{"step": 0, "heldout_loss": 2.0}])
    assert "loss curve" not in files and "schedule" not in files
    assert Plan.from_json(files["plan"].read_text()) == plan
