"""Work of the driver per step: number of pickles, and of Ray calls."""

from __future__ import annotations

import pickle
import signal
import struct
import threading
from collections import Counter
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raymm.actors.executor.step_meta import StepMeta, StepResult, pack_labels
from raymm.actors.faults import diagnosis
from raymm.actors.faults.inquiry import Inquiry
from raymm.actors.faults.stacks import Address, Look
from raymm.actors.faults.task_tracker import Report
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.step_calls import CallOrder
from raymm.actors.recovery import observed_ranks
from raymm.errors import RankFailedError
from raymm.scheduler.plan.stage import NO_STAGE, StageId

RANKS = 5
LLM = StageId("llm", 0)


class Meta(StepMeta):
    """Step metadata that counts its pickling."""

    pickled = 0

    def __reduce__(self):
        Meta.pickled += 1
        return StepMeta, tuple(self)


class Actor:
    """Actor that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.run_packed_step = self
        self.cut = self

    def remote(self, *args: Any) -> int:
        self.calls.append(args)
        return id(self)


class FakeRay:
    """Ray whose calls have ended, except those in ``late``, which end one poll later."""

    def __init__(self, results: dict[int, Any], late: tuple[int, ...] = ()) -> None:
        self.results, self.late, self.asked = results, set(late), Counter()

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        self.asked["get"] += 1
        for ref in refs if isinstance(refs, list) else [refs]:
            if isinstance(self.results[ref], Exception):
                raise self.results[ref]
        if isinstance(refs, list):
            if self.late & set(refs):
                raise GetTimeoutError
            return [self.results[ref] for ref in refs]
        return self.results[refs]

    def wait(self, refs: list[int], num_returns: int, timeout: float):
        self.asked["wait"] += 1
        ready = [ref for ref in refs if ref not in self.late]
        if num_returns == 1:  # a call failed
            ready = [ref for ref in ready if isinstance(self.results[ref], Exception)]
        self.late.clear()
        return ready, []


@pytest.fixture
def group(monkeypatch) -> RankGroup:
    made = object.__new__(RankGroup)
    made._actors = [Actor() for _ in range(RANKS)]
    made._order, made._ended, made._observer = CallOrder(), None, None
    made._patience, made._labels, made._places = 9.0, ["llm.0"] * RANKS, [""] * RANKS
    made._addresses = {}
    monkeypatch.setattr(made, "shutdown", lambda: None)
    return made


def test_metadata_is_pickled_once_for_all_ranks(group) -> None:
    Meta.pickled = 0
    meta = Meta(3, 7, ("key",) * 4)
    data = object()
    group.submit("program", meta, [[(LLM, 2, data)], *([[]] * (RANKS - 1))])
    assert Meta.pickled == 1
    calls = [call for actor in group._actors for call in actor.calls]
    assert len(calls) == RANKS and len({id(call[0]) for call in calls}) == 1
    assert pickle.loads(calls[0][0]) == ("program", tuple(meta))
    assert pickle.loads(calls[0][1]) == [(LLM, 2)] and calls[0][2:] == (data,)
    assert all(call[1:] == (b"",) for call in calls[1:])
    # Ray would pickle anything else for every rank.
    assert all(isinstance(arg, bytes) for call in calls for arg in call[:2])


def test_an_interruption_waits_until_all_ranks_have_their_call(group) -> None:
    """Send a step to all ranks or none: a rank would wait for peers without it in vain."""
    handler = signal.getsignal(signal.SIGINT)
    second = group._actors[1]
    called = second.remote

    def interrupted(*args: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return called(*args)

    second.remote = interrupted
    for times in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            group.submit("program", StepMeta(0, 1, ()), [[]] * RANKS)
        assert [len(actor.calls) for actor in group._actors] == [times] * RANKS
        assert signal.getsignal(signal.SIGINT) is handler
    second.remote = called
    group.submit("program", StepMeta(0, 1, ()), [[]] * RANKS)  # nothing blocks
    threads = [
        threading.Thread(target=group.submit, args=("program", StepMeta(0, 1, ()), [[]] * RANKS))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert [len(actor.calls) for actor in group._actors] == [6] * RANKS


def test_results_of_all_ranks_come_with_one_call(group, monkeypatch) -> None:
    label = ("forward", LLM, 1, NO_STAGE, 1.0)
    times = struct.pack("2d", 2.0, 3.5)
    sent = StepResult(losses={0: 0.5}, labels=pack_labels([label]), times=times)
    ray = FakeRay({id(actor): pickle.dumps(sent) for actor in group._actors})
    monkeypatch.setattr(observed_ranks, "ray", ray)
    results = group.submit("program", StepMeta(0, 1, ()), [[]] * RANKS).result()
    assert ray.asked == Counter(get=1)
    assert results == [sent] * RANKS
    assert results[0].spans == [("forward", LLM, 1, 2.0, 3.5, NO_STAGE, 1.0)]


def test_results_that_come_late_keep_their_ranks(group, monkeypatch) -> None:
    ray = FakeRay({n: f"of {n}" for n in range(RANKS)}, late=(1, 4))
    monkeypatch.setattr(observed_ranks, "ray", ray)
    assert group.wait(list(range(RANKS))) == [f"of {n}" for n in range(RANKS)]


@pytest.mark.parametrize("failed", range(RANKS))
def test_the_rank_that_raised_is_named(failed: int, group, monkeypatch) -> None:
    results: dict[int, Any] = {n: n for n in range(RANKS)}
    results[failed] = RayTaskError("run", "where", ValueError("no such thing"))
    monkeypatch.setattr(observed_ranks, "ray", FakeRay(results, late=(0,) if failed else ()))
    with pytest.raises(RankFailedError, match=f"rank {failed} .*failed: .*no such thing"):
        group.wait(list(range(RANKS)))


@pytest.mark.parametrize("cause", ["dead", "silent"])
def test_a_rank_that_the_watchdog_ended_is_not_blamed(cause: str, group, monkeypatch) -> None:
    """Let the driver detect the death of rank 0 first, which had waited for rank 3."""
    aborted, error = {0, 1}, RayActorError()
    group._addresses = {rank: Address("node", rank, 0) for rank in range(RANKS)}
    reports = {rank: Report("a step", 50.0, True) for rank in (2, 4)}
    dead = {0: error, 1: error, **({3: error} if cause == "dead" else {})}
    inquiry = Inquiry(reports, dead, (3,) if cause == "silent" else ())

    def look(addresses: dict[int, Address], end: Any = ()) -> dict[int, Look]:
        return {rank: Look("dead", "", aborted=rank in aborted) for rank in addresses}

    monkeypatch.setattr(observed_ranks, "inquire", lambda *_: inquiry)
    monkeypatch.setattr(observed_ranks, "look_from_outside", look)
    monkeypatch.setattr(diagnosis, "look_from_outside", look)
    failures = []
    monkeypatch.setattr(group, "_can_renew", lambda failure: failures.append(failure))
    with pytest.raises(RankFailedError, match=r"^rank 3 \("):
        group._died(0, error)
    assert 3 in failures[0].lost
