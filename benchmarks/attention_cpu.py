"""Claim: attention on a CPU takes less time and memory than SDPA with a dense bool mask.

Run with `python -m benchmarks.attention_cpu --json`.

One layer, forward and backward, per mask pattern. Every run has a separate process, which reports
CPU seconds and peak memory above its inputs, the mask included. The seconds include this path's
planning but not the construction of SDPA's mask, which the layers of a model share. Per pattern
this path runs before and after the dense one, and the mean of the two is reported. Outputs and
gradients of the same runs are compared.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from benchmarks.shared import common
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span

OURS, DENSE = "raymm", "dense_sdpa"
TENSORS = ("out", "dq", "dk", "dv")


def masks(length: int) -> dict[str, Callable[[], AttentionMask]]:
    """Return the patterns, scaled to the length; at 8192 tokens an image has 256 to 576."""
    unit = length // 128
    # 12 images of 4 to 9 units among text of 2 to 9 units: 60% of the tokens belong to images.
    sizes = [4, 9, 4, 6, 9, 4, 9, 6, 4, 9, 4, 9]
    gaps = [5, 3, 2, 9, 2, 5, 3, 2, 5, 3, 2, 6]
    spans, at = [], 0
    for index, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
        at += gap * unit
        spans.append(Span(at, at + size * unit, 1 + index % 2))
        at += size * unit
    # Documents end between images: after images 3, 4, 7, 9 and at the end.
    ends = [0, spans[2].stop, spans[3].stop + unit, spans[6].stop, spans[8].stop + 2 * unit, length]
    documents = [stop - start for start, stop in zip(ends[:-1], ends[1:], strict=True)]
    return {
        "causal": lambda: patterns.causal(length),
        "sliding_window": lambda: patterns.causal(length, length // 8),
        "documents": lambda: patterns.documents(documents),
        "ep": lambda: patterns.prepended([(1, 32 * unit), (2, 16 * unit)], 80 * unit),
        "ee": lambda: patterns.embedded(length, spans),
        "ee_isolated": lambda: patterns.embedded(length, spans, isolate=True),
        "mp": lambda: patterns.packed(documents, spans),
        "gemma_packed": lambda: patterns.causal_with_own_image(
            length, spans, document_lengths=documents
        ),
        "gemma_packed_window": lambda: patterns.causal_with_own_image(
            length, spans, document_lengths=documents, window=length // 8
        ),
        "lambda": lambda: patterns.sinks_and_window(length, 64, length // 4),
        "causal_blockwise": lambda: patterns.causal_blockwise(length),
        "shared_question": lambda: patterns.shared_question(
            length - 4 * (length // 5), [length // 5] * 4
        ),
    }


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=8192, help="tokens, a multiple of 128")
    options.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="query and key heads")
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--patterns", nargs="*", help="patterns to run")
    args = options.parse_args()
    console = common.console()
    result: dict[str, Any] = {
        "machine": common.machine(),
        **{name: getattr(args, name) for name in ("length", "heads", "head_dim", "dtype")},
    }
    table = Table(title=f"CPU seconds, forward and backward, T = {args.length}, {args.dtype}")
    for title in ("pattern", "visible", "dense s", "raymm s", "speedup", "x floor", "dense MB",
                  "raymm MB", "largest error"):
        table.add_column(title, justify="left" if title == "pattern" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for name, build in masks(args.length).items():
            if args.patterns and name not in args.patterns:
                continue
            found = measure(name, build, args, Path(folder))
            result |= {f"{key}_{name}": value for key, value in found.items()}
            table.add_row(
                name, f"{found['visible_share']:.1%}", f"{found['dense_sdpa_s']:.2f}",
                f"{found['raymm_s']:.2f}", f"{found['speedup_vs_dense_sdpa']:.2f}",
                f"{found['times_floor']:.2f}", f"{found['dense_sdpa_peak_mb']:.0f}",
                f"{found['raymm_peak_mb']:.0f}", f"{found['relative_error']:.1e}",
            )  # fmt: skip
    console.print(table)
    common.emit(result, args.json)


def measure(
    name: str, build: Callable[[], AttentionMask], args: argparse.Namespace, folder: Path
) -> dict[str, float]:
    """Measure seconds, memory and relative errors of one pattern.

    Errors are relative to each tensor's norm. The floor is the dense run's seconds times the
    visible share of its pairs.
    """
    runs = []
    for method in (OURS, DENSE, OURS):
        runs.append(in_child(method, name, args, folder / f"{method}.pt"))
    (before, ours_mb), (dense, dense_mb), (after, _) = runs
    ours = (before + after) / 2
    found, expected = (
        torch.load(folder / f"{method}.pt", weights_only=True) for method in (OURS, DENSE)
    )
    share = build().area() / args.length**2
    return {
        "speedup_vs_dense_sdpa": round(dense / ours, 3),
        "times_floor": round(ours / (dense * share), 3),
        "visible_share": round(share, 4),
        "raymm_s": round(ours, 3),
        "dense_sdpa_s": round(dense, 3),
        "peak_memory_ratio": round(ours_mb / dense_mb, 4),
        "raymm_peak_mb": round(ours_mb, 1),
        "dense_sdpa_peak_mb": round(dense_mb, 1),
        "relative_error": max(
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(found, expected, strict=True)
        ),
    }


def in_child(
    method: str, pattern: str, args: argparse.Namespace, path: Path
) -> tuple[float, float]:
    """Return CPU seconds and peak additional megabytes of one run in a child process."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(method, pattern, args, path, sending))
    child.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        child.join()


def run(
    method: str, pattern: str, args: argparse.Namespace, path: Path, answer: Any
) -> None:
    """Run one forward and backward in the child and write the tensors to ``path``."""
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    prepare, attend = OF_METHOD[method]
    # Libraries are loaded and kernels selected at first use.
    warm = inputs(256, *args.heads, args.head_dim, dtype)
    mask = prepare(masks(256)[pattern]())
    attend(*warm, mask)[0].backward(warm[0].detach())
    query, key, value = inputs(args.length, *args.heads, args.head_dim, dtype)
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = masks(args.length)[pattern]()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    mask = prepare(mask)
    start = time.process_time()
    out = attend(query, key, value, mask)[0]
    gradients = torch.autograd.grad(out, (query, key, value), grad)
    seconds = time.process_time() - start
    answer.send((seconds, (_memory("VmHWM") - before) / 1e6))
    torch.save([out.detach(), *gradients], path)


def inputs(
    length: int, query_heads: int, key_heads: int, head_dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return query, key and value as projections return them: (B, T, H, D) viewed as (B, H, T, D).
    """
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, length, heads, head_dim, generator=generator)
        .to(dtype).transpose(1, 2).requires_grad_()
        for heads in (query_heads, key_heads, key_heads)
    ]  # fmt: skip


def dense_mask(mask: AttentionMask) -> torch.Tensor:
    """Return a (T, T) bool mask, filled in row blocks to keep the peak memory low."""
    visible = torch.empty(mask.shape, dtype=torch.bool)
    step = 256
    for start in range(0, mask.n_queries, step):
        visible[start : start + step] = mask.dense(slice(start, start + step))
    return visible


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor]:
    """Run SDPA with a dense mask; on CPUs this also is ATen's flash attention."""
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return (out,)


# For each method, its mask preparation (not timed) and its attention.
OF_METHOD = {OURS: (lambda mask: mask, cpu_attention), DENSE: (dense_mask, dense_attention)}


def _memory(field: str) -> int:
    """Return this process's VmRSS or VmHWM in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return math.nan


if __name__ == "__main__":
    main()
