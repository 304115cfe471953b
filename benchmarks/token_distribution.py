"""Claim: token distribution takes milliseconds and balances attention almost perfectly.

Run with `python -m benchmarks.token_distribution --json`.

Masks as in Cornstarch v2, §5.1 and Appendix C: samples of 1k text tokens, a 1280x720 image (1,196
tokens, Qwen2-VL's 28-pixel patches) and two minutes of audio (3,000, Qwen2-Audio's 25 per second),
modalities at random positions. EP puts them before all text, EE among the text of one sequence, MP
packs documents of 1 to 8 such samples. Other masks: causal, sliding window, lambda, causal
blockwise and shared question.

- `count_ms`, `plan_ms_8`, `plan_ms_64`: CPU milliseconds of one thread to count, and to count and
  distribute to 8 and 64 ranks, 1M tokens in blocks of 128; medians, for the worst pattern;
- `imbalance_*`: largest over mean work per rank of EP, EE and MP, the worst of several seeds, and
  `token_spread_*`: largest minus smallest number of tokens per rank, in blocks;
- the same for the other policies;
- at 64k tokens over 8 to 64 ranks, results and proofs of CP-SAT when it starts from the result, and
  its CPU seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.exact_distribution import exact_distribution
from benchmarks.shared.token_policies import POLICIES
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from raymm.scheduler.context_parallel.distribution import TokenDistribution, balanced, distribute
from raymm.scheduler.context_parallel.workload import active_key_blocks

TEXT, TOKENS = 1024, {1: 1196, 2: 3000}  # per sample: text; image (kind 1), audio (kind 2)
SAMPLE = TEXT + sum(TOKENS.values())
LONGEST_DOCUMENT = 8  # samples
LENGTHS = {"1m": 1 << 20, "64k": 1 << 16}
CASES = (("1m", 8), ("1m", 64), ("64k", 8), ("64k", 64))
MULTIMODAL = ("ep", "ee", "mp")
BASELINES = ("contiguous", "zigzag", "random", "paper_lpt", "lpt")
ALL = {"balanced": balanced, **POLICIES}
EXACT_RANKS = (8, 16, 32, 64)
REPEATS = 51


def random_spans(generator: np.random.Generator, length: int, at: int, samples: int) -> list[Span]:
    """Place the items of `samples` samples in random order within [at, at + length)."""
    kinds = generator.permutation(list(TOKENS) * samples)
    text = length - sum(TOKENS[kind] for kind in kinds)
    spans = []
    before = 0
    places = np.sort(generator.integers(0, text + 1, len(kinds)))
    for kind, place in zip(kinds, places, strict=True):
        start = at + before + int(place)
        spans.append(Span(start, start + TOKENS[kind], int(kind)))
        before += TOKENS[kind]
    return spans


def ep(length: int, generator: np.random.Generator) -> AttentionMask:
    """Return a mask of encoder outputs in random order, then text."""
    kinds = generator.permutation(list(TOKENS) * (length // SAMPLE))
    items = [(int(kind), TOKENS[kind]) for kind in kinds]
    return patterns.prepended(items, length - sum(tokens for _, tokens in items))


def ee(length: int, generator: np.random.Generator) -> AttentionMask:
    """Return a mask of encoder outputs at random positions in one text."""
    return patterns.embedded(length, random_spans(generator, length, 0, length // SAMPLE))


def mp(length: int, generator: np.random.Generator) -> AttentionMask:
    """Return a mask of packed documents with random numbers of samples; the remainder is text."""
    lengths: list[int] = []
    spans: list[Span] = []
    at = 0
    while length - at >= SAMPLE:
        samples = min(int(generator.integers(1, LONGEST_DOCUMENT + 1)), (length - at) // SAMPLE)
        lengths.append(samples * SAMPLE)
        spans += random_spans(generator, lengths[-1], at, samples)
        at += lengths[-1]
    return patterns.packed([*lengths, length - at], spans)


def every_mask(length: int) -> dict[str, AttentionMask]:
    """Return seed 0 of the multimodal patterns, and the other masks."""
    question, answer = length // 5, length // 5
    rest = length - question - 3 * answer
    return {
        **{name: PATTERNS[name](length, np.random.default_rng(0)) for name in MULTIMODAL},
        "ee_isolated": patterns.embedded(
            length,
            random_spans(np.random.default_rng(0), length, 0, length // SAMPLE),
            isolate=True,
        ),
        "causal": patterns.causal(length),
        "sliding_window": patterns.causal(length, 4096),
        "lambda": patterns.sinks_and_window(length),
        "causal_blockwise": patterns.causal_blockwise(length),
        "shared_question": patterns.shared_question(question, [answer] * 3 + [rest]),
    }


PATTERNS: dict[str, Callable[[int, np.random.Generator], AttentionMask]] = {
    "ep": ep, "ee": ee, "mp": mp,
}


def count(mask: AttentionMask) -> np.ndarray:
    """Return the active key blocks per query block."""
    return active_key_blocks(mask.query_table, mask.key_table, *mask.shape)


def median_ms(run: Callable[[], object]) -> float:
    """Return median CPU milliseconds of this thread, which exclude other processes."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - start)
    return round(statistics.median(times) / 1e6, 3)


