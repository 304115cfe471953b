"""Record of the partitions in use."""

import itertools

import pytest

from raymm.actors.quota import Multiprocessors, RecordingBackend
from raymm.actors.quota.partition import partition
from raymm.errors import InternalError


@pytest.fixture
def backend():
    ticks = itertools.count()
    return RecordingBackend(Multiprocessors(132, 8, 16), lambda: float(next(ticks)))


def streams(backend, *sets):
    return [backend.create(one) for quotas in sets for one in partition(quotas, backend.gpu)]


def test_uses_are_recorded_with_their_times(backend):
    a, b = streams(backend, {"a": 0.5, "b": 0.5})
    with a.use(), b.use():
        assert backend.account.spans == ()
    spans = [(s.partition.module, s.start, s.end) for s in backend.account.spans]
    assert spans == [("b", 1.0, 2.0), ("a", 0.0, 3.0)]


def test_multiprocessors_in_use_are_refused(backend):
    a, b, alone = streams(backend, {"a": 0.5, "b": 0.5}, {"c": 1.0})
    with pytest.raises(InternalError, match="'c'.* in use by .*'b'"), b.use(), alone.use():
        pass
    with a.use(), b.use():
        pass
    with alone.use():  # everything is free again
        pass


def test_a_failed_work_frees_its_partition(backend):
    (a,) = streams(backend, {"a": 1.0})
    for _ in range(2):
        with pytest.raises(KeyError), a.use():
            raise KeyError
    assert len(backend.account.spans) == 2
