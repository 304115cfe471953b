"""A stand-in for ``cuda.bindings.driver`` with what green contexts need, that keeps books and
is as strict as the driver API's documentation."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914
    CUDA_ERROR_STREAM_DETACHED = 917


class Resource:
    """SMs by number, and the split they came from."""

    def __init__(self, sms, split, **fields) -> None:
        self.sms, self.split = frozenset(sms), split
        self.sm = SimpleNamespace(smCount=len(self.sms), **fields)


class FakeDriver:
    CUresult = CUresult
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)

    def __init__(self, total=132, version=13000, most=None, **fields) -> None:
        self.total, self.version, self.most, self.fields = total, version, most, fields
        self.calls: list[str] = []
        self.contexts: dict[int, Resource] = {}
        self.streams: dict[int, int] = {}
        self.splits = 0
        self.next = 100
        self.fail: str | None = None

    def _done(self, name, *results):
        self.calls.append(name)
        if self.fail == name:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, *(None for _ in results))
        return (CUresult.CUDA_SUCCESS, *results)

    def _handle(self):
        self.next += 1
        return self.next

    def cuInit(self, flags):
        return self._done("cuInit")

    def cuDriverGetVersion(self):
        return self._done("cuDriverGetVersion", self.version)

    def cuDeviceGet(self, ordinal):
        return self._done("cuDeviceGet", f"device {ordinal}")

    def cuDeviceGetDevResource(self, device, kind):
        whole = Resource(range(self.total), None, **self.fields)
        return self._done("cuDeviceGetDevResource", whole)

    def cuDevSmResourceSplitByCount(self, wanted, whole, flags, count):
        self.splits += 1
        self.flags, self.count = flags, count
        made = min(wanted, whole.sm.smCount // count, self.most or wanted)
        groups = [
            Resource(range(i * count, (i + 1) * count), self.splits) if i < made else None
            for i in range(wanted)
        ]
        rest = Resource(range(made * count, whole.sm.smCount), self.splits)
        return self._done("cuDevSmResourceSplitByCount", groups, made, rest)

    def cuDevResourceGenerateDesc(self, resources, count):
        assert count == len(resources) > 0
        if len({one.split for one in resources}) > 1:
            return (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None)
        together = Resource(frozenset().union(*(one.sms for one in resources)), None)
        return self._done("cuDevResourceGenerateDesc", together)

    def cuGreenCtxCreate(self, description, device, flags):
        assert device == "device 0" and flags == 1
        handle = self._handle()
        result = self._done("cuGreenCtxCreate", handle)
        self.contexts[handle] = description
        return result

    def cuGreenCtxGetDevResource(self, context, kind):
        return self._done("cuGreenCtxGetDevResource", self.contexts[context])

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        assert flags == 1 and context in self.contexts
        handle = self._handle()
        self.streams[handle] = context
        return self._done("cuGreenCtxStreamCreate", handle)

    def cuStreamDestroy(self, stream):
        if self.streams.pop(stream) not in self.contexts:
            return (CUresult.CUDA_ERROR_STREAM_DETACHED,)
        return self._done("cuStreamDestroy")

    def cuGreenCtxDestroy(self, context):
        del self.contexts[context]
        return self._done("cuGreenCtxDestroy")

    def sms_of(self, stream):
        return self.contexts[self.streams[stream]].sms
