"""Runs whose plan was made for other costs, and plans from measured costs."""

import pytest
import torch

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.costs.profile_files import load_table
from raymm.data import describe
from raymm.model.multimodal import module_graph
from raymm.monitor.drift_observer import EXCESS, FILE, STEPS, DriftObserver
from raymm.monitor.observed_run import WARM_UP_STEPS
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds


@pytest.fixture
def config(make_config):
    """Return a configuration without layouts, so that raymm plans."""
    return make_config({"parallel": None})


@pytest.fixture
def observed(config, tmp_path):
    """Return (plan, watch, lines) of the tiny model, its encoder on one rank, the rest on two."""
    graph = module_graph(build_model(load_config(config)))
    layers = {node.name: node.num_layers for node in graph.nodes}
    profile = CostProfile(
        {name: (LayerCost(0.1, 0.1, 0.1),) * count for name, count in layers.items()},
        device="cpu", tokens={"vision": 8, "llm": 24},
    )
    cut = layers["llm"] // 2
    plan = Plan(graph, (
        Stage("vision", 0, (0, layers["vision"]), 0), Stage("llm", 0, (0, cut), 1),
        Stage("llm", 1, (cut, layers["llm"]), 2),
    ), 2, profile=profile)  # fmt: skip
    lines = []
    return plan, DriftObserver(plan, tmp_path, lines.append), lines


def steps(plan, slower):
    """Return a step whose last stage is ``slower`` times as slow as planned, and its metadata."""
    costs = {
        key: s * (slower if key[0] == StageId("llm", 1) else 1)
        for key, s in op_seconds(plan).items()
    }
    rows = torch.ones(2, 5, dtype=torch.int64)
    vision = {"pixel_values": torch.zeros(3, 1), "sample_index": torch.tensor([0, 0, 1])}
    microbatch = {"input_ids": rows, "attention_mask": rows, "labels": rows, "vision": vision}
    return [describe(microbatch, ["a", "b"])] * 2, simulate(full_program(plan), costs)


def test_a_drifting_plan_is_reported_once_and_replanned(observed, config, raymm, tmp_path):
    plan, observer, lines = observed
    rows = [observer.after_step(n, *steps(plan, 5.0)) for n in range(1, 60)]
    assert rows[:WARM_UP_STEPS] == [{}] * WARM_UP_STEPS
    found = rows[-1]["plan_drift"]
    assert found["rank"] == 2 and found["measured"] > (1 + EXCESS) * found["expected"]
    (line,) = lines
    assert line.startswith(f"step {WARM_UP_STEPS + STEPS:>5}  plan drift: rank 2 does")
    assert f"--profile {tmp_path / FILE}" in line and "its longest stage is llm.1" in line

    table = load_table(tmp_path / FILE)
    assert [row.samples for row in table.modules["vision"]] == [3]
    layers = table.at().modules["llm"]
    assert layers[-1].forward == pytest.approx(5 * layers[0].forward)
    code, text = raymm("plan", config, "--ranks", "3", "--profile", str(tmp_path / FILE),
                       "--out", str(tmp_path / "planned"), "--degrees", "none")  # fmt: skip
    assert code == 0, text
    assert (tmp_path / "planned" / "plan.json").is_file()


def test_a_plan_that_holds_is_not_reported(observed, tmp_path):
    plan, observer, lines = observed
    for number in range(1, 60):  # a few consecutive slow steps now and then, as on real machines
        row = observer.after_step(number, *steps(plan, 5.0 if number % 30 < 3 else 1.0))
    assert lines == [] and not (tmp_path / FILE).exists()
    assert row["plan_drift"]["measured"] < 0.7


def test_nothing_is_reported_without_predicted_costs(observed, tmp_path):
    plan, _, lines = observed
    for observer in (
        DriftObserver(Plan(plan.graph, plan.stages, 2), tmp_path, lines.append),
    ):
        assert [observer.after_step(n, *steps(plan, 9.0)) for n in range(1, 40)] == [{}] * 39
    assert lines == []
