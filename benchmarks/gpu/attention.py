"""Section on attention: raymm's Triton kernels, FlexAttention, SDPA, cuDNN and flash varlen.

32 query and 8 key heads of 128, bf16, forward and backward, at 8k to 128k tokens:

- *causal*;
- *ee*: images among text (Cornstarch v2, Fig. 7), text sees its past, an image all images;
- *mp*: packed multimodal documents;
- *gemma*: packed documents, causal, and an image's tokens see their entire image.

FlexAttention is compiled and gets a BlockMask made from the same tiles, and a minimal mask function
for the pattern. SDPA gets ``is_causal``, or a dense mask if one fits in memory, once with the
kernel that torch selects and once with cuDNN's alone; flash varlen (if flash-attn is installed) is
compared for causal masks.

TFLOP/s count the mask's visible pairs only: 4 x pairs x D x Hq forward, 10 x backward. In the same
run outputs and query gradients of sampled rows are checked against the float64 oracle, and all
gradients against FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device import Device, relative_error
from benchmarks.gpu.record import Record
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.convert import to_block_mask
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span

# In the order of measurement, the most informative first.
LENGTHS = (32768, 8192, 131072, 16384, 65536)
PATTERNS = ("ee", "causal", "mp", "gemma")
IMAGE_TOKENS = (256, 1024)
SAMPLED_ROWS = 16
SAMPLES = 4
# bf16 has 8 bits: the rounding of weights and outputs leaves about 3e-3 of the norm.
TOLERANCE = 2e-2
# Size limit of a mask with an element per pair, for SDPA.
MOST_MASK_BYTES = 2**30
# Seconds per row after FlexAttention's kernels are compiled.
ROW_S = 6.0

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Heads:
    """Numbers of query and key heads, and their width."""

    query: int = 32
    key: int = 8
    dim: int = 128


def lengths(device: Device) -> tuple[int, ...]:
    """Return sequence lengths in tokens."""
    return device.choose(LENGTHS, (64,))


def patterns(device: Device) -> tuple[str, ...]:
    """Return the names of mask patterns."""
    return device.choose(PATTERNS, PATTERNS[1::2])


def heads(device: Device) -> Heads:
    """Return the heads of all calls."""
    return device.choose(Heads(), Heads(2, 1, 32))


def run(device: Device, record: Record) -> None:
    """Run a part per pattern and length."""
    for length in lengths(device):
        for pattern in patterns(device):
            record.part(
                f"{pattern} {length}", partial(measure, device, pattern, length),
                needs=device.choose(ROW_S, 0.0),
            )  # fmt: skip


def document_lengths(length: int, seed: int = 0) -> list[int]:
    """Return sizes of packed documents, an eighth of ``length`` on average, none empty."""
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(np.arange(1, length), 7, replace=False))
    return np.diff([0, *cuts.tolist(), length]).tolist()


def image_spans(length: int, boundaries: list[int], seed: int = 0) -> list[Span]:
    """Return spans of images of 256 to 1024 tokens (fewer in short sequences).

    There is on average as much text between them; none crosses a boundary.
    """
    generator = np.random.default_rng(seed)
    low, high = (min(size, max(length // 16, 1)) for size in IMAGE_TOKENS)
    spans, at = [], 0
    while True:
        start = at + int(generator.integers(low, high + 1))
        stop = start + int(generator.integers(low, high + 1))
        if stop > length:
            return spans
        inside = [b for b in boundaries if start < b < stop]
        if not inside:
            spans.append(Span(start, stop))
        at = inside[0] if inside else stop


def build_mask(pattern: str, length: int) -> AttentionMask:
    """Return the mask of a pattern."""
    documents = document_lengths(length)
    packed_images = image_spans(length, np.cumsum(documents).tolist())
    if pattern == "causal":
        return mask_patterns.causal(length)
    if pattern == "ee":
        return mask_patterns.embedded(length, image_spans(length, []))
    if pattern == "mp":
        return mask_patterns.packed(documents, packed_images)
    return mask_patterns.causal_with_own_image(
        length, packed_images, document_lengths=documents
    )


def flex_block_mask(pattern: str, mask: AttentionMask, device: str) -> Any:
    """Return FlexAttention's BlockMask, with a minimal hand-written mask function."""
    from torch.nn.attention.flex_attention import BlockMask

    arrays = mask.rows(device)
    lo, hi, lo2, hi2 = arrays.bounds
    attend, identity = arrays.attend, arrays.identity

    def causal(b, h, q, k):
        return q >= k

    def kinds(b, h, q, k):
        return (k >= lo[q]) & (k < hi[q]) & ((attend[q] & identity[k]) != 0)

    def own_image(b, h, q, k):
        return ((k >= lo[q]) & (q >= k)) | ((k >= lo2[q]) & (k < hi2[q]))

    functions = {"causal": causal, "ee": kinds, "mp": kinds, "gemma": own_image}
    tables = to_block_mask(mask, device=device)
    return BlockMask.from_kv_blocks(
        tables.kv_num_blocks,
        tables.kv_indices,
        tables.full_kv_num_blocks,
        tables.full_kv_indices,
        BLOCK_SIZE=tables.BLOCK_SIZE,
        mask_mod=functions[pattern],
        seq_lengths=mask.shape,
    )


