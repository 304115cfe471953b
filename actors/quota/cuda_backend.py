"""SM-quota streams on a CUDA device: torch streams in green contexts, which are created through the
driver's API (``cuda.bindings.driver``).

Only multiprocessors are limited. Memory, memory bandwidth and the L2 cache are shared, so work on
disjoint multiprocessors *may* overlap. With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` or
``CUDA_LAUNCH_BLOCKING=1`` it cannot overlap, so these settings are rejected. Kernels may also wait
for each other if their streams share a hardware queue. From CUDA 13.1 on, contexts request queues
that do not overlap with those of other contexts (CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED); the driver
API grants them "when possible".

The GPU's multiprocessors are split *once*, into groups of the smallest size. A green context is
created from a run of groups: one descriptor may combine several outputs of the same split
(cuDevResourceGenerateDesc). This gives partitions of any number of groups, disjoint within every
set, with every driver that supports green contexts (12.4). ``cuda.core`` splits into unequal parts
only from 13.1 on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import torch

from raymm.actors.quota.partition import Multiprocessors, Partition
from raymm.errors import InputError, InternalError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
BLOCKING = "CUDA_LAUNCH_BLOCKING"
OLDEST_DRIVER = 12040  # CUDA 12.4 in the format of cuDriverGetVersion
# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING; its enum has a different name in every version.
IGNORE_COSCHEDULING = 1
# Smallest group by major compute capability if the driver does not report it, from the driver API's
# chapter on green contexts; and the smallest group without coscheduling.
SMALLEST_GROUP = {6: 1, 7: 2, 8: 4}
SMALLEST_GROUP_SINCE_9 = 8
SMALLEST_INDEPENDENT_GROUP = 2
WORKQUEUES_SINCE = 13010  # CUDA 13.1: contexts can request separate work queues
# Concurrent streams of a context: one per module. The driver keeps the queues of contexts apart
# while their total is at most CUDA_DEVICE_MAX_CONNECTIONS.
STREAMS_PER_CONTEXT = 1


class CudaStream:
    """Torch stream with the interface of :class:`raymm.actors.quota.pool.Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch_stream = stream

    def record(self) -> torch.cuda.Event:
        return cast(torch.cuda.Event, self.torch_stream.record_event())

    def wait(self, event: torch.cuda.Event) -> None:
        self.torch_stream.wait_event(event)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.torch_stream)


class CudaQuotaStream(CudaStream):
    """Torch stream whose kernels run on a partition's multiprocessors: an ``ExternalStream`` in a
    green context, or an ordinary stream if the partition is the whole GPU."""

    def __init__(self, partition: Partition, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.partition = partition

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.cuda.stream(self.torch_stream):
            yield


class CudaBackend:
    """Streams of one GPU with quotas; ``coscheduled`` as in :class:`GreenContexts`.

    Raises:
        InputError: no CUDA device, no cuda-python, a driver before 12.4, or environment variables
            that prevent streams from overlapping.
    """

    def __init__(self, device: torch.device | int | None = None, coscheduled: bool = True) -> None:
        _check_environment()
        try:
            # The module is found by an import hook, which type checkers do not run.
            from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise InputError(f"cuda-python cannot be imported: {error}") from error
        self.device = torch.device("cuda", _ordinal(device))
        # The first allocation activates the primary context, which green contexts depend on.
        torch.empty(1, device=self.device)
        self._contexts = GreenContexts(
            driver, self.device.index, torch.cuda.get_device_capability(self.device)[0], coscheduled
        )
        self.gpu, self.queues = self._contexts.gpu, self._contexts.queues
        self._streams: dict[tuple[str, int, int, bool], torch.cuda.Stream] = {}

    def create(self, partition: Partition, colocated: Sequence[Partition] = ()) -> CudaQuotaStream:
        """Return a stream on a partition. Partitions of a module with the same groups in different
        sets share one: cuBLAS keeps a workspace (32 MiB on an H100) per stream, and backward uses
        its forward's stream."""
        key = (partition.module, partition.first_group, partition.groups, partition.whole)
        if key not in self._streams:
            self._streams[key] = self._new_stream(partition)
        return CudaQuotaStream(partition, self._streams[key])

    def _new_stream(self, partition: Partition) -> torch.cuda.Stream:
        if partition.whole:
            return torch.cuda.Stream(self.device)
        address = self._contexts.stream(partition)
        return torch.cuda.ExternalStream(address, device=self.device)

    def current(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for the device, free the streams' cached memory, and destroy them. When a tensor is
        freed, the allocator records an event on every stream that has read it. Tensors and autograd
        graphs of these streams must therefore be freed before."""
        torch.cuda.synchronize(self.device)
        self._streams.clear()
        # Not public in torch 2.13; without this call the workspaces of destroyed streams stay
        # allocated.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
        self._contexts.close()


def _ordinal(device: torch.device | int | None) -> int:
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    return torch.cuda.current_device() if device.index is None else device.index


def _check_environment() -> None:
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device; use RecordingBackend instead")
    if os.environ.get(CONNECTIONS) == "1":
        raise InputError(
            f"{CONNECTIONS} is '1': the GPU would serialize different streams; accepted: "
            "unset, or at least the number of streams that run at the same time"
        )
    if os.environ.get(BLOCKING, "0") not in ("", "0"):
        raise InputError(
            f"{BLOCKING} is {os.environ[BLOCKING]!r}: every launch would wait for its kernel, "
            "which serializes different streams; accepted: unset or 0"
        )


class GreenContexts:
    """Green contexts of one device, and streams in them.

    The device's primary context should be active before; otherwise it would be created and
    destroyed with every green context. Not thread-safe.

    Args:
        coscheduled: True to keep multiprocessors together that thread block clusters need. False
            gives groups of 2 and finer shares, but large clusters may fail to launch.

    Attributes:
        queues: text that says if contexts have separate work queues, and if not, why.

    Raises:
        InputError: the driver is too old, or the GPU cannot be split.
        InternalError: a driver call failed.
    """

    def __init__(
        self, driver: ModuleType, ordinal: int, capability: int, coscheduled: bool = True
    ) -> None:
        self._driver = driver
        self._call("cuInit", 0)
        version = self._call("cuDriverGetVersion")
        if version < OLDEST_DRIVER:
            raise InputError(
                f"the CUDA driver is version {version}; accepted: {OLDEST_DRIVER} (12.4) or newer"
            )
        self._device = self._call("cuDeviceGet", ordinal)
        self._sms = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        resource = self._call("cuDeviceGetDevResource", self._device, self._sms)
        self._groups = self._split(
            resource, _granularity(resource, capability, coscheduled), coscheduled
        )
        if not self._groups:
            raise InputError(
                f"the {resource.sm.smCount} multiprocessors of GPU {ordinal} cannot be split"
            )
        self.gpu = Multiprocessors(
            resource.sm.smCount, self._groups[0].sm.smCount, len(self._groups)
        )
        self._workqueues, self.queues = self._own_workqueues(version)
        self._contexts: dict[tuple[int, int], Any] = {}
        self._streams: list[Any] = []

    def _split(self, whole: Any, granularity: int, coscheduled: bool) -> list[Any]:
        flags = 0 if coscheduled else IGNORE_COSCHEDULING
        count = whole.sm.smCount // granularity
        if count < 1:
            return []
        # The driver may create fewer and larger groups than requested.
        groups, num_groups, _ = self._call(
            "cuDevSmResourceSplitByCount", count, whole, flags, granularity
        )
        return list(groups[:num_groups])

    def _own_workqueues(self, version: int) -> tuple[list[Any], str]:
        """Return a list with a resource that requests separate work queues, or an empty list; and a
        text for :attr:`queues`."""
        scopes = getattr(self._driver, "CUdevWorkqueueConfigScope", None)
        if version < WORKQUEUES_SINCE or scopes is None:
            cause = f"driver is version {version}" if scopes else "installed cuda-python is too old"
            return [], f"work queues are shared: the {cause}; separate ones need {WORKQUEUES_SINCE}"
        kind = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
        try:
            queues = self._call("cuDeviceGetDevResource", self._device, kind)
        except InternalError as error:
            return [], f"work queues are shared: {error}"
        most = queues.wqConfig.wqConcurrencyLimit
        queues.wqConfig.sharingScope = scopes.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
        queues.wqConfig.wqConcurrencyLimit = STREAMS_PER_CONTEXT
        report = f"each context has its own work queues, up to {most} (CUDA_DEVICE_MAX_CONNECTIONS)"
        return [queues], report

    def stream(self, partition: Partition) -> int:
        """Create a stream that is limited to a partition's multiprocessors; return its address.
        Partitions of the same groups share a green context. Raise an ``InternalError`` if a driver
        call failed, or the driver created a context with another number of multiprocessors."""
        context = self._context(partition)
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._call("cuGreenCtxStreamCreate", context, int(flags), 0)
        self._streams.append(stream)
        return int(stream)

    def _context(self, partition: Partition) -> Any:
        key = (partition.first_group, partition.groups)
        if key not in self._contexts:
            first, count = key
            groups = self._groups[first : first + count]
            description = self._describe([*groups, *self._workqueues], partition)
            flags = self._driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            context = self._call("cuGreenCtxCreate", description, self._device, int(flags))
            self._contexts[key] = context
            sms = self._call("cuGreenCtxGetDevResource", context, self._sms).sm.smCount
            if sms != partition.sms:
                raise InternalError(
                    f"cuGreenCtxCreate made a context of {sms} multiprocessors for {partition}"
                )
            self._check_workqueues(context)
        return self._contexts[key]

    def _check_workqueues(self, context: Any) -> None:
        for asked in self._workqueues:
            kind = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
            granted = self._call("cuGreenCtxGetDevResource", context, kind)
            if granted.wqConfig.sharingScope != asked.wqConfig.sharingScope:
                raise InternalError(
                    "cuGreenCtxCreate made a context that shares work queues (scope "
                    f"{granted.wqConfig.sharingScope}); requested: {asked.wqConfig.sharingScope}"
                )

    def _describe(self, parts: list[Any], partition: Partition) -> Any:
        """Return the descriptor of a context. On GPUs with several locality domains, all groups of
        a context must be in one domain; bindings before 13 do not report the domain of a group."""
        try:
            return self._call("cuDevResourceGenerateDesc", parts, len(parts))
        except InternalError as error:
            groups = parts[: len(parts) - len(self._workqueues)]
            domains = sorted({getattr(group.sm, "localityDomainId", 0) for group in groups})
            if len(domains) == 1:
                raise
            raise InternalError(
                f"{error}: {partition} spans locality domains {domains}; accepted: quotas whose "
                "groups each lie in one domain"
            ) from error

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    def close(self) -> None:
        """Destroy streams, then their contexts. All are attempted; the first failure is raised at
        the end."""
        failures = []
        for name, handles in (
            ("cuStreamDestroy", self._streams[::-1]),
            ("cuGreenCtxDestroy", list(self._contexts.values())[::-1]),
        ):
            for handle in handles:
                try:
                    self._call(name, handle)
                except InternalError as error:
                    failures.append(error)
        self._streams.clear()
        self._contexts.clear()
        if failures:
            raise failures[0]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; return its results: None, one value, or a tuple."""
        function = getattr(self._driver, name, None)
        if function is None:
            raise InputError(f"the installed cuda-python has no {name}; accepted: 12.6 or newer")
        status, *results = function(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise InternalError(f"{name} failed: {getattr(status, 'name', status)}")
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None


def _granularity(whole: Any, capability: int, coscheduled: bool) -> int:
    if not coscheduled:
        return 1 if capability < 7 else SMALLEST_INDEPENDENT_GROUP
    # CUDA 13 added these fields: older drivers leave them 0, older bindings lack them.
    smallest = max(
        getattr(whole.sm, "minSmPartitionSize", 0), getattr(whole.sm, "smCoscheduledAlignment", 0)
    )
    return smallest or SMALLEST_GROUP.get(capability, SMALLEST_GROUP_SINCE_9)
