"""The comparison of schedules has consistent numbers, and needs no cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.compare_schedules import MODULES, SCHEDULES, compare, main, model_plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.bounds import lower_bound

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes():
    return {outcome.schedule: outcome for outcome in compare(6)}


def test_zero_bubble_is_faster_within_the_memory_of_1f1b(outcomes) -> None:
    assert tuple(outcomes) == SCHEDULES
    first, last = outcomes["1f1b"], outcomes["zero_bubble"]
    assert last.timeline.makespan < 0.97 * first.timeline.makespan
    assert last.bubble < first.bubble
    assert last.activations <= first.activations < outcomes["gpipe"].activations
    bound = lower_bound(model_plan("1f1b", 6))
    assert all(outcome.timeline.makespan >= bound for outcome in outcomes.values())


def test_every_schedule_runs_all_forwards_and_due_backwards(outcomes) -> None:
    for outcome in outcomes.values():
        spans = outcome.timeline.compute()
        forwards = [s for s in spans if s.op in (
            Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED)]
        assert len(forwards) == 6 * 7 == len({(s.stage, s.microbatch) for s in forwards})
        recomputed = {s.stage for s in spans if s.op == Op.RECOMPUTE}
        assert recomputed == {StageId("llm", 0), StageId("llm", 1), StageId("llm", 2)}
        assert not [s for s in spans if s.stage == StageId("vision", 0) and "backward" in s.op]


def test_gpipe_holds_all_microbatches_on_the_fullest_rank(outcomes) -> None:
    llm = MODULES["llm"]
    per_stage = (llm.cuts[1] - llm.cuts[0]) * llm.activation * 2**20
    assert outcomes["gpipe"].activations == 6 * per_stage


def test_the_comparison_prints_a_table_and_draws(tmp_path, capsys) -> None:
    main(["--microbatches", "2", "--out", str(tmp_path / "a.svg")])
    printed = capsys.readouterr().out
    assert all(schedule in printed for schedule in SCHEDULES) and "GiB" in printed
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_neither_ray_nor_torch_is_imported() -> None:
    code = "import sys, examples.compare_schedules; sys.exit('ray' in sys.modules or " \
           "'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
