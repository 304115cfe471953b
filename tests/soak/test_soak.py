"""Soak of ten faults, in a separate run (:mod:`tests.soak`)."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak import soak_checks, trials
from tests.soak.soak_faults import NOT_FINITE_EVERY
from tests.soak.trials import PARTS, draw

ROOT = Path(__file__).resolve().parents[2]
KILLS = 10


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(600)  # runs of a hundred steps, on a machine that may be busy
def test_a_run_with_faults_equals_the_undisturbed_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--kills", str(KILLS), "--seed", "1"], cwd=ROOT,
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["bit_identical"] == summary["named"] == summary["over"] == KILLS
    assert summary["losses_and_samples_as_without"] and summary["steps_not_finite"]
    assert summary["spares_came"] == summary["spares_due"]  # in one of ten, the spare is lost
    assert summary["most_steps_redone"] <= 1 and summary["processes_left"] == 0


def test_every_fault_occurs_before_any_is_repeated() -> None:
    """Check each part, and that the same seed gives the same order."""
    from tests.soak.soak_places import places

    for part, there in places().items():
        drawn = [(t.role, t.phase, t.kind) for t in draw(len(there) + 1, 3, [part])]
        assert sorted(drawn[:-1]) == sorted(there) and drawn[-1] in there
    drawn = draw(100, 0)
    assert {part: sum(t.part == part for t in drawn) for part in PARTS} == PARTS
    assert drawn == draw(100, 0) != draw(100, 1)
    assert [trial.number for trial in drawn] == list(range(100))
    two = ["the same command", "several nodes"]
    assert [trial.part for trial in draw(6, 0, two)] == [two[0]] * 3 + [two[1]] * 3


def _rows(steps: int) -> list[dict]:
    """Return rows of ``metrics.jsonl``."""
    return [
        {"step": step, "loss": None, "not_applied": {}} if step % NOT_FINITE_EVERY == 0
        else {"step": step, "loss": 1.0 / step} for step in range(1, steps + 1)
    ]


def test_a_different_run_is_detected() -> None:
    """Check that each comparison detects a run with its fault, and accepts a correct one."""
    losses = [(step, 1.0 / step) for step in range(1, 31)]
    assert not soak_checks.other_losses(losses[:20], losses)
    for wrong in ([], losses[1:], [*losses[:9], (10, 0.2)], [*losses, (31, 0.1)]):
        assert soak_checks.other_losses(wrong, losses)

    samples = [{"step": step, "microbatches": [[f"{step}"], ["b"]]} for step in range(1, 31)]
    assert not soak_checks.other_samples(samples[:20], samples, 20)
    empty = [{"step": step, "microbatches": []} for step in range(1, 21)]
    twice = [*samples[:19], samples[18]]
    for wrong in ([], samples[:19], twice, [*samples[:20], samples[20]]):
        assert soak_checks.other_samples(wrong, samples, 20)
    assert soak_checks.other_samples(empty, empty, 20)

    rows = _rows(30)
    assert not soak_checks.other_steps_not_finite(rows)
    assert not soak_checks.other_steps_not_finite(rows[: NOT_FINITE_EVERY - 1])
    applied = [{key: row[key] for key in ("step", "loss")} for row in rows]
    for wrong in (applied, [*rows[:-1], applied[-1]], [{**row, "not_applied": {}} for row in rows]):
        assert soak_checks.other_steps_not_finite(wrong)

    heldout = [{"step": step, "heldout_loss": 1.0 / (step + 1)} for step in (0, 4, 8)]
    assert not soak_checks.other_heldout_losses([*rows, *heldout[:2]], heldout)
    for wrong in (rows, heldout[1:], [*heldout[:2], {"step": 8, "heldout_loss": 0.5}]):
        assert soak_checks.other_heldout_losses(wrong, heldout)


def test_an_unexpected_outcome_is_detected() -> None:
    whole = trials.Trial(
        0, "with a spare", "rank 1", "forward", "SIGKILL", hits=1, at=1.0, decided=1.1,
        recovered=1.2, new_step=1.3, redone=1, text="rank 1 (stages llm.1) died", last_step=9,
        identical=True, spare=7, spare_came=True,
    )
    assert not soak_checks.not_as_it_should_be(whole)
    wrong = {"new_step": None, "redone": 2, "text": "rank 0 (", "identical": False,
             "spare_came": False, "ended_otherwise": "code 2, None"}
    for name, value in wrong.items():
        assert len(soak_checks.not_as_it_should_be(replace(whole, **{name: value}))) == 1
    without = replace(whole, part="in place", spare=None, spare_came=False)
    assert not soak_checks.not_as_it_should_be(without)


def test_impossible_faults_have_a_reason() -> None:
    """Check that each combination of role, phase and kind is drawn in some part, or has a reason.
    """
    from tests.soak.soak_places import (
        combinations,
        left_out,
        places,
        why_not,
    )

    drawn = {place for there in places().values() for place in there}
    every = combinations()
    assert len(every) == len(set(every)) and drawn < set(every)
    assert drawn == {place for place in every if not why_not(place)}
    assert all(left_out().values()) and "" not in left_out()
