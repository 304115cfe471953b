"""The pool, and the backends that need no GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.devices.emulated_backend import EmulatedBackend, EmulatedModule, pause
from raymm.actors.quota import CudaBackend, Multiprocessors, RecordingBackend, StreamPool
from raymm.errors import InputError, InternalError, PlanError
from tests.support.quota_spans import most_sms, seconds_together

SETS = {
    "encoders": {"vision": 0.6, "audio": 0.4},
    "llm": {"llm": 1.0},
    "decoders": {"image": 0.25, "speech": 0.75},
}


class Logged(RecordingBackend):
    """Backend that logs the calls of its streams."""

    def __init__(self):
        super().__init__()
        self.log, self.closed = [], 0

    def create(self, partition, colocated=()):
        stream = super().create(partition, colocated)
        self.log.append(("create", partition.module, [one.module for one in colocated]))
        stream.record = lambda: self.log.append(("record", partition.module)) or partition.module
        stream.wait = lambda event: self.log.append(("wait", partition.module, event))
        return stream

    def close(self):
        self.closed += 1


def test_selecting_creates_nothing():
    backend = Logged()
    with StreamPool(backend, SETS) as pool:
        assert [entry[1:] for entry in backend.log] == [
            ("vision", ["audio"]),
            ("audio", ["vision"]),
            ("llm", []),
            ("image", ["speech"]),
            ("speech", ["image"]),
        ]
        backend.log.clear()
        first = pool.select("encoders")
        assert list(first.streams) == ["vision", "audio"] and first.name == "encoders"
        assert pool.select("encoders") is first and not backend.log
        pool.select("llm")
    assert backend.log == [
        ("record", "vision"),
        ("record", "audio"),
        ("wait", "llm", "vision"),
        ("wait", "llm", "audio"),
    ]
    assert backend.closed == 1
    pool.close()
    assert backend.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        pool.select("llm")


def test_a_process_makes_only_its_own_streams():
    whole = StreamPool(RecordingBackend(), SETS)
    log = []
    for module in ("vision", "audio"):
        backend = Logged()
        pool = StreamPool(backend, SETS, modules=[module])
        assert pool.partitions == whole.partitions
        (stream,) = pool.select("encoders").streams.values()
        assert not pool.select("llm").streams
        log.append(stream.partition)
    assert not log[0].overlaps(log[1])
    assert tuple(log) == whole.partitions["encoders"]


def test_sets_of_others_do_not_hide_earlier_work():
    backend = Logged()
    sets = {"a": {"x": 0.5}, "others": {"y": 1.0}, "b": {"z": 0.5}}
    pool = StreamPool(backend, sets, modules=["x", "z"])
    for name in sets:
        pool.select(name)
    assert backend.log[-2:] == [("record", "x"), ("wait", "z", "x")]


def test_refusals_come_before_anything_is_created():
    backend = Logged()
    with pytest.raises(PlanError, match=r"set 'b': quotas .* sum to 1.2"):
        StreamPool(backend, {"a": {"x": 0.5}, "b": {"x": 0.6, "y": 0.6}})
    with pytest.raises(PlanError, match=r"modules are \['nobody'\]; accepted: .*'audio'"):
        StreamPool(backend, SETS, modules=["nobody"])
    with pytest.raises(PlanError, match="modules is 'vision'; accepted: a collection of names"):
        StreamPool(backend, SETS, modules="vision")
    assert not backend.log
    with pytest.raises(PlanError, match="set is 'x'; accepted: encoders, llm, decoders"):
        StreamPool(backend, SETS).select("x")


def test_a_failure_while_creating_closes_the_backend():
    backend = Logged()
    create = backend.create

    def fails(partition, colocated):
        if partition.module == "llm":
            raise OSError("no memory")
        return create(partition, colocated)

    backend.create = fails
    with pytest.raises(OSError, match="no memory"):
        StreamPool(backend, SETS)
    assert backend.closed == 1


def test_the_report_names_requests_and_grants():
    report = StreamPool(RecordingBackend(), SETS).report().splitlines()
    assert len(report) == 5
    assert report[0].startswith("encoders: 'vision': requested 0.6 (79.2 SMs), granted 80 of 132")
    assert report[2].endswith("granted 132 of 132 SMs (1), the whole GPU")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_account_records_module_spans():
    clock = Clock()
    backend = RecordingBackend(clock=clock)
    pool = StreamPool(backend, SETS)
    vision, audio = pool.select("encoders").streams.values()
    with vision.use():
        clock.now = 2.0
        with audio.use():
            clock.now = 5.0
        clock.now = 6.0
    spans = [(s.partition.module, s.start, s.end) for s in backend.account.spans]
    assert spans == [("audio", 2.0, 5.0), ("vision", 0.0, 6.0)]
    assert seconds_together(backend.account, "vision", "audio") == 3.0
    assert most_sms(backend.account) == 80 + 48


def test_the_account_refuses_oversubscription():
    backend = RecordingBackend(Multiprocessors(100, 10))
    pool = StreamPool(backend, {"a": {"x": 0.5, "y": 0.5}, "b": {"z": 1.0}, "c": {"w": 0.3}})
    streams = {m: s for name in "abc" for m, s in pool.select(name).streams.items()}
    with streams["y"].use():
        with streams["w"].use():  # the first three groups; y has the last five
            pass
        with pytest.raises(InternalError, match="'z'.*in use by 'y'"):
            streams["z"].use().__enter__()
        with streams["x"].use(), pytest.raises(InternalError, match="in use by 'x'"):
            streams["w"].use().__enter__()
        with pytest.raises(InternalError):
            streams["y"].use().__enter__()
    with streams["z"].use():
        pass
    assert most_sms(backend.account) == 100


def test_an_emulated_module_takes_the_modelled_time():
    asked, paused = [], []

    def forward(module, degree, quota, colocated):
        asked.append((module, degree, quota, dict(colocated)))
        return 1 / quota

    def backward(module, degree, quota, colocated):
        return 2 / quota + sum(colocated.values())

    backend = EmulatedBackend(forward, backward, Multiprocessors(100, 10), pause=paused.append)
    pool = StreamPool(backend, {"both": {"vision": 0.52, "audio": 0.4}, "one": {"llm": 1.0}})
    module, x = EmulatedModule(degree=4), torch.ones(3, requires_grad=True)
    with pool.select("both").streams["vision"].use():
        module(x).sum().backward()
    assert asked == [("vision", 4, 0.5, {"audio": 0.4})]
    assert paused == [1 / 0.5, 2 / 0.5 + 0.4]
    assert x.grad.tolist() == [1, 1, 1] and module.weight.grad == 3
    assert backend.account.spans[0].partition.module == "vision"
    # Frozen, without anything to train before it: no backward.
    module.requires_grad_(False)
    with pool.select("one").streams["llm"].use():
        assert not module(torch.ones(3)).requires_grad
    assert asked[-1] == ("llm", 4, 1.0, {}) and len(paused) == 3


def test_an_emulated_module_without_a_stream_is_refused():
    with pytest.raises(RuntimeError, match="without a stream"):
        EmulatedModule()(torch.ones(1))


def test_a_backward_into_another_module_is_refused():
    backend = EmulatedBackend(lambda *a: 0.0, lambda *a: 0.0, pause=lambda s: None)
    streams = StreamPool(backend, {"s": {"a": 0.5, "b": 0.5}}).select("s").streams
    first, second = EmulatedModule(), EmulatedModule()
    with streams["a"].use():
        x = first(torch.ones(2))
    with streams["b"].use():
        with pytest.raises(RuntimeError, match="backward of 'a' runs on the stream of 'b'.*detach"):
            second(x).sum().backward()
        second(x.detach()).sum().backward()


def test_streams_are_current_in_their_own_thread_only():
    backend = EmulatedBackend(lambda *a: 0.0, lambda *a: 0.0, pause=lambda s: None)
    pool = StreamPool(backend, {"s": {"a": 0.5, "b": 0.5}})
    a, b = pool.select("s").streams.values()
    errors = []

    def other():
        try:
            EmulatedModule()(torch.ones(1))
        except RuntimeError as error:
            errors.append(str(error))

    with a.use():
        with b.use():
            pass
        EmulatedModule()(torch.ones(1))  # a is current again
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_pauses_are_never_short(monkeypatch):
    """Use a clock whose sleeps end early, at the latest moment, or not at all."""
    from benchmarks.devices import emulated_backend

    for woken in (0.0, 0.5, 1.0):
        now = [100.0]

        def tick(now=now):
            now[0] += 1e-5
            return now[0]

        def sleep(seconds, now=now, woken=woken):
            now[0] += woken * seconds

        monkeypatch.setattr(emulated_backend.time, "perf_counter", tick)
        monkeypatch.setattr(emulated_backend.time, "sleep", sleep)
        pause(0.05)
        monkeypatch.undo()
        assert 100.05 <= now[0] < 100.0503


def test_a_missing_gpu_is_reported_with_an_alternative():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InputError, match="no CUDA device; use Recording"):
        CudaBackend()


def test_one_connection_is_refused(monkeypatch):
    """Reject it, as streams could not overlap."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(InputError, match="CUDA_DEVICE_MAX_CONNECTIONS is '1'"):
        CudaBackend()


def test_launches_that_wait_for_their_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(InputError, match="CUDA_LAUNCH_BLOCKING is '1'"):
        CudaBackend()
