"""Streams with quotas of multiprocessors (SMs): several modules of one process run concurrently,
each on a share of the GPU.

Create a backend (:class:`CudaBackend`, or :class:`RecordingBackend` without a GPU) and a
:class:`StreamPool` of all sets of quotas in the plan. Run works with :class:`ConcurrentModules` on
the streams that :meth:`StreamPool.select` returns (Mosaic §3.2).
"""

from raymm.actors.quota.concurrent_modules import ConcurrentModules, check_no_shared_parameters
from raymm.actors.quota.cuda_backend import CudaBackend
from raymm.actors.quota.partition import Multiprocessors, Partition, partition
from raymm.actors.quota.pool import Backend, QuotaStream, Stream, StreamPool, StreamSet
from raymm.actors.quota.recording import Account, QuotaSpan, RecordingBackend
from raymm.actors.quota.work import Output, Work

__all__ = [
    "Account",
    "RecordingBackend",
    "Backend",
    "CudaBackend",
    "Multiprocessors",
    "Output",
    "Partition",
    "QuotaSpan",
    "QuotaStream",
    "ConcurrentModules",
    "Stream",
    "StreamPool",
    "StreamSet",
    "Work",
    "check_no_shared_parameters",
    "partition",
]
