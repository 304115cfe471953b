"""Block sizes, warps and pipeline stages of the Triton attention kernels.

Configurations come from a table. Autotuning at run time would need a device, and ranks that share a
step could choose differently. Entries must not spill registers and must fit the shared memory of
sm_90 (`tests/kernels/flash/test_compile_gate.py` compiles every entry).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 32, 512
HEAD_DIM_MULTIPLE = 8
"""Elements; rows must be aligned to 16 bytes."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MERGE_ROWS = 16
"""Rows of a block that one program merges."""
SMALL_OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of the small kernels; other options have their defaults."""


@dataclass(frozen=True)
class KernelConfig:
    """Launch configuration of one kernel.

    Attributes:
        block_q, block_k: rows and keys of a tile; multiples of 16.
        stages: tiles in flight in the software pipeline.
        precision: precision of fp32 products: "tf32x3" (three TF32 products on tensor cores, as
            accurate as fp32) or "ieee" (fp32 units, where splitting operands would spill
            registers). Ignored for 16-bit types.
        two_passes: compute gradients of keys and of values in separate launches, if two
            accumulators would spill: 5 products per tile instead of 4.
        unordered: backward_key only: also sum the query's gradient, in any order.
        descriptors: load tiles by the tensor memory accelerator (TMA), from tensor descriptors.
            Threads then hold no addresses, which leaves registers for larger tiles.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    precision: str = "tf32x3"
    two_passes: bool = False
    unordered: bool = False
    descriptors: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """Configurations of the three large kernels."""

    forward: KernelConfig
    backward_query: KernelConfig
    backward_key: KernelConfig


@dataclass(frozen=True)
class Launch:
    """Options of the launches of an attention call.

    Attributes:
        processors: multiprocessors to balance long rows over; default those of the device, fewer if
            a share of the device is used. The last bits of results depend on the number, because
            sums are split differently.
        config: launch configurations; default from a table.
        unordered: sum the query's gradient in any order, if a kernel for it exists. Backward then
            computes five products per tile instead of seven, and the last bits of gradients differ
            from run to run.
    """

    processors: int | None = None
    config: AttentionConfig | None = None
    unordered: bool = False


DEFAULT_LAUNCH = Launch()

# By padded head dim. All use more than half of an SM's registers, so one program runs per SM.
_HALF = {
    32: AttentionConfig(
        KernelConfig(128, 128, 8, 2), KernelConfig(128, 64, 8, 3), KernelConfig(64, 128, 8, 2)
    ),
    64: AttentionConfig(
        KernelConfig(128, 128, 8, 3), KernelConfig(128, 64, 8, 3), KernelConfig(64, 128, 8, 2)
    ),
    128: AttentionConfig(
        KernelConfig(128, 64, 8, 3), KernelConfig(128, 64, 8, 2), KernelConfig(32, 128, 8, 2)
    ),
    256: AttentionConfig(
        KernelConfig(128, 32, 8, 3),
        KernelConfig(128, 32, 8, 2),
        KernelConfig(32, 128, 8, 2, two_passes=True),
    ),
    # Gemma 4's layers with full attention.
    512: AttentionConfig(
        KernelConfig(32, 16, 8, 3),
        KernelConfig(32, 32, 8, 2),
        KernelConfig(32, 32, 8, 2, two_passes=True),
    ),
}
# Softcap needs a few more registers.
_HALF_SOFTCAP = {
    **_HALF,
    64: replace(_HALF[64], backward_key=KernelConfig(32, 128, 8, 3)),
    128: replace(_HALF[128], backward_key=KernelConfig(32, 128, 8, 2, two_passes=True)),
    256: replace(_HALF[256], backward_key=KernelConfig(16, 128, 8, 2, two_passes=True)),
}
_TMA = partial(KernelConfig, warps=8, descriptors=True)
# With tensor descriptors, on sm_90 and later. Every product is at least 64 columns wide, except in
# the gradients at 256 columns, where wider products spill.
_DESCRIPTORS = {
    32: AttentionConfig(
        _TMA(128, 128, stages=2), _TMA(128, 64, stages=3), _TMA(64, 128, stages=2)
    ),
    64: AttentionConfig(
        _TMA(128, 128, stages=3), _TMA(128, 128, stages=2), _TMA(64, 128, stages=2)
    ),
    128: AttentionConfig(
        _TMA(128, 128, stages=2), _TMA(128, 64, stages=2), _TMA(64, 128, stages=2)
    ),
    256: AttentionConfig(
        _TMA(128, 64, stages=2),
        _TMA(128, 32, stages=2),
        _TMA(32, 128, stages=2, two_passes=True),
    ),
}
_DESCRIPTORS_SOFTCAP = {
    **_DESCRIPTORS,
    128: replace(
        _DESCRIPTORS[128], backward_key=_TMA(64, 128, stages=2, two_passes=True)
    ),
}
# Gradients of keys, values and query in one launch, by padded head dim.
_UNORDERED = {
    64: _TMA(128, 128, stages=1, unordered=True),
    128: _TMA(64, 128, stages=2, unordered=True),
}
# fp32. Entries use 16 warps where 8 would spill a few registers.
_SINGLE = {
    32: AttentionConfig(
        KernelConfig(128, 64, 8, 2), KernelConfig(128, 32, 8, 2), KernelConfig(32, 128, 8, 2)
    ),
    64: AttentionConfig(
        KernelConfig(128, 32, 8, 2),
        KernelConfig(128, 32, 8, 2),
        KernelConfig(32, 32, 8, 1, "ieee"),
    ),
    128: AttentionConfig(
        KernelConfig(32, 16, 8, 1, "ieee"),
        KernelConfig(32, 16, 16, 1, "ieee"),
        KernelConfig(16, 32, 8, 1, "ieee"),
    ),
    256: AttentionConfig(
        KernelConfig(32, 16, 16, 1, "ieee"),
        KernelConfig(16, 16, 16, 1, "ieee"),
        KernelConfig(16, 16, 8, 1, "ieee"),
    ),
    512: AttentionConfig(*[KernelConfig(16, 16, 16, 1, "ieee", two_passes=True)] * 3),
}