def flex(device: Device, pattern: str, mask: AttentionMask) -> Attention:
    """Return FlexAttention for a pattern; on a CPU uncompiled and without a backward."""
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = flex_block_mask(pattern, mask, device.kind)
    run = device.choose(partial(torch.compile, flex_attention, dynamic=False),
                        lambda: flex_attention)()  # fmt: skip
    return lambda q, k, v: run(q, k, v, block_mask=block_mask, enable_gqa=True)


def contenders(
    device: Device, pattern: str, mask: AttentionMask
) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Yield implementations for the pattern by name, created on demand. All take (1, H, T, D)."""
    from raymm.kernels.flash.gpu.attention import triton_attention

    yield "raymm", lambda: lambda q, k, v: triton_attention(q, k, v, (mask,))[0]
    yield "flex", lambda: flex(device, pattern, mask)
    yield "sdpa", lambda: _sdpa(device, pattern, mask)
    yield "cudnn", lambda: _cudnn(device, pattern, mask)
    if pattern == "causal":
        yield "flash_varlen", lambda: _flash_varlen(device, mask.n_queries)


def _sdpa(device: Device, pattern: str, mask: AttentionMask) -> Attention:
    from torch.nn.functional import scaled_dot_product_attention

    if pattern == "causal":
        return partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    pairs = mask.n_queries * mask.n_keys
    if pairs > MOST_MASK_BYTES:
        raise MemoryError(f"its dense mask is {pairs / 2**30:.0f} GiB")
    visible = mask.dense().to(device.torch)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # With a mask, only the slowest kernels support grouped heads.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return attend


def _cudnn(device: Device, pattern: str, mask: AttentionMask) -> Attention:
    """Return SDPA with cuDNN's kernels alone, which raise an error for unsupported inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend_by_any = _sdpa(device, pattern, mask)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend_by_any(q, k, v)

    return attend


def _flash_varlen(device: Device, length: int) -> Attention:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    ends = torch.tensor([0, length], dtype=torch.int32, device=device.torch)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, ends, ends, length, length, causal=True)
        return out.transpose(0, 1)[None]

    return attend


