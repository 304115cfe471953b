"""Ten things that go wrong, in a run of their own (:mod:`tests.soak`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = 10


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(600)  # runs of a hundred steps, on a machine that may be busy
def test_a_run_in_which_things_go_wrong_is_the_run_without() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--kills", str(KILLS), "--seed", "1"], cwd=ROOT,
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["bit_identical"] == summary["named"] == summary["over"] == KILLS
    assert summary["losses_and_samples_as_without"]
    assert summary["most_steps_redone"] <= 1 and summary["processes_left"] == 0


def test_everything_has_its_turn_before_anything_has_a_second() -> None:
    """Of each part; the same seed gives the same order."""
    from soak_places import places  # pyright: ignore[reportMissingImports]
    from trials import PARTS, draw  # pyright: ignore[reportMissingImports]

    for part, there in places().items():
        drawn = [(t.role, t.phase, t.kind) for t in draw(len(there) + 1, 3, part)]
        assert sorted(drawn[:-1]) == sorted(there) and drawn[-1] in there
    trials = draw(100, 0)
    assert {part: sum(t.part == part for t in trials) for part in PARTS} == PARTS
    assert trials == draw(100, 0) != draw(100, 1)
    assert [trial.number for trial in trials] == list(range(100))


def test_what_is_not_drawn_is_said_why() -> None:
    """Each combination of role, phase and kind is drawn in some part, or has a reason not to be."""
    from soak_places import (  # pyright: ignore[reportMissingImports]
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
