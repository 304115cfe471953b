"""What a process needs of its device's memory beside weights, their state and activations.

Every figure that is no model's own is a constant here, with its source. What only a GPU has
(communicators of NCCL, workspaces of cuBLAS, the allocator's fragments) is nothing on a CPU.

The account is kept once. A GPU's limit is its memory less the driver's context
(:func:`usable_bytes`), and everything else that takes memory is in what a plan needs: a plan is
refused for what it needs, never for a margin that nobody can name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from raymm.scheduler.costs.devices import DEVICES, DeviceSpec
from raymm.scheduler.graph.direction import MESSAGE_BOUND, posted_receives

_MIB = 2**20
Size = TypeVar("Size", float, np.ndarray)  # of one stage, or of many

BUCKET_BYTES = 64 * _MIB
"""Gradients are summed this many bytes at a time, in a buffer that takes over the gradients' place;
while they are copied there both exist."""

CONTEXT_BYTES = 1024 * _MIB
"""Of the driver, for a process: its context, and code of the kernels that it has loaded. A round
figure, above the 0.5 to 0.9 GiB that ``nvidia-smi`` shows beside torch's reserved memory."""

LINK_BYTES = 48 * _MIB
"""Of NCCL, for a pair of processes with messages: a channel per multiprocessor that a message may
occupy, at most 8 (``LINK_CTAS``), each with a buffer of 4 MiB (``NCCL_BUFFSIZE``'s default), and
those of its two protocols for small messages (NVIDIA/nccl, issues 285 and 1450: a buffer per
channel; 986: memory is linear in the number of channels)."""
GROUP_BYTES = 192 * _MIB
"""The same of a group that sums or gathers: 32 channels, NCCL's most on NVLink."""
WORKSPACE_BYTES = 32 * _MIB
"""Of cuBLAS on Hopper, per stream that runs products (torch's notes on CUDA semantics, cuBLAS
workspaces; 8 MiB before Hopper)."""
FRAGMENTATION = 0.03
"""Share of what is allocated anew in every step that lies idle between blocks. With expandable
segments, which ranks have by default, blocks are rounded up to 2 MiB and no more is lost."""


def on_gpu(device: str) -> bool:
    """Whether a profile's device is a GPU that :data:`.devices.DEVICES` has."""
    return device in DEVICES and DEVICES[device].to_host is not None


def receives_ahead(device: str) -> int:
    """Return the number of receives that a rank posts on every edge
    (:func:`~raymm.scheduler.graph.direction.posted_receives`).

    Args:
        device: a profile's.
    """
    return posted_receives(in_order=on_gpu(device))


def usable_bytes(device: DeviceSpec) -> int:
    """Bytes of a device that a plan may use for all that it counts."""
    return device.memory_bytes - (CONTEXT_BYTES if on_gpu(device.name) else 0)


def compute_copy_share(dtype: str) -> float:
    """Bytes of a trainable weight's copy in the compute dtype, which all microbatches of a step
    share, per byte in fp32."""
    return 0.5 if dtype == "bf16" else 0.0


def message_bytes(
    device: str, microbatches: int, received: Size, output: Size, kept: Size, awaited: Size
) -> Size:
    """Bytes of messages between ranks that a stage holds beside what belongs to microbatches.

    Args:
        device: a profile's.
        microbatches: of a step that go through the stage.
        received: bytes of a microbatch's outputs that it gets.
        output: of those that it hands on, unless it keeps them for its backward anyway.
        kept: of the gradients that it hands back.
        awaited: of the gradients that it gets.
    """
    posted = min(receives_ahead(device), microbatches)
    return posted * (received + awaited) + MESSAGE_BOUND * (output + kept)


def communicator_groups(degrees: Sequence[int], sharers: int) -> int:
    """Groups of more than two that a process is in: of all processes, one for each way in which
    those of its rank share work, and those that sum gradients: over replicas, and beside that of
    what tensor parallelism does not share out.

    Args:
        degrees: of its rank, tensor parallelism's second.
        sharers: processes that have the same parameters.
    """
    sums = 1 + (degrees[1] > 1) if sharers > 1 else 0
    return 1 + sum(degree > 1 for degree in degrees) + sums


def idle_share(device: str) -> float:
    """Bytes that the allocator cannot use per byte that is allocated anew in every step."""
    return FRAGMENTATION if on_gpu(device) else 0.0


def system_bytes(device: str, links: int, groups: int) -> float:
    """Bytes that no tensor has: NCCL's, and cuBLAS's for compute's stream and autograd's.

    Args:
        device: a profile's.
        links, groups: communicators of two processes, and of more, that a process has.
    """
    if not on_gpu(device):
        return 0.0
    return links * LINK_BYTES + groups * GROUP_BYTES + 2 * WORKSPACE_BYTES


def update_bytes(
    trained: np.ndarray, largest: np.ndarray, sharers: int, sharding: str
) -> np.ndarray:
    """Bytes that the end of a step takes for itself: a sum's buffer beside the gradients it takes
    over, and, of what processes share out among themselves (ZeRO-1), new values on their way from
    their owners, when other owners' gradients are gone. AdamW is one kernel and takes nothing.

    Args:
        trained: bytes of the trained parameters here, of every stage that is asked for.
        largest: of the layer that has most of them.
        sharers: processes that hold them too, this one included.
        sharding: as of a :class:`~raymm.scheduler.plan.stage.Stage`.
    """
    taken = np.zeros_like(trained)
    if sharers > 1 and sharding != "fsdp":
        taken = np.maximum(taken, np.minimum(trained, np.maximum(BUCKET_BYTES, largest)))
    if sharding == "zero1":
        taken = np.maximum(taken, trained / sharers)
    return taken
