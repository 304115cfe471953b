"""Device memory that a process needs besides weights, optimizer state and activations.

Every constant here names its source. GPU-only memory (NCCL communicators, cuBLAS workspaces,
allocator fragmentation) counts as 0 on a CPU. A GPU's limit is its memory minus the driver's
context (:func:`usable_bytes`); everything else is part of what a plan needs. So a plan is refused
for memory that it needs and never for an unexplained margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from raymm.scheduler.costs.devices import DEVICES, DeviceSpec
from raymm.scheduler.graph.module_graph import MESSAGE_BOUND, posted_receives

_MIB = 2**20
Size = TypeVar("Size", float, np.ndarray)  # of one stage, or of many

BUCKET_BYTES = 64 * _MIB
"""Gradients are all-reduced in buckets of this size. The bucket replaces the gradients, but during
the copy both exist."""

CONTEXT_BYTES = 1024 * _MIB
"""Driver memory per process: its context, and the code of loaded kernels. Rounded up from the 0.5
to 0.9 GiB that ``nvidia-smi`` shows in addition to torch's reserved memory."""

LINK_BYTES = 48 * _MIB
"""NCCL memory per pair of processes with messages: up to 8 channels (``LINK_CTAS``) with a buffer
of 4 MiB each (``NCCL_BUFFSIZE``'s default), and the buffers of two protocols for small messages
(NVIDIA/nccl, issues 285 and 1450: a buffer per channel; 986: memory is linear in the number of
channels)."""
GROUP_BYTES = 192 * _MIB
"""NCCL memory per process group with collectives: 32 channels, NCCL's maximum on NVLink."""
WORKSPACE_BYTES = 32 * _MIB
"""cuBLAS workspace on Hopper, per stream that runs matrix products (torch's notes on CUDA
semantics, cuBLAS workspaces; 8 MiB before Hopper)."""
FRAGMENTATION = 0.03
"""Fraction of the memory allocated in every step that is lost between blocks. With expandable
segments, the default of ranks, only rounding of blocks to 2 MiB is lost."""


def on_gpu(device: str) -> bool:
    """Return True if a profile's device is a GPU of :data:`.devices.DEVICES`."""
    return device in DEVICES and DEVICES[device].to_host is not None


def receives_ahead(device: str) -> int:
    """Return the number of receives that a rank posts on every edge
    (:func:`~raymm.scheduler.graph.module_graph.posted_receives`)."""
    return posted_receives(in_order=on_gpu(device))


def usable_bytes(device: DeviceSpec) -> int:
    """Return the bytes of a device that a plan may use."""
    return device.memory_bytes - (CONTEXT_BYTES if on_gpu(device.name) else 0)


def compute_copy_share(dtype: str) -> float:
    """Return the bytes of the copy of a trainable weight in the compute dtype per byte of the
    weight in fp32. All microbatches of a step share the copy."""
    return 0.5 if dtype == "bf16" else 0.0


def message_bytes(
    device: str, microbatches: int, received: Size, output: Size, kept: Size, awaited: Size
) -> Size:
    """Return the bytes of messages between ranks that a stage holds, besides those that belong to
    its microbatches.

    Args:
        device: device name in a profile.
        microbatches: microbatches per step that go through the stage.
        received: bytes of the outputs that the stage receives per microbatch.
        output: bytes of the outputs that it sends, unless it keeps them for its backward anyway.
        kept: bytes of the gradients that it sends back.
        awaited: bytes of the gradients that it receives.
    """
    posted = min(receives_ahead(device), microbatches)
    return posted * (received + awaited) + MESSAGE_BOUND * (output + kept)


def communicator_groups(degrees: Sequence[int], sharers: int) -> int:
    """Return the number of process groups of more than two members of a process: all processes, one
    group per degree above 1, and one for gradient sums over replicas (two with tensor parallelism,
    for its replicated parameters).

    Args:
        degrees: degrees of the process's rank; tensor parallelism is second.
        sharers: number of processes with the same parameters.
    """
    sums = 1 + (degrees[1] > 1) if sharers > 1 else 0
    return 1 + sum(degree > 1 for degree in degrees) + sums


def idle_share(device: str) -> float:
    """Return the bytes lost in the allocator per byte allocated in every step."""
    return FRAGMENTATION if on_gpu(device) else 0.0


def system_bytes(device: str, links: int, groups: int) -> float:
    """Return the bytes that belong to no tensor: NCCL's, and cuBLAS's for the streams of compute
    and autograd. ``links`` and ``groups`` count a process's communicators of two and of more
    processes."""
    if not on_gpu(device):
        return 0.0
    return links * LINK_BYTES + groups * GROUP_BYTES + 2 * WORKSPACE_BYTES


def update_bytes(
    trained: np.ndarray, largest: np.ndarray, sharers: int, sharding: str
) -> np.ndarray:
    """Return the temporary bytes at the end of a step, for many stages at once: the bucket of a
    gradient all-reduce and, with ZeRO-1, the new values of parameters from their owners, sent when
    the other gradients are freed. AdamW is one kernel and needs no memory.

    Args:
        trained: bytes of the trained parameters of each stage on this process.
        largest: bytes of the layer with most of them.
        sharers: processes that hold the same parameters, including this one.
    """
    temporary = np.zeros_like(trained)
    if sharers > 1 and sharding != "fsdp":
        temporary = np.maximum(temporary, np.minimum(trained, np.maximum(BUCKET_BYTES, largest)))
    if sharding == "zero1":
        temporary = np.maximum(temporary, trained / sharers)
    return temporary
