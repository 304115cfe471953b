"""Section on copies between device and host: checkpoints, snapshots, large inputs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import (
    LARGE,
    TINY,
    OneRank,
    Sizes,
    build_model,
    microbatches,
    plan_of,
    step_inputs,
)
from benchmarks.gpu.record import Record
from raymm.packages import is_installed

# About 350 million parameters: 4 GB with both moments of AdamW.
FOUR_GB = replace(LARGE, llm=LARGE.llm | {"num_hidden_layers": 3, "vocab_size": 8000})
# 57 images of 1.8 MB each.
IMAGES = replace(
    LARGE, vision=LARGE.vision | {"num_hidden_layers": 2, "patch_size": 32},
    llm=LARGE.llm | {"num_hidden_layers": 2, "vocab_size": 8000}, rows=57, text=64,
)  # fmt: skip
COPIES, STEPS = 3, 5


def run(device: Device, record: Record) -> None:
    """Measure checkpoints and snapshots of one rank, then a rank with large inputs."""
    rank = make_rank(device, device.choose(FOUR_GB, TINY))
    rank.step()
    record.part("checkpoint", partial(checkpoint, device, rank))
    record.part("snapshot", partial(snapshot, device, rank))
    rank.close()
    record.part("large inputs", partial(large_inputs, device, device.choose(IMAGES, TINY)))


def make_rank(device: Device, sizes: Sizes) -> OneRank:
    """Build a rank of the model in bf16."""
    model = build_model(sizes)
    inputs = step_inputs(microbatches(sizes))
    return OneRank(model, plan_of(device, model, sizes), device.kind, "bfloat16", *inputs)


def checkpoint(device: Device, rank: OneRank) -> Mapping[str, Any]:
    """Measure a step, and one with a checkpoint's copy in the background.

    In milliseconds: the steps, the host's time to start the copy, and the time until all data are
    in host memory, the first time, when memory is pinned, and later. Also the seconds to write the
    copy to a disk, if the package for its checksums is installed.

    Raises:
        AssertionError: a value is not finite, or nothing was written.
    """
    plain = step_seconds(device, rank)
    begun, copied, besides, size = [], [], [], 0
    for _ in range(device.choose(COPIES, 2)):
        device.synchronize()
        start = time.perf_counter()
        size = rank.actor.copy_state(frozenset())
        begun.append(time.perf_counter() - start)
        copy = rank.actor._host_copy
        assert copy is not None
        copy._tensors.result()
        copied.append(time.perf_counter() - start)
        device.synchronize()
        start = time.perf_counter()
        rank.actor.copy_state(frozenset())
        rank.step()
        device.synchronize()
        besides.append(time.perf_counter() - start)
        copy._tensors.result()
    found: dict[str, Any] = {"write_s": "without xxhash"}
    if is_installed("xxhash"):
        with tempfile.TemporaryDirectory(prefix="raymm-gpu-") as folder:
            start = time.perf_counter()
            written = rank.actor.write_copy(folder)
            write = time.perf_counter() - start
        assert written.shards and not written.not_finite, written.not_finite
        found = {"write_s": round(write, 2), "write_gb_per_s": round(size / write / 1e9, 2)}
    return {
        "gb": round(size / 1e9, 3),
        "step_ms": round(1e3 * plain, 2),
        "step_with_copy_ms": round(1e3 * statistics.median(besides), 2),
        "begin_ms": round(1e3 * min(begun[1:]), 2),
        "first_ms": round(1e3 * copied[0], 1),
        "copied_ms": round(1e3 * min(copied[1:]), 1),
        "gb_per_s": round(size / min(copied[1:]) / 1e9, 2),
        **found,
    }


def snapshot(device: Device, rank: OneRank) -> Mapping[str, Any]:
    """Return milliseconds of a snapshot: start on the training thread, delivery, and restore.

    Raises:
        AssertionError: parameters differ from those of the snapshot.
    """
    times = []
    steps = handed = None
    for _ in range(device.choose(COPIES, 1)):
        device.synchronize()
        start = time.perf_counter()
        rank.actor.copy_snapshot()
        begun = time.perf_counter() - start
        steps, handed = rank.actor.hand_over_snapshot()
        times.append((begun, time.perf_counter() - start))
    assert handed is not None and steps
    before = {name: t.detach().clone() for name, t in rank.actor.parameters().items()}
    rank.step()
    device.synchronize()
    start = time.perf_counter()
    rank.actor.restore_snapshot(handed)
    device.synchronize()
    restore = time.perf_counter() - start
    after = rank.actor.parameters()
    assert all(torch.equal(t, before[name]) for name, t in after.items()), "not restored"
    # Parameters and both moments of AdamW, in fp32.
    size = 12 * sum(t.numel() for t in before.values())
    begin, hand = (min(each) for each in zip(*times, strict=True))
    return {
        "gb": round(size / 1e9, 3),
        "begin_ms": round(1e3 * begin, 2),
        "handed_over_ms": round(1e3 * hand, 1),
        "gb_per_s": round(size / hand / 1e9, 2),
        "restore_ms": round(1e3 * restore, 1),
    }


def step_seconds(device: Device, rank: OneRank) -> float:
    """Return the median of several steps."""
    times = []
    for _ in range(device.choose(STEPS, 1)):
        device.synchronize()
        start = time.perf_counter()
        rank.step()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def large_inputs(device: Device, sizes: Sizes) -> Mapping[str, Any]:
    """Return seconds of a step with images on the host, and with images on the device.

    The difference is the cost of the copy.
    """
    rank = make_rank(device, sizes)
    for _ in range(device.choose(2, 1)):
        rank.step()
    from_host = step_seconds(device, rank)
    size = rank.move_inputs(device.torch)
    on_device = step_seconds(device, rank)
    rank.close()
    cost = from_host - on_device
    return {
        "mb_per_microbatch": round(size / sizes.microbatches / 1e6, 1),
        "microbatches": sizes.microbatches,
        "from_host_s": round(from_host, 4),
        "on_device_s": round(on_device, 4),
        "copies_cost_ms": round(1e3 * cost, 1),
        "copies_share": round(cost / from_host, 4),
    }
