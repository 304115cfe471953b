"""Quota streams on a driver and a torch that know what is ordered: no two modules' kernels can run
at the same time on the same multiprocessors, what is read comes after what was written, and nothing
is used once it is destroyed. The stand-ins refuse what CUDA refuses."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_cuda import CudaMisuseError, FakeCuda
from fake_driver import CUresult, FakeDriver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.actors.quota import ConcurrentModules, CudaBackend, StreamPool, Work
from raymm.actors.quota.cuda_backend import CudaStream
from raymm.actors.quota.green_context import DriverError, GreenContexts
from raymm.actors.quota.partition import partition

HOPPER = dict(minSmPartitionSize=8, smCoscheduledAlignment=8)
SETS = {
    "encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0},
    "decoders": {"image": 0.25, "speech": 0.5}, "alone": {"vision": 0.6},
}


def run_stages(cuda, pool, side, names):
    """Every stage's modules launch two kernels each and read all that the stage before wrote;
    the caller launches one between stages that reads them all."""
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
def test_an_order_that_is_missing_shows(cuda, monkeypatch, missing):
    if missing == "wait":  # streams do not wait for one another
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


def test_the_stand_ins_refuse_what_cuda_refuses(cuda):
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
    with pytest.raises(DriverError, match="cuGreenCtxCreate failed"):
        contexts.stream(partition({"a": 0.5}, contexts.gpu)[0])
