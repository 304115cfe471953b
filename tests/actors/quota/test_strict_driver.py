"""Quota streams on fakes of driver and torch that check the order of work.

Kernels of two modules never run at the same time on the same multiprocessors, reads come after
writes, and destroyed objects are not used. The fakes reject calls that CUDA rejects.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.actors.quota import ConcurrentModules, CudaBackend, StreamPool, Work
from raymm.actors.quota.cuda_backend import CudaStream, GreenContexts
from raymm.actors.quota.partition import partition
from raymm.errors import InternalError
from tests.support.fake_cuda import CudaMisuseError, FakeCuda
from tests.support.fake_driver import CUresult, FakeDriver

ROOT = Path(__file__).resolve().parents[3]
HOPPER = dict(minSmPartitionSize=8, smCoscheduledAlignment=8)
SETS = {
    "encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0},
    "decoders": {"image": 0.25, "speech": 0.5}, "alone": {"vision": 0.6},
}


def run_stages(cuda, pool, side, names):
    """Run all stages.

    Every stage's modules launch two kernels each and read all writes of the previous stage; the
    caller launches one between stages that reads them all.
    """
    outputs = {}
    for number, name in enumerate(names):
        streams = pool.select(name)

        def work(*_, number=number):
            return [cuda.launch(f"{number}"), cuda.launch(f"{number}")]

        works = {m: Work(work, tuple(outputs.values()), draws=False) for m in streams.streams}
        before = [k for out in outputs.values() for k in out.value]
        outputs = side.run(streams, works)
        for output in outputs.values():
            assert {k.number for k in before} <= output.value[0].after, (name, "reads too early")
        written = [k for out in outputs.values() for k in out.get()]
        assert {k.number for k in written} <= cuda.launch(f"{number} read").after


def test_stages_are_ordered_and_modules_of_a_stage_are_not(cuda):
    with ConcurrentModules() as side, StreamPool(CudaBackend(), SETS) as pool:
        run_stages(cuda, pool, side, ["encoders", "llm", "decoders", "alone", "encoders"])
        vision, audio = (k for k in cuda.kernels if k.name == "0" and len(k.after) == 0)
        assert not vision.sms & audio.sms, "at the same time, on multiprocessors of their own"
        assert cuda.unordered() == []
    driver = cuda.driver
    assert not driver.streams and not driver.contexts and not cuda.pending()
    assert cuda.log[0] == "synchronize", "before anything ends"
    assert driver.primary_setups == 0, "torch's first allocation comes before the contexts"


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sets_in_any_order(data):
    modules = ["a", "b", "c"]
    quotas = st.dictionaries(
        st.sampled_from(modules), st.sampled_from([0.0625, 0.2, 0.33]), min_size=1
    )
    sets = data.draw(st.lists(quotas, min_size=1, max_size=3))
    named = {str(i): one for i, one in enumerate(sets)} | {"whole": {"a": 1.0}}
    order = data.draw(st.lists(st.sampled_from(sorted(named)), max_size=5))
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeCuda(FakeDriver(**HOPPER))
        with fake.installed(patch):
            with ConcurrentModules() as side, StreamPool(CudaBackend(), named) as pool:
                run_stages(fake, pool, side, order)
        assert fake.unordered() == [] and not fake.driver.streams and not fake.driver.contexts


@pytest.mark.parametrize("missing", ["wait", "record"])
def test_a_missing_order_is_detected(cuda, monkeypatch, missing):
    if missing == "wait":  # streams do not wait for each other
        monkeypatch.setattr(CudaStream, "wait", lambda self, event: None)
    else:  # events are recorded before the work
        started = cuda.current_stream().record_event()
        monkeypatch.setattr(CudaStream, "record", lambda self: started)
    with ConcurrentModules() as side, StreamPool(CudaBackend(), SETS) as pool:
        with contextlib.suppress(AssertionError):
            run_stages(cuda, pool, side, ["encoders", "llm"])
        for name in ("encoders", "llm"):
            with next(iter(pool.select(name).streams.values())).use():
                cuda.launch(name)
    assert cuda.unordered()


def test_pools_come_and_go(cuda):
    for _ in range(3):
        with ConcurrentModules() as side, StreamPool(CudaBackend(), SETS) as pool:
            run_stages(cuda, pool, side, ["encoders", "llm"])
        assert not cuda.driver.streams and not cuda.driver.contexts
    created = cuda.driver.calls.count("cuGreenCtxCreate")
    assert created == cuda.driver.calls.count("cuGreenCtxDestroy") > 0


def test_streams_are_not_used_after_their_pool(cuda):
    pool = StreamPool(CudaBackend(), SETS)
    stream = pool.select("encoders").streams["vision"]
    event = stream.record()
    pool.close()
    with pytest.raises(CudaMisuseError, match="destroyed"):
        stream.record()
    with pytest.raises(CudaMisuseError, match="destroyed"), stream.use():
        pass
    CudaStream(cuda.current_stream()).wait(event)  # an event outlives its stream


def test_the_fakes_reject_misuse_like_cuda(cuda):
    with pytest.raises(CudaMisuseError, match="never recorded"):
        cuda.current_stream().wait_event(torch.cuda.Event())
    driver = cuda.driver
    contexts = GreenContexts(driver, 0, 9)
    first, second = (contexts.stream(p) for p in partition({"a": 0.5, "b": 0.5}, contexts.gpu))
    stream = torch.cuda.ExternalStream(first, device=0)
    with cuda.stream(stream):
        cuda.launch("a")
    with pytest.raises(AssertionError, match="destroyed with 1 kernels under way"):
        contexts.close()
    cuda.synchronize()
    assert driver.cuGreenCtxDestroy(driver.streams[first]) == (CUresult.CUDA_SUCCESS,)
    with pytest.raises(CudaMisuseError, match="detached"):
        stream.record_event()
    assert driver.cuStreamDestroy(first) == (CUresult.CUDA_ERROR_STREAM_DETACHED,)
    assert driver.cuStreamDestroy(second) == (CUresult.CUDA_SUCCESS,)
    assert driver.cuStreamDestroy(second) == (CUresult.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuGreenCtxDestroy(1) == (CUresult.CUDA_ERROR_INVALID_CONTEXT,)


def queues_of_streams(driver: FakeDriver, quotas: dict[str, float]) -> list[frozenset[int]]:
    contexts = GreenContexts(driver, 0, 9)
    return [driver.queues_of(contexts.stream(p)) for p in partition(quotas, contexts.gpu)]


def test_modules_have_separate_hardware_queues_if_possible() -> None:
    first, second, third = queues_of_streams(
        FakeDriver(version=13010, **HOPPER), {"a": 0.5, "b": 0.25, "c": 0.25}
    )
    assert not first & second and not second & third and not first & third
    contexts = GreenContexts(FakeDriver(version=13010, **HOPPER), 0, 9)
    assert contexts.queues.startswith("each context has its own work queues, up to 32")


@pytest.mark.parametrize("missing", ["driver", "bindings", "device"])
def test_shared_queues_are_reported_with_the_reason(missing, monkeypatch) -> None:
    driver = FakeDriver(version=13000 if missing == "driver" else 13010, **HOPPER)
    said = "work queues are shared: the driver is version 13000; separate ones need 13010"
    if missing == "bindings":
        driver.CUdevWorkqueueConfigScope = None
        said = "work queues are shared: the installed cuda-python is too old"
    if missing == "device":
        driver.CUdevResourceType = type(driver.CUdevResourceType)(
            CU_DEV_RESOURCE_TYPE_SM=1, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG=77
        )
        said = "work queues are shared: cuDeviceGetDevResource failed: CUDA_ERROR_NOT_SUPPORTED"
    contexts = GreenContexts(driver, 0, 9)
    assert contexts.queues.startswith(said)
    first, second = (contexts.stream(p) for p in partition({"a": 0.5, "b": 0.5}, contexts.gpu))
    assert driver.queues_of(first) & driver.queues_of(second)


def test_queues_that_are_not_granted_are_reported() -> None:
    with pytest.raises(InternalError, match="made a context that shares work queues"):
        queues_of_streams(FakeDriver(version=13010, balances=False, **HOPPER), {"a": 0.5})


def test_the_pool_reports_its_queues(cuda) -> None:
    cuda.driver.version = 13010
    with StreamPool(CudaBackend(), SETS) as pool:
        assert pool.report().splitlines()[-1].startswith("each context has its own work queues")


# Two modules whose backwards wait for each other, which would block a sequential thread.
CONCURRENT_BACKWARDS = """
from benchmarks.devices.pretended_gpu.library import load
load()
import threading
import torch
from benchmarks.devices.pretended_gpu.device import pretended_gpu
from raymm.actors.quota import ConcurrentModules, RecordingBackend, StreamPool, Work