def speeds(masks: dict[str, AttentionMask]) -> dict[str, Any]:
    """Return milliseconds per pattern, and the worst of each figure."""
    result: dict[str, Any] = {}
    for name, mask in masks.items():
        work = count(mask)
        result[f"segments_{name}"] = len(mask.query_table)
        result[f"blocks_{name}"] = int(work.sum())
        result[f"count_ms_{name}"] = median_ms(lambda mask=mask: count(mask))
        for ranks in (8, 64):
            result[f"plan_ms_{ranks}_{name}"] = median_ms(
                lambda mask=mask, ranks=ranks: distribute(count(mask), ranks)
            )
    for key in ("count_ms", "plan_ms_8", "plan_ms_64"):
        result[key] = max(result[f"{key}_{name}"] for name in masks)
    return result


def imbalances(seeds: int) -> dict[str, Any]:
    """Return the worst of the seeds per policy, pattern, length and number of ranks."""
    result: dict[str, Any] = {}
    for size, ranks in CASES:
        for name in MULTIMODAL:
            works = [
                count(PATTERNS[name](LENGTHS[size], np.random.default_rng(seed)))
                for seed in range(seeds)
            ]
            case = f"{size}_{ranks}_{name}"
            for policy in ("balanced", *BASELINES):
                found = [distribute(work, ranks, ALL[policy]) for work in works]
                prefix = "" if policy == "balanced" else f"{policy}_"
                result[f"{prefix}imbalance_{case}"] = round(max(f.imbalance for f in found), 6)
                result[f"{prefix}token_spread_{case}"] = max(spread(f) for f in found)
                result[f"{prefix}token_imbalance_{case}"] = round(
                    max(f.token_imbalance for f in found), 4
                )
                if policy == "balanced":
                    result[f"median_imbalance_{case}"] = round(
                        statistics.median(f.imbalance for f in found), 6
                    )
                    result[f"gap_{case}"] = round(max(f.gap for f in found), 6)
    return result


def spread(found: TokenDistribution) -> int:
    """Return largest minus smallest number of tokens per rank, in blocks."""
    return (max(found.tokens) - min(found.tokens)) // found.block


def exact(seconds: float) -> dict[str, Any]:
    """Return the result of CP-SAT for seed 0 at 64k tokens; skipped if the bound is met."""
    result: dict[str, Any] = {}
    for ranks in EXACT_RANKS:
        for name in MULTIMODAL:
            work = count(PATTERNS[name](LENGTHS["64k"], np.random.default_rng(0)))
            ours = distribute(work, ranks)
            start = time.thread_time_ns()
            distribute(work, ranks)
            case = f"64k_{ranks}_{name}"
            result[f"balanced_ms_{case}"] = round((time.thread_time_ns() - start) / 1e6, 3)
            before = time.process_time()
            found = exact_distribution(work, ranks, seconds)
            result[f"exact_{case}"] = {
                "balanced": max(ours.work), "exact": max(found.work), "bound": found.bound,
                "status": found.status, "gap": round(found.gap, 6), "seconds": seconds,
                "cpu_seconds": round(time.process_time() - before, 2),
            }
    return result


