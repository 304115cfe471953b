"""Concurrent modules: failures are named, and invalid calls are rejected."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from torch import nn

from raymm.actors.quota import (
    ConcurrentModules,
    RecordingBackend,
    StreamPool,
    Work,
    check_no_shared_parameters,
    concurrent_modules,
)
from raymm.actors.quota.generators import Ticket
from raymm.errors import InternalError
from tests.support.one_after_another import one_after_another
from tests.support.three_modules import MEET_SECONDS, MODULES, QUOTAS


def test_a_backward_elsewhere_than_its_forward_is_refused(side):
    pool = StreamPool(
        RecordingBackend(),
        {"s": QUOTAS, "t": {"vision": 0.5}, "u": {"vision": 0.33, "other": 0.5}},
    )
    out = side.run(pool.select("s"), {"vision": Work(lambda: 1)})["vision"]
    ran = []
    work = Work(ran.append, (1,), backward_of=out)
    with pytest.raises(ValueError, match="backward of 'vision' is assigned to .*'vision'.*same"):
        side.run(pool.select("t"), {"vision": work})
    assert not ran
    side.run(pool.select("u"), {"vision": work})  # the same groups
    assert ran == [1]


def test_a_module_without_a_stream_is_refused(streams, side):
    for run in (side.run, one_after_another):
        with pytest.raises(ValueError, match="no stream for module 'llm'; accepted: modules of"):
            run(streams, {"llm": Work(print)})


def test_exceptions_name_the_module_after_all_have_ended(streams, side):
    ended = []

    def fails(text):
        raise KeyError(text)

    def slow():
        time.sleep(0.02)
        ended.append("audio")

    works = {
        "vision": Work(fails, ("a",), draws=False),
        "audio": Work(slow, draws=False),
        "touch": Work(fails, ("b",), draws=False),
    }
    with pytest.raises(InternalError, match="module 'vision' failed: KeyError: 'a'") as caught:
        side.run(streams, works)
    assert ended == ["audio"]
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["module 'touch' failed as well: KeyError: 'b'"]
    # Modules that draw pass their ticket on, and the threads can be used again.
    ended.clear()
    works = {"vision": Work(fails, ("a",)), "audio": Work(slow), "touch": Work(fails, ("b",))}
    with pytest.raises(InternalError, match="module 'vision' failed"):
        side.run(streams, works)
    assert ended == ["audio"]
    assert side.run(streams, {"vision": Work(lambda: 3)})["vision"].get() == 3
    with pytest.raises(InternalError, match="module 'vision' failed: KeyError"):
        one_after_another(streams, works)


@pytest.mark.parametrize("draws", [False, True])
def test_a_module_that_does_not_end_is_named(streams, draws):
    side, release = ConcurrentModules(timeout=0.05), threading.Event()
    works = {
        "vision": Work(lambda: 1, draws=False),
        "audio": Work(lambda: release.wait(MEET_SECONDS), draws=draws),
    }
    try:
        with pytest.raises(TimeoutError, match=r"^modules 'audio' did not end within 0\.05 s"):
            side.run(streams, works)
        with pytest.raises(RuntimeError, match="any more: modules 'audio' did not end"):
            side.run(streams, {"vision": Work(lambda: 1)})
    finally:
        release.set()
        side.close()


def test_modules_waiting_for_their_ticket_are_not_stuck(streams):
    """Let the module that holds the generators exceed the time limit."""
    side, release = ConcurrentModules(timeout=0.05), threading.Event()
    begun = {m: Work(lambda: release.wait(MEET_SECONDS)) for m in ("audio", "vision")}
    turns = []

    class Patient(Ticket):
        def __init__(self, before, timeout):  # waits for a gate when the others time out
            super().__init__(before, MEET_SECONDS)
            turns.append(self)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(concurrent_modules, "Ticket", Patient)
            with pytest.raises(TimeoutError, match="^modules 'audio' did not end"):
                side.run(streams, begun)
        assert [turn.entered for turn in turns] == [True, False]
    finally:
        release.set()
        side.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_invalid_timeouts_are_refused(timeout):
    with pytest.raises(ValueError, match="accepted: a positive number of seconds"):
        ConcurrentModules(timeout=timeout)


def test_errors_travel_between_processes(streams, side):
    works = {m: Work({}.__getitem__, (m,), draws=False) for m in MODULES}
    with pytest.raises(InternalError) as caught:
        side.run(streams, works)
    back = pickle.loads(pickle.dumps(caught.value))
    assert type(back) is InternalError and str(back) == str(caught.value)
    assert vars(back) == vars(caught.value)
    assert len(caught.value.__notes__) == 2


def test_running_within_a_work_is_refused(streams, side):
    inner = {"audio": Work(lambda: 1, draws=False)}
    with pytest.raises(InternalError, match="run\\(\\) was called during run\\(\\)"):
        side.run(streams, {"vision": Work(side.run, (streams, inner), draws=False)})


def test_shared_parameters_are_refused():
    a, b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    check_no_shared_parameters({"a": a, "b": b})
    b[0].bias = a.bias
    with pytest.raises(ValueError, match="'0.bias' of module 'b' is 'bias' of module 'a'"):
        check_no_shared_parameters({"a": a, "b": b})
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight  # within a module
    check_no_shared_parameters({"a": a, "tied": tied})
