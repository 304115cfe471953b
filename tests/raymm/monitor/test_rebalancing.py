"""Rebalancing without processes: steps of a plan take times from true costs, which drift."""

import json
from collections import deque
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from raymm.config.sections import load_config
from raymm.data import Decision, RebalanceConfig
from raymm.data.sampling.rebalanced_sampler import RebalancedSampler
from raymm.data.sampling.sampler import flat
from raymm.monitor.metrics import DECISIONS as FILE
from raymm.monitor.observed_run import WARM_UP_STEPS, ObservedRun
from raymm.monitor.rebalancing import DecisionLog, Rebalancing, rebalancing
from raymm.monitor.training_data import TrainingData
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.minibatch.measured_costs import (
    MeasuredCosts,
    ModuleCost,
    efficiency,
    group_units,
)
from raymm.scheduler.minibatch.problem import SampleSizes
from raymm.scheduler.minibatch.step_forecast import StepForecast
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.simulate import simulate

EVERY = 10
AHEAD = 3  # prefetched steps of a loader
COUNT = 1500
EVEN = MeasuredCosts({"vision": ModuleCost(0, 0.01), "text": ModuleCost(0.02, 0.01)})
SLOW = MeasuredCosts(EVEN.modules, {"text": (0.7, 1.3)})


def sizes():
    rng = np.random.default_rng(0)
    values = np.stack([rng.integers(1, 4, COUNT), rng.integers(5, 60, COUNT)], 1)
    return SampleSizes(("vision", "text"), values)


