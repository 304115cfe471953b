"""Green contexts on a recording driver, and the real bindings' signatures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from raymm.actors.quota import cuda_backend
from raymm.actors.quota.cuda_backend import GreenContexts
from raymm.actors.quota.partition import partition
from raymm.errors import InputError, InternalError
from tests.support.fake_driver import CUresult, FakeDriver

HOPPER = dict(minSmPartitionSize=8, smCoscheduledAlignment=8)


def test_streams_of_a_set_are_on_disjoint_multiprocessors():
    driver = FakeDriver(**HOPPER)
    contexts = GreenContexts(driver, 0, 9)
    assert (contexts.gpu.total, contexts.gpu.granularity, contexts.gpu.groups) == (132, 8, 16)
    found = partition({"a": 0.5, "b": 0.3, "c": 0.2}, contexts.gpu)
    sms = [driver.sms_of(contexts.stream(one)) for one in found]
    assert [len(one) for one in sms] == [one.sms for one in found] == [64, 40, 24]
    assert len(frozenset().union(*sms)) == 128
    # One split for all sets.
    assert driver.splits == 1


def test_equal_processes_get_different_multiprocessors():
    """Let each create only its own partition of the same set."""
    quotas, sms = {"vision": 0.6, "audio": 0.4}, []
    for index in range(2):
        driver = FakeDriver(**HOPPER)
        contexts = GreenContexts(driver, 0, 9)
        mine = partition(quotas, contexts.gpu)[index]
        sms.append(driver.sms_of(contexts.stream(mine)))
    assert not sms[0] & sms[1] and len(sms[0] | sms[1]) == 128


def test_the_same_groups_share_a_context_and_streams_go_first():
    driver = FakeDriver(**HOPPER)
    contexts = GreenContexts(driver, 0, 9)
    for quotas in ({"a": 0.5, "b": 0.5}, {"c": 0.5}):
        for one in partition(quotas, contexts.gpu):
            contexts.stream(one)
    assert contexts.num_contexts == 2 and len(driver.streams) == 3
    before = len(driver.calls)
    contexts.close()
    assert driver.calls[before:] == ["cuStreamDestroy"] * 3 + ["cuGreenCtxDestroy"] * 2
    assert not driver.streams and not driver.contexts
    contexts.close()
    assert len(driver.calls) == before + 5


@pytest.mark.parametrize(
    ("fields", "capability", "coscheduled", "granularity", "flags"),
    [
        (HOPPER, 9, True, 8, 0),
        ({}, 9, True, 8, 0),
        ({"minSmPartitionSize": 0, "smCoscheduledAlignment": 0}, 9, True, 8, 0),
        ({}, 8, True, 4, 0),
        ({}, 7, True, 2, 0),
        (HOPPER, 9, False, 2, 1),
    ],
)
def test_granularity(fields, capability, coscheduled, granularity, flags):
    driver = FakeDriver(**fields)
    contexts = GreenContexts(driver, 0, capability, coscheduled)
    assert contexts.gpu.granularity == granularity == driver.count
    assert driver.flags == flags


def test_fewer_groups_than_requested():
    contexts = GreenContexts(FakeDriver(most=14, **HOPPER), 0, 9)
    assert contexts.gpu.groups == 14


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="version 12030; accepted: 12040"):
        GreenContexts(FakeDriver(version=12030), 0, 9)
    with pytest.raises(InputError, match="4 multiprocessors of GPU 0 cannot be split"):
        GreenContexts(FakeDriver(total=4), 0, 9)

    class Old(FakeDriver):
        cuDevSmResourceSplitByCount = None

    with pytest.raises(InputError, match="has no cuDevSmResourceSplitByCount"):
        GreenContexts(Old(), 0, 9)


def test_failures_name_the_call():
    driver = FakeDriver(**HOPPER)
    contexts = GreenContexts(driver, 0, 9)
    (one,) = partition({"a": 0.5}, contexts.gpu)
    driver.fail = "cuGreenCtxCreate"
    with pytest.raises(InternalError, match="cuGreenCtxCreate failed: CUDA_ERROR_INVALID_VALUE"):
        contexts.stream(one)
    driver.fail = None
    driver.contexts.clear()
    contexts.stream(one)
    driver.fail = "cuStreamDestroy"
    with pytest.raises(InternalError, match="cuStreamDestroy failed"):
        contexts.close()
    assert not driver.contexts, "contexts are destroyed all the same"


def test_a_context_of_another_size_is_refused_and_destroyed():
    class Stingy(FakeDriver):
        def cuDevResourceGenerateDesc(self, resources, count):
            return super().cuDevResourceGenerateDesc(resources[:-1], count - 1)

    driver = Stingy(**HOPPER)
    contexts = GreenContexts(driver, 0, 9)
    (one,) = partition({"a": 0.5}, contexts.gpu)
    with pytest.raises(InternalError, match="made a context of 56 multiprocessors for 'a'"):
        contexts.stream(one)
    contexts.close()
    assert not driver.contexts


def test_groups_of_several_locality_domains_are_named():
    """Reject them, as one context cannot have several domains."""

    class Domains(FakeDriver):
        def cuDevSmResourceSplitByCount(self, wanted, whole, flags, count):
            status, groups, made, rest = super().cuDevSmResourceSplitByCount(
                wanted, whole, flags, count
            )
            for i, group in enumerate(groups):
                group.sm.localityDomainId = i // 8
            return status, groups, made, rest

        def cuDevResourceGenerateDesc(self, resources, count):
            if len({one.sm.localityDomainId for one in resources}) > 1:
                return (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None)
            return super().cuDevResourceGenerateDesc(resources, count)

    contexts = GreenContexts(Domains(**HOPPER), 0, 9)
    halves = partition({"a": 0.5, "b": 0.5}, contexts.gpu)
    assert all(contexts.stream(one) for one in halves)
    (most,) = partition({"a": 0.75}, contexts.gpu)
    with pytest.raises(InternalError, match=r"'a': .* spans locality domains \[0, 1\]; accepted"):
        contexts.stream(most)
    contexts.close()


def real_driver():
    return pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)


def used_functions() -> list[str]:
    """Return every driver function that the file calls."""
    source = Path(cuda_backend.__file__).read_text()
    return sorted(set(re.findall(r'"(cu[A-Z]\w+)"', source)))


def test_used_functions_match_the_bindings():
    driver = real_driver()
    fake = FakeDriver()
    names = used_functions()
    assert len(names) == 11
    for name in names:
        theirs = inspect.signature(getattr(driver, name)).parameters
        ours = inspect.signature(getattr(fake, name)).parameters
        assert len(theirs) == len(ours), f"{name}{tuple(theirs)}"


def test_types_and_flags_used_are_in_the_bindings():
    driver = real_driver()
    assert driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM == 1
    assert int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING) == 1
    assert int(driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM) == 1
    assert driver.CUresult.CUDA_SUCCESS.name == "CUDA_SUCCESS"
    assert driver.CUdevResource().sm.smCount == 0
    assert int(driver.CUstream(4096)) == 4096
    flags = [
        one
        for name in dir(driver)
        if name.startswith("CUdevSmResourceSplit")
        for one in getattr(driver, name)
    ]
    ignore = [f for f in flags if f.name.endswith("IGNORE_SM_COSCHEDULING")]
    assert ignore and all(int(f) == cuda_backend.IGNORE_COSCHEDULING for f in ignore)
