"""Checks and layouts of query, key and value for the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from raymm.kernels.flash.gpu.forward import attention_forward
from raymm.kernels.flash.gpu.ops import STRIDE_UNIT
from raymm.kernels.mask.mask import AttentionMask

INTERPRETED = not isinstance(attention_forward, triton.JITFunction)
"""True if the kernels run on the CPU (TRITON_INTERPRET=1 was set when they were imported)."""
_ALIGNMENT = 16  # bytes
_DESCRIPTOR_ARCHITECTURE = 9
"""Lowest CUDA compute capability (major) with tensor descriptors."""


def check_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: Sequence[AttentionMask],
) -> None:
    """Check that the kernels can read the tensors.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        masks: one (Tq, Tk) mask per sequence.

    Raises:
        ValueError: shapes do not fit one another, dtypes or devices differ, or tensors are not on a
            CUDA device (unless Triton interprets).
    """
    if {query.dim(), key.dim(), value.dim()} != {4} or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            "query must be (B, Hq, Tq, D), key (B, Hk, Tk, D) and value (B, Hk, Tk, Dv), got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    batch, heads, n_queries, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim or not key.shape[1]:
        raise ValueError(f"key {tuple(key.shape)} does not fit query {tuple(query.shape)}")
    if heads % key.shape[1]:
        raise ValueError(f"{heads} query heads are not a multiple of {key.shape[1]} key heads")
    if (
        len({t.dtype for t in (query, key, value)}) > 1
        or len({t.device for t in (query, key, value)}) > 1
    ):
        raise ValueError("query, key and value must have one dtype and device")
    if len(masks) != batch:
        raise ValueError(f"got {len(masks)} masks for a batch of {batch}")
    for index, mask in enumerate(masks):
        if mask.shape != (n_queries, key.shape[2]):
            raise ValueError(
                f"mask {index} is {mask.shape}, the tensors have {(n_queries, key.shape[2])}"
            )
    if not query.is_cuda and not INTERPRETED:
        raise ValueError(
            f"tensors must be on a CUDA device, got {query.device} (on CPUs the kernels run "
            "only interpreted, for tests: TRITON_INTERPRET=1 before anything imports triton)"
        )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its rows are not dense and aligned to 16 bytes."""
    strides = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    fits = (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % _ALIGNMENT == 0
        and all(s % STRIDE_UNIT == 0 for s in strides[:-1])
    )
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return batch, head and token strides in units of STRIDE_UNIT; 0 along dimensions of size 1,
    whose stride is arbitrary."""
    return tuple(
        stride // STRIDE_UNIT if size > 1 else 0
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    )


def sums_in_any_order(device: torch.device) -> bool:
    """Return True if the kernels can also sum the query's gradient in any order: on sm_90, and in
    the interpreter. For sm_100, Triton 3.9 compiles them to a trap at 128 columns."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_capability(device)[0] == _DESCRIPTOR_ARCHITECTURE


def describable(*tensors: torch.Tensor) -> bool:
    """Return True if the device (or the interpreter) supports tensor descriptors, and they can
    describe the tensors once these are :func:`aligned`. Tensors must not be empty or repeat memory,
    as expanded tensors do.

    Args:
        tensors: (B, H, T, D), on one device.
    """
    device = tensors[0].device
    able = INTERPRETED or (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= _DESCRIPTOR_ARCHITECTURE
    )
    return able and all(
        tensor.numel() > 0
        and all(
            stride > 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            if size > 1
        )
        for tensor in tensors
    )


def source(
    tensor: torch.Tensor, rows: int, columns: int, *, descriptors: bool
) -> torch.Tensor | TensorDescriptor:
    """Return a kernel's view of its input: the tensor, or a tensor descriptor.

    Args:
        tensor: (B, H, T, D), aligned.
        rows, columns: size of a tile; columns from D on read as zeros.
        descriptors: True if the kernel loads by descriptors.
    """
    if not descriptors:
        return tensor
    # The stride of a dimension of size 1 is arbitrary, but a descriptor checks it.
    dense = tensor.numel()
    steps = [
        stride if size > 1 else dense
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*steps, 1], [1, 1, rows, columns])