@pytest.fixture
def plan():
    """Return a plan of an encoder and two replicas of a language model."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,))), (("vision", "llm"),)
    )
    return Plan(graph, (
        Stage("vision", 0, (0, 1), 0), Stage("llm", 0, (0, 1), 1),
        Stage("llm", 0, (0, 1), 2, replica=1),
    ), 4)  # fmt: skip


class SimulatedRun:
    """Run from a state on; the true time of a step is a function of its number."""

    def __init__(self, folder, plan, truth, state=None, step=0, gain=0.02):
        self.plan, self.truth, self.step = plan, truth, step
        self.sampler = RebalancedSampler(sizes(), 4, 5)
        self.lines = []
        self.rebalancing = Rebalancing(
            RebalanceConfig(every=EVERY, gain=gain), self.sampler, plan, True, folder, step,
            self.lines.append,
        )
        self._batches = self.sampler.batches(state)
        self._ahead = deque()
        self.taken, self.rows, self.real = [], [], []

    def run(self, steps):
        for _ in range(steps):
            while len(self._ahead) <= AHEAD:
                self._ahead.append(next(self._batches))
            groups, after = self._ahead.popleft()
            self.step += 1
            costs = self.truth(self.step)
            seconds = costs.seconds(("vision", "text"), *group_units(sizes(), groups, True))
            noise = np.random.default_rng(self.step).lognormal(0, 0.02, seconds.shape)
            self.taken.append((groups, after))
            self.real.append(efficiency(seconds[:, 1:].T))
            self.rows.append(self.rebalancing.after_step(
                self.step, after, len(groups), True, self._timeline(seconds * noise)
            ))  # fmt: skip
        return self

    def _timeline(self, seconds):
        costs = {}
        for m, (vision, text) in enumerate(seconds.tolist()):
            for stage, whole in (
                (StageId("vision", 0), vision), (StageId("llm", 0, m % 2), text),
            ):
                costs[stage, Op.FORWARD, m] = whole / 3
                costs[stage, Op.BACKWARD, m] = whole * 2 / 3
        return simulate(full_program(self.plan), {}, microbatch_costs=costs)

    def log(self, folder):
        return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def drifting(step):
    """Slow down the second replica after step 25."""
    return SLOW if step > 25 else EVEN


def test_a_slowing_replica_is_detected_and_gets_less_work(plan, tmp_path):
    run = SimulatedRun(tmp_path, plan, drifting).run(70)
    log = run.log(tmp_path)
    assert [row["step"] for row in log] == [10, 20, 30, 40, 50, 60, 70]
    assert [row["decision"] is None for row in log[:2]] == [True, True]
    first = next(row for row in log if row["decision"] is not None)
    assert first["step"] in (30, 40) and first["decision"]["step"] == first["step"] + AHEAD
    fast, slow = first["decision"]["costs"]["copies"]["text"]
    assert slow > 1.2 * fast
    last = log[-1]
    assert last["gain"] < first["gain"] and last["error"] < 0.05
    before, after = np.mean(run.real[26:30]), np.mean(run.real[-8:])
    assert before < 0.8 and after > 0.93
    shown = [row["costs"] for row in run.rows if row]
    assert not any(run.rows[:WARM_UP_STEPS]) and len(shown) >= 65
    dist = shown[-1]["dist_ratio"]["text"]
    assert dist["predicted"] < 0.1 and dist["measured"] < 0.1
    assert shown[-1]["step_s"]["predicted"] == pytest.approx(
        shown[-1]["step_s"]["measured"], rel=0.1
    )
    assert shown[-1]["error"] < 0.05
    assert len(run.lines) == sum(row["decision"] is not None for row in log)
    assert "rebalanced: from step" in run.lines[0] and "replicas of text take" in run.lines[0]
    samples = [one for groups, _ in run.taken for one in flat(groups)]
    epoch = samples[:COUNT]
    assert len(samples) < COUNT or sorted(epoch) == list(range(COUNT))


@pytest.mark.parametrize(("killed", "checkpoint"), [(44, 20), (44, 42), (31, 0), (58, 39)])
def test_a_resumed_run_repeats_its_decisions(plan, tmp_path, killed, checkpoint):
    """Check that the same samples and decisions are repeated up to the point of the kill."""
    first = SimulatedRun(tmp_path, plan, drifting).run(killed)
    log = first.log(tmp_path)
    state = first.taken[checkpoint - 1][1] if checkpoint else None
    again = SimulatedRun(
        tmp_path, plan, lambda step: EVEN, json.loads(json.dumps(state)), checkpoint
    )
    again.run(killed - checkpoint)
    assert again.taken == first.taken[checkpoint:]
    assert again.log(tmp_path) == log
    # From there on it decides again: the slow replica has recovered.
    again.run(40)
    more = again.log(tmp_path)[len(log) :]
    assert [row["step"] % EVERY for row in more] == [0] * len(more) and len(more) >= 3
    if any(row["decision"] for row in log):
        assert any(row["decision"] for row in more)


def test_small_gains_are_not_worth_a_change(plan, tmp_path):
    run = SimulatedRun(tmp_path, plan, drifting, gain=0.99).run(60)
    assert [row["decision"] for row in run.log(tmp_path)] == [None] * 6
    assert all("costs" not in after["taken"][-1] for _, after in run.taken if after["taken"])
    assert run.lines == []


def test_incomplete_steps_are_not_fitted(plan, tmp_path):
    run = SimulatedRun(tmp_path, plan, drifting)
    after_step = run.rebalancing.after_step
    run.rebalancing.after_step = lambda *a: after_step(*a[:3], False, a[4])
    run.run(12)
    assert not any(run.rows)
    assert run.log(tmp_path) == [
        {"step": 10, "gain": None, "error": None, "sizes": run.sampler.digest, "decision": None}
    ]


def test_the_log_survives_a_torn_line_and_other_data(tmp_path):
    path = tmp_path / FILE
    log = DecisionLog(path, "a")
    assert (log.last_step, log.decisions) == (0, [])
    costs = MeasuredCosts(EVEN.modules).to_dict()
    log.add({"step": 10, "gain": 0.3}, Decision(0, 13, costs))
    log.add({"step": 20, "gain": 0.0}, None)
    with open(path, "a") as file:
        file.write('{"step": 30, "si')
    again = DecisionLog(path, "a")
    assert again.last_step == 20 and again.decisions == [Decision(0, 13, costs)]
    again.add({"step": 30, "gain": 0.1}, None)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert not list(tmp_path.glob("*.tmp"))
    assert DecisionLog(path, "b").rows == [] and path.read_text() == ""


def test_options_that_enable_rebalancing(make_config, plan, tmp_path):
    given = load_config(make_config({
        "data.batching": {"method": "balanced", "rebalance": 7}
    })).data  # fmt: skip
    assert given.batching.rebalance == RebalanceConfig(every=7, gain=0.02)
    sampler = RebalancedSampler(sizes(), 4, 5)

    def of(taken):
        parallel, model = SimpleNamespace(steps_taken=0), SimpleNamespace(packing=True)
        training = TrainingData(sampler=taken)
        return rebalancing(ObservedRun(parallel, model, given, training, tmp_path, print), plan)

    assert isinstance(of(sampler), Rebalancing) and of(None) is None


def test_a_slow_replica_gets_the_lighter_samples(tmp_path):
    """Slow down one of two replicas of a language model that share every microbatch."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,))), (("vision", "llm"),)
    )
    plan = Plan(graph, (
        Stage("vision", 0, (0, 1), 0, split="samples"),
        *(Stage("llm", 0, (0, 1), 1 + k, replica=k, split="samples") for k in range(2)),
    ), 1)  # fmt: skip
    slow = MeasuredCosts(EVEN.modules, SLOW.replicas, frozenset({"text"}))
    sampler = RebalancedSampler(sizes(), 1, 8)
    lines = []
    rebalancing = Rebalancing(
        RebalanceConfig(every=EVERY), sampler, plan, True, tmp_path, 0, lines.append
    )
    forecast = StepForecast(plan, {"vision": "vision", "text": "llm"}, "text")
    longest = []
    for step, (groups, after) in enumerate(islice(sampler.batches(), 60), 1):
        units = group_units(sizes(), groups, True, forecast.columns)
        seconds = slow.column_seconds(forecast.columns, *units)
        longest.append(seconds[0, 1:].max() / seconds[0, 1:].sum())
        costs = {
            (stage.id, op, 0): whole * part
            for stage, whole in zip(plan.stages, seconds[0].tolist(), strict=True)
            for op, part in ((Op.FORWARD, 1 / 3), (Op.BACKWARD, 2 / 3))
        }
        program = lower(plan, [["vision"]], samples=forecast.samples(sizes(), groups))
        timeline = simulate(program, {}, microbatch_costs=costs)
        row = rebalancing.after_step(step, after, 1, True, timeline)
    log = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    decision = next(row["decision"] for row in log if row["decision"])
    assert decision["costs"]["shared"] == ["text"]
    assert decision["costs"]["copies"]["text"] == pytest.approx([0.7, 1.3], abs=0.02)
    assert "replicas of text take" in lines[0]
    assert np.mean(longest[:EVERY]) > 0.6 and np.mean(longest[-8:]) < 0.53
    assert row["costs"]["error"] < 0.01
    assert row["costs"]["step_s"]["predicted"] == pytest.approx(
        row["costs"]["step_s"]["measured"], rel=0.02
    )
