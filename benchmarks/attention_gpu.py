"""Attention on a GPU: raymm's Triton kernels beside FlexAttention, SDPA and flash varlen.

32 query and 8 key heads of 128, bf16, forward and backward, at 8k to 128k tokens:

- *causal*; *window*: causal over the last 4096 tokens;
- *document*: packed documents of about an eighth of the sequence, causal;
- *ee*: images among text (Cornstarch v2, Fig. 7), text sees its past, an image all images;
- *mp*: packed multimodal documents.

FlexAttention is compiled and gets a BlockMask made from the same tiles, and a mask function
that tests no more than the pattern needs. SDPA stands beside causal, flash varlen (where
flash-attn is installed) beside causal, window and document.

TFLOP/s count the mask's visible pairs only: 4 x pairs x D x Hq forward, 10 x backward. In the
same run outputs and query gradients of sampled rows are checked against the float64 oracle,
and all gradients against FlexAttention. Needs a CUDA device; says so where there is none.

    python -m benchmarks.attention_gpu --json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks import _common
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.convert import to_block_mask
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import Span

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
LENGTHS = (8192, 16384, 32768, 65536, 131072)
WINDOW = 4096
IMAGE_TOKENS = (256, 1024)
MULTIMODAL = ("document", "ee", "mp")
SAMPLED_ROWS = 16
SAMPLES = 4
# bf16 has 8 bits: its rounding of weights and outputs leaves about 3e-3 of the norm.
TOLERANCE = 2e-2

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def document_lengths(length: int, seed: int = 0) -> list[int]:
    """Sizes of packed documents, an eighth of ``length`` on average, none empty."""
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(np.arange(1, length), 7, replace=False))
    return np.diff([0, *cuts.tolist(), length]).tolist()


def image_spans(length: int, boundaries: list[int], seed: int = 0) -> list[Span]:
    """Images of 256 to 1024 tokens (fewer in short sequences) with as much text between them
    on average; none crosses a boundary."""
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


def build_masks(length: int) -> dict[str, AttentionMask]:
    """The mask of every pattern."""
    documents = document_lengths(length)
    ends = np.cumsum(documents).tolist()
    return {
        "causal": mask_patterns.causal(length),
        "window": mask_patterns.causal(length, min(WINDOW, length)),
        "document": mask_patterns.documents(documents),
        "ee": mask_patterns.embedded(length, image_spans(length, [])),
        "mp": mask_patterns.packed(documents, image_spans(length, ends)),
    }


def flex_block_mask(pattern: str, mask: AttentionMask, device: str):
    """FlexAttention's BlockMask, with the mask function that someone would write for the
    pattern by hand: no test that it does not need."""
    from torch.nn.attention.flex_attention import BlockMask

    arrays = mask.rows(device)
    lo, hi, lo2, hi2 = arrays.bounds
    attend, identity = arrays.attend, arrays.identity
    if bool((hi2 > lo2).any()):
        return to_block_mask(mask, device=device)

    def causal(b, h, q, k):
        return q >= k

    def past(b, h, q, k):
        return (k >= lo[q]) & (q >= k)

    def kinds(b, h, q, k):
        return (k >= lo[q]) & (k < hi[q]) & ((attend[q] & identity[k]) != 0)

    written = {"causal": causal, "window": past, "document": past, "ee": kinds, "mp": kinds}
    tables = to_block_mask(mask, device=device)
    return BlockMask.from_kv_blocks(
        tables.kv_num_blocks,
        tables.kv_indices,
        tables.full_kv_num_blocks,
        tables.full_kv_indices,
        BLOCK_SIZE=tables.BLOCK_SIZE,
        mask_mod=written[pattern],
        seq_lengths=mask.shape,
    )


def contenders(pattern: str, mask: AttentionMask, length: int) -> dict[str, Attention]:
    """What computes the pattern, by name; all take (1, H, T, D)."""
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    from raymm.kernels.flash.gpu.attention import triton_attention

    block_mask = flex_block_mask(pattern, mask, "cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    found: dict[str, Attention] = {
        "raymm": lambda q, k, v: triton_attention(q, k, v, (mask,))[0],
        "flex": lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=True),
    }
    if pattern == "causal":
        found["sdpa"] = lambda q, k, v: scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    varlen = _flash_varlen(pattern, length)
    if varlen is not None:
        found["flash_varlen"] = varlen
    return found


def _flash_varlen(pattern: str, length: int) -> Attention | None:
    if pattern not in ("causal", "window", "document"):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    sizes = document_lengths(length) if pattern == "document" else [length]
    ends = torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int32, device="cuda")
    window = (WINDOW - 1, 0) if pattern == "window" else (-1, -1)

    def attend(q, k, v):
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out = flash_attn_varlen_func(
            q, k, v, ends, ends, max(sizes), max(sizes), causal=True, window_size=window
        )
        return out.transpose(0, 1)[None]

    return attend


def measure(pattern: str, mask: AttentionMask, rounds: int) -> dict[str, Any]:
    """Times and TFLOP/s of all contenders on one mask, and errors."""
    length = mask.n_queries
    tensors = _tensors(length)
    area = mask.area()
    row: dict[str, Any] = {"pattern": pattern, "length": length, "area": area}
    grads: dict[str, list[torch.Tensor]] = {}
    for name, attend in contenders(pattern, mask, length).items():
        try:
            row[name], grads[name] = _time(attend, tensors, area, rounds)
        except torch.cuda.OutOfMemoryError:
            row[name] = None
        torch.cuda.empty_cache()
    row["errors"] = _errors(mask, tensors, grads)
    row["correct"] = max(row["errors"].values()) <= TOLERANCE
    if row.get("flex"):
        ours, theirs = row["raymm"], row["flex"]
        for key in ("forward_ms", "backward_ms", "total_ms"):
            name = key.removesuffix("_ms")
            row[f"speedup_vs_flex_{name}"] = round(theirs[key] / ours[key], 3)
    return row


def _tensors(length: int) -> list[torch.Tensor]:
    """Query, key, value, gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(length)
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS, QUERY_HEADS)
    return [
        torch.randn(
            1, h, length, HEAD_DIM, device="cuda", dtype=DTYPE, generator=generator
        ).requires_grad_(index < 3)
        for index, h in enumerate(heads)
    ]


