"""Fake of ``cuda.bindings.driver`` for green contexts.

It records all calls and is as strict as the driver API's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import NamedTuple


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914
    CUDA_ERROR_STREAM_DETACHED = 917
    CUDA_ERROR_NOT_SUPPORTED = 801


class Resource:
    """SMs by number, and the split that created them."""

    def __init__(self, sms, split, **fields) -> None:
        self.sms, self.split = frozenset(sms), split
        self.sm = SimpleNamespace(smCount=len(self.sms), **fields)


class Queues:
    """Use of hardware queues by contexts: number of streams, on all or on separate queues."""

    def __init__(self, limit: int, scope: int) -> None:
        self.wqConfig = SimpleNamespace(wqConcurrencyLimit=limit, sharingScope=scope)

    @property
    def asked(self) -> tuple[int, int]:
        return self.wqConfig.wqConcurrencyLimit, self.wqConfig.sharingScope


class Description(NamedTuple):
    """Argument for the creation of a context; not a resource itself."""

    sms: frozenset[int]
    queues: tuple[int, int] | None


class Context(NamedTuple):
    """Resources of a green context, and the hardware queues of its streams."""

    resource: Resource
    queues: Queues
    numbers: frozenset[int]

    @property
    def sms(self) -> frozenset[int]:
        return self.resource.sms


class FakeDriver:
    """Fake driver.

    Attributes:
        calls: names of the called functions, in order.
        contexts: existing green contexts.
        connections: hardware queues, ``CUDA_DEVICE_MAX_CONNECTIONS``.
        streams: contexts of the existing streams.
        primary_active: True if the primary context is active; creating or destroying a green
            context while it is inactive sets it up or tears it down (:attr:`primary_setups`), which
            is slow.
        pending: kernels in flight; there must be none when a stream or context is destroyed.
    """

    CUresult = CUresult
    CUdevResourceType = SimpleNamespace(
        CU_DEV_RESOURCE_TYPE_SM=1, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG=1000
    )
    CUdevWorkqueueConfigScope = SimpleNamespace(
        CU_WORKQUEUE_SCOPE_DEVICE_CTX=0, CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED=1
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)

    def __init__(
        self, total=132, version=13000, most=None, connections=32, balances=True, **fields
    ) -> None:
        self.total, self.version, self.most, self.fields = total, version, most, fields
        self.connections, self.balances = connections, balances
        self.calls: list[str] = []
        self.contexts: dict[int, Context] = {}
        self.streams: dict[int, int] = {}
        self.splits = 0
        self.next = 100
        self.fail: str | None = None
        self.initialized = False
        self.primary_active = True
        self.primary_setups = 0
        self.pending: Callable[[], int] = lambda: 0

    def _done(self, name, *results):
        self.calls.append(name)
        if self.fail == name:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, *(None for _ in results))
        if not self.initialized:
            return (CUresult.CUDA_ERROR_NOT_INITIALIZED, *(None for _ in results))
        return (CUresult.CUDA_SUCCESS, *results)

    def _refused(self, name, error, results=1):
        self.calls.append(name)
        return (error, *(None for _ in range(results)))

    def _handle(self):
        self.next += 1
        return self.next

    def _setup_primary(self):
        self.primary_setups += not self.primary_active

    def cuInit(self, flags):
        self.initialized = True
        return self._done("cuInit")

    def cuDriverGetVersion(self):
        return self._done("cuDriverGetVersion", self.version)

    def cuDeviceGet(self, ordinal):
        return self._done("cuDeviceGet", f"device {ordinal}")

    def cuDeviceGetDevResource(self, device, kind):
        if device != "device 0":
            return self._refused("cuDeviceGetDevResource", CUresult.CUDA_ERROR_INVALID_DEVICE)
        if kind == 1000 and self.version >= 13010:
            return self._done("cuDeviceGetDevResource", Queues(self.connections, 0))
        if kind != 1:
            return self._refused("cuDeviceGetDevResource", CUresult.CUDA_ERROR_NOT_SUPPORTED)
        whole = Resource(range(self.total), None, **self.fields)
        return self._done("cuDeviceGetDevResource", whole)

    def cuDevSmResourceSplitByCount(self, wanted, whole, flags, count):
        if wanted < 1 or count < 1 or not isinstance(whole, Resource):
            return self._refused(
                "cuDevSmResourceSplitByCount", CUresult.CUDA_ERROR_INVALID_VALUE, 3
            )
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
        name = "cuDevResourceGenerateDesc"
        if not count or count != len(resources) or None in resources:
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_VALUE)
        queues = [one for one in resources if isinstance(one, Queues)]
        parts = [one for one in resources if not isinstance(one, Queues)]
        alike = len({one.split for one in parts}) == 1 and len(set(parts)) == len(parts)
        known = len(queues) <= (self.version >= 13010)
        if not alike or not known or any(one.wqConfig.wqConcurrencyLimit < 1 for one in queues):
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)
        sms = frozenset().union(*(one.sms for one in parts))
        return self._done(name, Description(sms, queues[0].asked if queues else None))

    def cuGreenCtxCreate(self, description, device, flags):
        name = "cuGreenCtxCreate"
        if not isinstance(description, Description) or flags != 1:
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_VALUE)
        if device != "device 0":
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_DEVICE)
        handle = self._handle()
        result = self._done(name, handle)
        self._setup_primary()
        limit, scope = description.queues or (self.connections, 0)
        taken = frozenset().union(
            *(c.numbers for c in self.contexts.values() if c.queues.wqConfig.sharingScope)
        )
        free = sorted(set(range(self.connections)) - taken)
        # "When possible": without enough queues, or without driver support, they overlap.
        own = self.balances and scope and len(free) >= limit
        numbers = frozenset(free[:limit] if own else range(self.connections))
        granted = Queues(limit, scope if self.balances else 0)
        self.contexts[handle] = Context(Resource(description.sms, None), granted, numbers)
        return result

    def cuGreenCtxGetDevResource(self, context, kind):
        if context not in self.contexts:
            return self._refused("cuGreenCtxGetDevResource", CUresult.CUDA_ERROR_INVALID_CONTEXT)
        made = self.contexts[context]
        return self._done(
            "cuGreenCtxGetDevResource", made.resource if kind == 1 else made.queues
        )

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        name = "cuGreenCtxStreamCreate"
        if context not in self.contexts:
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        if flags != self.CUstream_flags.CU_STREAM_NON_BLOCKING:
            return self._refused(name, CUresult.CUDA_ERROR_INVALID_VALUE)
        handle = self._handle()
        self.streams[handle] = context
        return self._done(name, handle)

    def cuStreamDestroy(self, stream):
        assert not self.pending(), f"a stream is destroyed with {self.pending()} kernels under way"
        if stream not in self.streams:
            return self._refused("cuStreamDestroy", CUresult.CUDA_ERROR_INVALID_HANDLE, 0)
        if self.streams.pop(stream) not in self.contexts:
            return self._refused("cuStreamDestroy", CUresult.CUDA_ERROR_STREAM_DETACHED, 0)
        return self._done("cuStreamDestroy")

    def cuGreenCtxDestroy(self, context):
        assert not self.pending(), f"a context is destroyed with {self.pending()} kernels under way"
        if context not in self.contexts:
            return self._refused("cuGreenCtxDestroy", CUresult.CUDA_ERROR_INVALID_CONTEXT, 0)
        self._setup_primary()
        del self.contexts[context]
        return self._done("cuGreenCtxDestroy")

    def sms_of(self, stream):
        return self.contexts[self.streams[stream]].sms

    def queues_of(self, stream):
        return self.contexts[self.streams[stream]].numbers
