"""Failures during a recovery."""

from types import SimpleNamespace

import pytest

from raymm.errors import RankFailedError
from raymm.recovery.failure_policy import FailurePolicy
from raymm.recovery.recovery import Recovery
from raymm.recovery.run_controller import RunController, RunState

BACK = SimpleNamespace(step=2)


def recovery_with(attempts: list) -> tuple[Recovery, list[str]]:
    """Return a recovery whose attempts to restore return, or raise, these."""
    group = SimpleNamespace(ended=None, interrupted="somebody")
    controller, said = RunController(FailurePolicy(0, 0), lambda: 3), []
    controller.enter(RunState.RUNNING)
    parallel = SimpleNamespace(group=group)
    recovery = Recovery(parallel, controller, None, said.append)
    recovery._every = 1
    recovery._snapshots = SimpleNamespace(newest=lambda: BACK)

    def back():
        result = attempts.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    recovery._back = back
    return recovery, said


def died(pid: int) -> RankFailedError:
    return RankFailedError(f"rank 0 (stages a, process {pid} on b) died")


def test_a_rank_that_dies_as_it_starts_has_another_chance():
    """Lose a rank that replaced one lost in the same way during the step."""
    recovery, said = recovery_with([died(8), BACK])
    assert recovery.recover(died(7)) is BACK
    assert recovery.count == 2 and said[-1].startswith("recovered from step 2")


def test_a_repeated_failure_has_no_further_chance():
    recovery, _ = recovery_with([died(8), died(9), BACK])
    with pytest.raises(RankFailedError, match="process 9"):
        recovery.recover(died(7))
    assert recovery.count == 2