def _time(
    attend: Attention, tensors: list[torch.Tensor], area: int, rounds: int
) -> tuple[dict[str, float], list[torch.Tensor]]:
    from triton.testing import do_bench

    *inputs, grad_out = tensors
    out = attend(*inputs)
    grads = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    torch.cuda.synchronize()

    def forward():
        with torch.no_grad():
            attend(*inputs)

    def backward():
        torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    # Milliseconds, the median of those that fit; the L2 cache is cleared between them.
    times = [
        statistics.median(do_bench(run, return_mode="median") for _ in range(rounds))
        for run in (forward, backward)
    ]
    flop = area * HEAD_DIM * QUERY_HEADS
    return {
        "forward_ms": round(times[0], 4),
        "backward_ms": round(times[1], 4),
        "total_ms": round(sum(times), 4),
        "forward_tflops": round(4 * flop / times[0] / 1e9, 1),
        "backward_tflops": round(10 * flop / times[1] / 1e9, 1),
    }, [out.detach(), *grads]


def _errors(
    mask: AttentionMask, tensors: list[torch.Tensor], grads: dict[str, list[torch.Tensor]]
) -> dict[str, float]:
    """Relative to norms: ours on sampled rows against the oracle, ours against Flex's."""
    ours = grads["raymm"]
    found = {"out_rows": 0.0, "query_rows": 0.0}
    starts = np.linspace(0, mask.n_queries - SAMPLED_ROWS, SAMPLES).astype(int)
    for start in starts.tolist():
        rows = slice(start, start + SAMPLED_ROWS)
        for index, wanted in enumerate(_oracle(mask, tensors, rows)):
            name = list(found)[index]
            found[name] = max(
                found[name], _relative(ours[index][:, : len(wanted[0]), rows], wanted)
            )
    if "flex" in grads:
        for index, name in enumerate(("out", "query", "key", "value")):
            found[f"{name}_vs_flex"] = _relative(ours[index], grads["flex"][index])
    return {name: round(value, 6) for name, value in found.items()}


def _oracle(
    mask: AttentionMask, tensors: list[torch.Tensor], rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and query gradient of some rows, of the first key head's group."""
    from raymm.kernels.flash.reference import reference_attention

    query, key, value, grad_out = (t.detach() for t in tensors)
    group = QUERY_HEADS // KEY_HEADS
    leaf = query[:, :group, rows].double().requires_grad_()
    visible = mask.dense(rows).to(query.device)
    out, _ = reference_attention(leaf, key[:, :1], value[:, :1], visible)
    (grad,) = torch.autograd.grad(out, leaf, grad_out[:, :group, rows].double())
    return out.detach(), grad


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over lengths of the speed-up against FlexAttention, per pattern."""
    found: dict[str, Any] = {"correct": all(row["correct"] for row in rows)}
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        for part in ("forward", "backward", "total"):
            key = f"speedup_vs_flex_{part}"
            ratios = [row[key] for row in rows if row["pattern"] == pattern and key in row]
            if ratios:
                found[f"{key}_{pattern}"] = round(statistics.geometric_mean(ratios), 3)
    ratios = [found.get(f"speedup_vs_flex_total_{name}") for name in MULTIMODAL]
    if all(ratios):
        found["worst_speedup_vs_flex_multimodal"] = min(ratios)
    return found


def show(rows: list[dict[str, Any]]) -> Table:
    """Milliseconds (TFLOP/s) of every contender."""
    table = Table(title="forward / backward, ms (TFLOP/s)")
    names = ("raymm", "flex", "sdpa", "flash_varlen")
    for column in ("pattern", "tokens", *names, "vs flex", "correct"):
        table.add_column(column)
    for row in rows:
        cells = []
        for name in names:
            one = row.get(name)
            cells.append(
                f"{one['forward_ms']:.2f} ({one['forward_tflops']:.0f}) / "
                f"{one['backward_ms']:.2f} ({one['backward_tflops']:.0f})"
                if one
                else "-"
            )
        speedup = str(row.get("speedup_vs_flex_total", "-"))
        table.add_row(row["pattern"], str(row["length"]), *cells, speedup, str(row["correct"]))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = _common.parser(__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens")
    parser.add_argument(
        "--patterns", nargs="+", default=list(build_masks(64)), choices=list(build_masks(64)),
        metavar="PATTERN", help="of " + ", ".join(build_masks(64)),
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="medians per figure")
    options = parser.parse_args(arguments)
    console = _common.console()
    if _common.skipped_without_gpu(console, options.json):
        return
    rows = []
    for length in options.lengths:
        masks = build_masks(length)
        for pattern in options.patterns:
            torch.compiler.reset()  # each BlockMask is another program
            rows.append(measure(pattern, masks[pattern], options.rounds))
            console.print(f"{pattern} {length}: {rows[-1]}")
    console.print(show(rows))
    result = {**summarise(rows), "rows": rows, "machine": _common.machine()}
    _common.emit(result, options.json)
    if not result["correct"]:
        sys.exit("results differ by more than the tolerance: see errors of the rows")


if __name__ == "__main__":
    main()
