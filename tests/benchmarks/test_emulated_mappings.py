"""Emulated GPUs take the time of the mapping's model, and run its stages in order."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.mappings import megatron, spindle
from benchmarks.devices.emulated_gpu import Slice, SurfaceSeconds
from benchmarks.devices.emulation import ENTRY, emulate
from benchmarks.shared.mapping_instances import random_problem
from benchmarks.shared.multiplexed_models import SHAPES
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.mapping import module_seconds
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.program.program import Op


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 30), st.sampled_from(["star", "parallel"]))
def test_the_slowest_gpu_takes_the_predicted_time(seed, kind):
    problem = random_problem(seed, kind, 7, 4)
    seconds = SurfaceSeconds(problem, {name: Slice(name) for name in problem.names}, 0.25)
    for stage in solve(problem, "greedy").stages:
        quota = {p.module: p.quota / problem.steps for p in stage.placements}
        for one, due in zip(
            stage.placements, module_seconds(problem, stage.placements), strict=True
        ):
            found = []
            for gpu in one.gpus:
                beside = {p.module: quota[p.module] for p in stage.placements
                          if gpu in p.gpus and p is not one}  # fmt: skip
                found.append(seconds(one.module, len(one.gpus), quota[one.module], beside))
            assert max(found) == pytest.approx(due / 4)


@pytest.mark.parametrize("name", list(SHAPES))
def test_slices_are_nodes_that_take_their_share(name):
    problem = SHAPES[name].problem()
    mapping = spindle(problem)
    made = emulate(problem, mapping, SHAPES[name].contrastive)
    assert all(stage.quota for stage in made.plan.stages)
    seconds, slices = SurfaceSeconds(problem, made.backend.slices, 1.0), made.backend.slices
    for module in problem.names:
        assert sum(s.share for s in slices.values() if s.module == module) == pytest.approx(1)
    for before, after in zip(mapping.stages, made.mapping.stages, strict=True):
        found = [seconds(p.module, len(p.gpus), 1.0, {}) for p in after.placements]
        assert max(found) == pytest.approx(before.seconds)
    assert seconds("another", 1, 1.0, {}) == 0.0


@pytest.mark.parametrize("make", [solve, megatron])  # on quotas, and on whole GPUs
def test_an_emulated_model_runs_its_mapping(ray_cluster, make):
    problem = SHAPES["clip"].problem()
    quick = type(problem)(
        tuple(
            type(s)(s.name, s.degrees, s.quotas, s.steps,
                    tuple(tuple(x / 20 for x in row) for row in s.seconds), s.memory_bytes,
                    s.bandwidth)
            for s in problem.surfaces
        ),
        problem.edges, problem.gpus, interference=Interference(),
    )
    mapping = make(quick)
    made = emulate(quick, mapping, ("align",))
    assert made.mapping == replace(mapping, bound=0.0)
    assert pickle.loads(pickle.dumps(made.backend))().gpu.total == quick.steps
    with ParallelModel(made.dag, made.plan, quota_backend=made.backend) as running:
        batch = {ENTRY: torch.ones(4, 2)}
        output = running.train_step(batch)
        # Both towers return x + weight; align adds them and its own weight.
        assert output.loss == pytest.approx(2.0)
        assert running.evaluate(batch).loss < 2.0
    placed = {p.module: p for stage in mapping.stages for p in stage.placements}
    spans = {(s.stage.module, s.rank, s.op): s for s in output.timeline.compute()}
    assert set(spans) == {
        (name, gpu, op) for name, p in placed.items() for gpu in p.gpus
        for op in (Op.FORWARD, Op.BACKWARD)
    }
    # A sleep never ends early, and stages do not overlap.
    for (name, _, op), span in spans.items():
        share = 1 / 3 if op == Op.FORWARD else 2 / 3
        alone = quick.seconds[quick.names.index(name), len(placed[name].gpus).bit_length() - 1,
                              placed[name].quota]  # fmt: skip
        assert span.end - span.start >= alone * share - 1e-4
    end = max(s.end for (n, _, op), s in spans.items() if n != "align" and op == Op.FORWARD)
    assert end <= min(s.start for (n, *_), s in spans.items() if n == "align")