class Noting(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        met.wait()
        threads.append(threading.current_thread().name)
        return gradient * 2

def backward(x):
    y = Noting.apply(x)
    y.backward(y.detach())
    return x.grad.held.tolist()

threads, met = [], threading.Barrier(2, timeout=20)
with pretended_gpu(), ConcurrentModules() as modules:
    with StreamPool(RecordingBackend(), {"s": {"a": 0.5, "b": 0.5}}) as pool:
        x = {m: torch.ones(3, device="cuda").requires_grad_() for m in "ab"}
        works = {m: Work(backward, (x[m],), draws=False) for m in "ab"}
        made = modules.run(pool.select("s"), works)
        print([out.value for out in made.values()], len(set(threads)))
"""


def test_backwards_of_two_modules_are_issued_by_two_threads() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CONCURRENT_BACKWARDS], cwd=ROOT, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == f"{[[4.0] * 3] * 2} 2".split()


@pytest.mark.parametrize("name, arguments, error", [
    ("cuDriverGetVersion", (), CUresult.CUDA_ERROR_NOT_INITIALIZED),
    ("cuDeviceGetDevResource", ("device 1", 1), CUresult.CUDA_ERROR_INVALID_DEVICE),
    ("cuDevResourceGenerateDesc", ([], 0), CUresult.CUDA_ERROR_INVALID_VALUE),
    ("cuDevResourceGenerateDesc", ([None], 1), CUresult.CUDA_ERROR_INVALID_VALUE),
    ("cuGreenCtxCreate", ("no description", "device 0", 1), CUresult.CUDA_ERROR_INVALID_VALUE),
    ("cuGreenCtxStreamCreate", (1, 1, 0), CUresult.CUDA_ERROR_INVALID_CONTEXT),
])  # fmt: skip
def test_calls_out_of_order(name, arguments, error):
    assert getattr(FakeDriver(), name)(*arguments)[0] == error


def test_a_context_is_made_of_parts_of_one_split():
    driver = FakeDriver(**HOPPER)
    driver.cuInit(0)
    _, whole = driver.cuDeviceGetDevResource("device 0", 1)
    groups, others = (
        driver.cuDevSmResourceSplitByCount(2, whole, 0, 8)[1] for _ in range(2)
    )
    for parts in ([groups[0], others[1]], [groups[0], groups[0]]):
        status, _ = driver.cuDevResourceGenerateDesc(parts, 2)
        assert status == CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
    driver.primary_active = False
    _, description = driver.cuDevResourceGenerateDesc(groups, 2)
    driver.cuGreenCtxCreate(description, "device 0", 1)
    assert driver.primary_setups == 1
    contexts = GreenContexts(driver, 0, 9)
    driver.fail = "cuGreenCtxCreate"
    with pytest.raises(InternalError, match="cuGreenCtxCreate failed"):
        contexts.stream(partition({"a": 0.5}, contexts.gpu)[0])
