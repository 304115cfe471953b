"""Times of colocated modules, on recorded quotas."""

from raymm.actors.quota import Multiprocessors, RecordingBackend
from raymm.actors.rank.surface_profiler import (
    ColocatedTimes,
    ColocationProfiler,
)


def test_alone_and_colocated_use_the_same_multiprocessors():
    """Use an H100's 16 groups: a quota of 0.7 alone would have 12, and has 11 next to 0.3."""
    backend = RecordingBackend(Multiprocessors())
    runs = []

    class Clock:
        def seconds(self, marks):
            return marks

    class Module:
        def __init__(self, name):
            self.name = name

        def prepare(self, request):
            pass

        def iterations(self, count):
            runs.append((self.name, count))
            # The second run is next to the other module.
            return Clock(), 0.0, count * [2.0, 3.0][runs.count((self.name, count)) - 1]

        def forget(self):
            pass

    profiler = ColocationProfiler({})
    profiler._modules = {name: Module(name) for name in "ab"}
    found = profiler.colocated_times(
        {"a": None, "b": None}, [{"a": 0.7, "b": 0.3}], [{"a": 1.0, "b": 0.5}], backend
    )
    assert found == [{"a": ColocatedTimes(2.0, 3.0), "b": ColocatedTimes(2.0, 3.0)}]
    assert runs[:2] == [("a", 3), ("b", 6)] and sorted(runs[2:]) == runs[:2]
    sms = {name: {s.partition.sms for s in backend.account.spans if s.partition.module == name}
           for name in "ab"}  # fmt: skip
    assert sms == {"a": {88}, "b": {40}}