def measure(device: Device, pattern: str, length: int) -> Mapping[str, Any]:
    """Measure times and TFLOP/s of all contenders on one mask, and errors.

    Raises:
        AssertionError: raymm's result differs from float64 or FlexAttention by more than bf16's
            rounding.
    """
    mask = build_mask(pattern, length)
    shape = heads(device)
    tensors = make_tensors(device, length, shape)
    flop = mask.area() * shape.dim * shape.query
    row: dict[str, Any] = {"visible_pairs": mask.area()}
    results: dict[str, list[torch.Tensor]] = {}
    reasons = {}
    torch.compiler.reset()  # each BlockMask is another program
    for name, make in contenders(device, pattern, mask):
        try:
            row[name], results[name] = _time(device, make(), tensors, flop)
        # a failing contender must not prevent the others from being timed
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error)[:200]}"
            if name == "raymm":
                raise
        device.release()
    ours = row["raymm"]
    for name, times in row.items():
        if name not in ("raymm", "visible_pairs"):
            row[name] = times | {
                f"over_raymm_{way}": round(times[f"{way}_ms"] / ours[f"{way}_ms"], 3)
                for way in ("forward", "backward")
            }
    found = compare(mask, tensors, results, shape)
    row["errors"] = {name: float(f"{error:.2e}") for name, error in found.items()}
    row["missing"] = reasons
    worst = max(found.values())
    if not worst <= TOLERANCE:  # also fails for NaN
        raise AssertionError(f"{worst:.3g} of the norm, at most {TOLERANCE:g}: {row}")
    return row


def make_tensors(device: Device, length: int, shape: Heads) -> list[torch.Tensor]:
    """Return query, key, value and output gradient."""
    generator = torch.Generator(device.kind).manual_seed(length)
    return [
        torch.randn(
            1, count, length, shape.dim, device=device.torch, dtype=torch.bfloat16,
            generator=generator,
        ).requires_grad_(index < 3)
        for index, count in enumerate((shape.query, shape.key, shape.key, shape.query))
    ]  # fmt: skip


def _time(
    device: Device, attend: Attention, tensors: list[torch.Tensor], flop: int
) -> tuple[dict[str, float], list[torch.Tensor]]:
    *inputs, grad_out = tensors
    out = attend(*inputs)
    grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def backward() -> None:
        torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    times = [device.milliseconds(call) for call in (forward, backward)]
    return {
        "forward_ms": round(times[0], 4),
        "backward_ms": round(times[1], 4),
        "forward_tflops": round(4 * flop / times[0] / 1e9, 1),
        "backward_tflops": round(10 * flop / times[1] / 1e9, 1),
    }, [out.detach(), *grads]


def compare(
    mask: AttentionMask, tensors: list[torch.Tensor], results: Mapping[str, list[torch.Tensor]],
    shape: Heads,
) -> dict[str, float]:
    """Return errors relative to norms: raymm on sampled rows against the oracle, and against Flex.
    """
    ours = results["raymm"]
    found = {"out_rows": 0.0, "query_rows": 0.0}
    starts = np.linspace(0, mask.n_queries - SAMPLED_ROWS, SAMPLES).astype(int)
    for start in starts.tolist():
        rows = slice(start, start + SAMPLED_ROWS)
        exact = oracle_rows(mask, tensors, rows, shape)
        for name, result, expected in zip(found, ours, exact, strict=False):
            error = relative_error(result[:, : expected.shape[1], rows], expected)
            found[name] = found[name] if error <= found[name] else error  # also keeps NaN
    if "flex" in results:
        pairs = zip(("out", "query", "key", "value"), ours, results["flex"], strict=True)
        found |= {f"{name}_to_flex": relative_error(our, their) for name, our, their in pairs}
    return found


def oracle_rows(
    mask: AttentionMask, tensors: list[torch.Tensor], rows: slice, shape: Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 output and query gradient of some rows, for the first key head's group."""
    from raymm.kernels.flash.reference import reference_attention

    query, key, value, grad_out = (t.detach() for t in tensors)
    group = shape.query // shape.key
    leaf = query[:, :group, rows].double().requires_grad_()
    visible = mask.dense(rows).to(query.device)
    out, _ = reference_attention(leaf, key[:, :1], value[:, :1], visible)
    (grad,) = torch.autograd.grad(out, leaf, grad_out[:, :group, rows].double())
    return out.detach(), grad