def draw(path: Path) -> None:
    """Draw work and tokens per rank by policy, 64k tokens over 64 ranks."""
    from matplotlib.figure import Figure

    from raymm.draw import palette

    hues = palette.HUES
    names = {
        "contiguous": ("contiguous", hues[4], 1.3),
        "zigzag": ("zigzag", hues[3], 1.3),
        "paper_lpt": ("LPT as printed, unsorted", hues[1], 1.3),
        "lpt": ("LPT (Graham)", hues[5], 1.6),
        "balanced": ("balanced", hues[0], 2.4),
    }
    figure = Figure(figsize=(11, 5.6), dpi=150, layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="row")
    for column, (name, title) in enumerate(
        {"ep": "EP: prepended", "ee": "EE: embedded", "mp": "MP: packed documents"}.items()
    ):
        work = count(PATTERNS[name](LENGTHS["64k"], np.random.default_rng(0)))
        for policy, (label, colour, width) in names.items():
            found = distribute(work, 64, ALL[policy])
            for axis, values in zip(axes[:, column], (found.work, found.tokens), strict=True):
                relative = np.sort(values)[::-1] * found.ranks / sum(values)
                axis.step(
                    np.arange(1, found.ranks + 1), relative, where="mid", color=colour,
                    linewidth=width, label=label, zorder=3 if policy == "balanced" else 2,
                )
        axes[0, column].set_title(title, color=palette.TEXT)
        axes[1, column].set_xlabel("ranks, from most to least", color=palette.TEXT)
    axes[0, 0].set_ylabel("attention work / mean", color=palette.TEXT)
    axes[1, 0].set_ylabel("tokens / mean", color=palette.TEXT)
    axes[0, 0].set_ylim(bottom=0)
    for axis in axes.flat:
        axis.grid(color=palette.FAINT, alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=palette.TEXT)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("One sequence of 64k tokens over 64 ranks", color=palette.TEXT)
    figure.savefig(path)


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=5, help="masks per pattern and length")
    options.add_argument("--exact-seconds", type=float, default=10.0, help="CP-SAT, per pattern")
    options.add_argument("--draw", type=Path, help="also write a picture to this path")
    args = options.parse_args()
    console = common.console()
    masks = every_mask(LENGTHS["1m"])
    result = {"machine": common.machine(), **speeds(masks), **imbalances(args.seeds)}
    if args.exact_seconds > 0:
        result |= exact(args.exact_seconds)
    if args.draw:
        draw(args.draw)
    table = Table("1M tokens", "segments", "active tiles", "count ms", "plan ms, 8", "plan ms, 64")
    for name in masks:
        keys = ("segments", "blocks", "count_ms", "plan_ms_8", "plan_ms_64")
        table.add_row(name, *(f"{result[f'{key}_{name}']}" for key in keys))
    console.print(table)
    columns = ("balanced", *BASELINES)
    table = Table("imbalance (token imbalance)", *columns)
    for size, ranks in CASES:
        for name in MULTIMODAL:
            case = f"{size}_{ranks}_{name}"
            prefixes = ["" if policy == "balanced" else f"{policy}_" for policy in columns]
            table.add_row(case, *(
                f"{result[f'{p}imbalance_{case}']:.4f} ({result[f'{p}token_imbalance_{case}']:.3f})"
                for p in prefixes
            ))
    console.print(table)
    for key, value in result.items():
        if key.startswith(("exact_", "balanced_ms_")):
            console.print(f"{key:28} {value}", highlight=False)
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
