"""Section that compiles FlexAttention's kernels into the caches on disk before they are timed.

Compilation takes longer than all measurements together, and runs in several processes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import attention
from benchmarks.gpu.device import Device
from benchmarks.gpu.record import Record


def run(device: Device, record: Record, share: tuple[int, int]) -> None:
    """Compile this process's share of patterns and lengths."""
    number, count = share
    rows = [(p, n) for n in attention.lengths(device) for p in attention.patterns(device)]
    for pattern, length in rows[number::count]:
        record.part(f"{pattern} {length}", partial(compile_pattern, device, pattern, length))


def compile_pattern(device: Device, pattern: str, length: int) -> Mapping[str, Any]:
    """Run forward and backward once; on a CPU only the forward."""
    shape = attention.heads(device)
    mask = attention.build_mask(pattern, length)
    *inputs, grad_out = attention.make_tensors(device, length, shape)
    torch.compiler.reset()
    attend = attention.flex(device, pattern, mask)
    out = attend(*(t if device.is_gpu else t.detach() for t in inputs))
    if device.is_gpu:
        torch.autograd.grad(out, inputs, grad_out)
    device.synchronize()
    device.release()
    return {"visible_pairs": mask.area()}