def padded_head_dim(head_dim: int) -> int:
    """Return the columns that the kernels compute with: the next power of two."""
    return 1 << (head_dim - 1).bit_length()


def statistics_rows(head_dim: int) -> int:
    """Return the rows per program of the row statistics kernel, limited by registers."""
    return min(64, (1 << 14) // padded_head_dim(head_dim))


def attention_config(
    head_dim: int,
    dtype: torch.dtype,
    *,
    softcap: bool = False,
    descriptors: bool = False,
    unordered: bool = False,
) -> AttentionConfig:
    """Return the launch configurations for a head dim and dtype.

    Args:
        descriptors: True if device and tensors allow tensor descriptors. They are used where they
            are faster: for 16-bit types up to 256 columns.
        unordered: True if gradients may be summed in any order. This is used where it saves
            products without spilling: with descriptors, 33 to 128 columns, without softcap.

    Raises:
        ValueError: the head dim is above 512, or the dtype is not bf16, fp16 or fp32.
    """
    if head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"head dim must be at most {LARGEST_HEAD_DIM}, got {head_dim}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    columns = padded_head_dim(head_dim)
    if dtype == torch.float32:
        return _SINGLE[columns]
    if descriptors and columns in _DESCRIPTORS:
        config = (_DESCRIPTORS_SOFTCAP if softcap else _DESCRIPTORS)[columns]
        if unordered and not softcap and columns in _UNORDERED:
            return replace(config, backward_key=_UNORDERED[columns])
        return config
    return (_HALF_SOFTCAP if softcap else _HALF)[columns]


def constants(
    config: KernelConfig, head_dim: int, *, bits: bool, softcap: bool, interpreted: bool = False
) -> dict[str, Any]:
    """Return the compile-time arguments that the large kernels share.

    Args:
        bits: True if masks hide kinds of keys.
        interpreted: True if Triton's interpreter runs the kernel.
    """
    return {
        "BITS": bits,
        "SOFTCAP": softcap,
        "D": head_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "M": config.block_q,
        "N": config.block_k,
        "PRECISION": config.precision,
        "UPCAST": interpreted,
        "TMA": config.descriptors,
    }


def options(config: KernelConfig) -> dict[str, Any]:
    """Return the compiler options of a kernel."""
    return {"num_warps": config.warps, "num_stages": config.stages, **SMALL_OPTIONS}


def key_passes(config: KernelConfig, *, with_query: bool = False) -> list[dict[str, bool]]:
    """Return the compile-time arguments of each launch for the gradients of keys and values.
    ``with_query`` adds the query's gradient to them."""
    passes = [(True, True)] if not config.two_passes else [(False, True), (True, False)]
    return [
        {"FOR_KEY": key, "FOR_VALUE": value, "FOR_QUERY": with_query} for key, value in passes
    ]


def scales(head_dim: int, scale: float | None, softcap: float | None) -> tuple[float, float, float]:
    """Return the kernels' scalar arguments: the factor inside the tanh (2 log2(e) scale / softcap;
    unused without softcap), the factor of scores in base 2, and the scale (default ``D ** -0.5``).

    Raises:
        ValueError: scale or softcap is not positive.
    """
    scale = float(head_dim**-0.5 if scale is None else scale)
    if not scale > 0 or math.isinf(scale):
        raise ValueError(f"scale must be positive, got {scale}")
    if softcap is None:
        return 0.0, scale * math.log2(math.e), scale
    if not softcap > 0 or math.isinf(softcap):
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    return 2 * math.log2(math.e) * scale / softcap, softcap * math.log2(math.e), scale
