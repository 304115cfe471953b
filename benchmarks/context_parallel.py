"""Claim: `balanced` token distribution gives context-parallel ranks equal work and tokens.

Run with `python -m benchmarks.context_parallel --json`.

Self-attention over 4 processes: balance, bytes and time per method. EP, EE and MP masks at 16k
tokens, as in `benchmarks.token_distribution` but with samples of a quarter of the length, so that
16k tokens hold twelve. One layer, forward and backward, fp32; gloo on the loopback, one thread per
rank, methods alternate. With fewer cores than ranks, wall time is limited by the cores; the largest
CPU time of a rank is the time that as many devices would take.

- `imbalance_<policy>_<mask>`, `token_imbalance_...`: largest over mean attention work (active
  tiles) and tokens per rank, the worst of several seeds;
- `cpu_s_<method>_<mask>`, `cpu_mean_s_...`, `seconds_...`: CPU seconds of the busiest rank and
  their mean, and wall seconds, `balanced` layout; `megabytes_...`: sent per rank, mean and largest;
- `cpu_s_<policy>_<mask>`: CPU seconds of the busiest rank with `gather` in another layout;
  `cpu_imbalance_...`: the same over the mean; `<policy>_over_balanced_<mask>`: over that of the
  balanced layout; `timed_imbalance_...`: active tiles of the one mask that was timed;
- `megabytes_needed_<policy>_<mask>`: bytes that `needed` sends in each layout, by the formulas;
- `auto_<mask>`: method that `auto` would select by bytes;
- `relative_error_<mask>`: the largest error of O, dQ, dK, dV of all methods against dense float64
  attention in one process, for the checked rows.

Bytes are counted and compared with the formulas in every run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.shared import common, token_policies
from benchmarks.shared.ranks import Ranks, gloo_ranks
from benchmarks.shared.sharded_attention import (
    Call,
    Measured,
    largest_error,
    measure,
    write_expected,
)
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.context_parallel.methods import METHODS
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span
from raymm.scheduler.context_parallel.distribution import TokenDistribution, balanced, distribute
from raymm.scheduler.context_parallel.traffic import choose_method, method_bytes
from raymm.scheduler.context_parallel.workload import DEFAULT_BLOCK, active_key_blocks

LENGTH, RANKS = 16384, 4
# A quarter of Cornstarch v2 §5.1: text per sample; image (kind 1), audio (kind 2).
TEXT, TOKENS = 256, {1: 299, 2: 750}
SAMPLE = TEXT + sum(TOKENS.values())
LONGEST_DOCUMENT = 4  # samples
POLICIES = ("balanced", "contiguous", "zigzag")
BY_NAME = {"balanced": balanced, **token_policies.POLICIES}
# Neither end is a block boundary, and the rows include items and text.
CHECKED_ROWS = slice(9000, 9300)


def ep(length: int, rng: np.random.Generator) -> AttentionMask:
    """Return a mask of encoder outputs in random order, then text."""
    kinds = rng.permutation(list(TOKENS) * (length // SAMPLE))
    items = [(int(kind), TOKENS[kind]) for kind in kinds]
    return patterns.prepended(items, length - sum(tokens for _, tokens in items))


def ee(length: int, rng: np.random.Generator) -> AttentionMask:
    """Return a mask of encoder outputs at random positions in one text."""
    return patterns.embedded(length, _spans(rng, length, 0, length // SAMPLE))


def mp(length: int, rng: np.random.Generator) -> AttentionMask:
    """Return a mask of packed documents with random numbers of samples; the remainder is text."""
    lengths: list[int] = []
    spans: list[Span] = []
    while (left := (length - sum(lengths)) // SAMPLE) > 0:
        samples = min(int(rng.integers(1, LONGEST_DOCUMENT + 1)), left)
        spans += _spans(rng, samples * SAMPLE, sum(lengths), samples)
        lengths.append(samples * SAMPLE)
    return patterns.packed([*lengths, length - sum(lengths)], spans)


def _spans(rng: np.random.Generator, length: int, at: int, samples: int) -> list[Span]:
    """Place the items of samples in random order within [at, at + length)."""
    kinds = rng.permutation(list(TOKENS) * samples)
    places = np.sort(rng.integers(0, length - sum(TOKENS[kind] for kind in kinds) + 1, len(kinds)))
    spans, before = [], 0
    for kind, place in zip(kinds, places, strict=True):
        start = at + before + int(place)
        spans.append(Span(start, start + TOKENS[kind], int(kind)))
        before += TOKENS[kind]
    return spans


MASKS: dict[str, Callable[[int, np.random.Generator], AttentionMask]] = {
    "ep": ep, "ee": ee, "mp": mp,
}  # fmt: skip


def dealt(mask: AttentionMask, policy: str) -> TokenDistribution:
    """Distribute a mask's tokens over the ranks."""
    work = active_key_blocks(mask.query_table, mask.key_table, *mask.shape)
    return distribute(work, RANKS, BY_NAME[policy], n_tokens=mask.n_queries)


def imbalances(length: int, seeds: int) -> dict[str, float]:
    """Return the worst imbalance of the seeds for every policy and mask."""
    found: dict[str, float] = {}
    for name, build in MASKS.items():
        masks = [build(length, np.random.default_rng(seed)) for seed in range(seeds)]
        for policy in POLICIES:
            parts = [dealt(mask, policy) for mask in masks]
            found[f"imbalance_{policy}_{name}"] = round(max(p.imbalance for p in parts), 4)
            found[f"token_imbalance_{policy}_{name}"] = round(
                max(p.token_imbalance for p in parts), 4
            )
    return found


def timed(ranks: Ranks, name: str, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Time one mask: all methods in the balanced layout, and `gather` in the others."""
    mask = MASKS[name](args.length, np.random.default_rng(0))
    calls = {}
    for policy in POLICIES:
        blocks = dealt(mask, policy).blocks
        layout = ContextLayout.of_blocks(blocks, DEFAULT_BLOCK, args.length)
        calls[policy] = Call(mask, layout, layout, tuple(args.heads), args.head_dim, "float32")
    balanced = calls["balanced"]
    choice = choose_method(balanced.shape, balanced.needed())
    methods = [row.method for row in choice.table if not row.refused]
    jobs = {method: (balanced, method) for method in methods}
    jobs |= {policy: (calls[policy], "gather") for policy in POLICIES[1:]}
    write_expected(balanced, CHECKED_ROWS, path)
    # This also is the warm-up.
    error = max(largest_error(ranks, *job, CHECKED_ROWS, path) for job in jobs.values())
    runs: dict[str, list[Measured]] = {job: [] for job in jobs}
    for number in range(args.rounds):
        for job in jobs if number % 2 == 0 else reversed(jobs):
            runs[job].append(measure(ranks, *jobs[job]))
    found: dict[str, Any] = {
        "auto": choice.method, "relative_error": error,
        "visible_share": round(mask.area() / args.length**2, 4),
    }  # fmt: skip
    for job, measured in runs.items():
        cpu = [statistics.median(one.cpu_s[rank] for one in measured) for rank in range(RANKS)]
        found[f"seconds_{job}"] = round(min(one.seconds for one in measured), 3)
        found[f"cpu_s_{job}"] = round(max(cpu), 3)
        found[f"cpu_mean_s_{job}"] = round(sum(cpu) / RANKS, 3)
        found[f"cpu_imbalance_{job}"] = round(max(cpu) * RANKS / sum(cpu), 3)
        sent = [f + b for f, b in zip(measured[0].forward, measured[0].backward, strict=True)]
        found[f"megabytes_{job}"] = round(sum(sent) / RANKS / 1e6, 3)
        found[f"megabytes_largest_{job}"] = round(max(sent) / 1e6, 3)
    for policy, call in calls.items():
        sent = method_bytes(call.shape, "needed", call.needed())
        found[f"megabytes_needed_{policy}"] = round(sent.total / RANKS / 1e6, 3)
        found[f"timed_imbalance_{policy}"] = round(dealt(mask, policy).imbalance, 4)
    # The run of `gather` in the balanced layout is already measured.
    for policy in POLICIES[1:]:
        found[f"{policy}_over_balanced"] = round(
            found[f"cpu_s_{policy}"] / found["cpu_s_gather"], 3
        )
    return found


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=LENGTH, help="tokens, at least 9300")
    options.add_argument("--heads", type=int, nargs=2, default=(4, 4), help="query and key heads")
    options.add_argument("--head-dim", type=int, default=32)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--seeds", type=int, default=20, help="masks per pattern, for imbalance")
    args = options.parse_args()
    console = common.console()
    result: dict[str, Any] = {
        "machine": common.machine(), "ranks": RANKS,
        **{name: getattr(args, name)
           for name in ("length", "heads", "head_dim", "rounds", "seeds")},
        **imbalances(args.length, args.seeds),
    }  # fmt: skip
    with gloo_ranks(RANKS) as ranks, tempfile.TemporaryDirectory() as folder:
        for name in MASKS:
            found = timed(ranks, name, args, Path(folder) / "expected.pt")
            result |= {f"{key}_{name}": value for key, value in found.items()}
    show(console, result)
    common.emit(result, args.json)


def show(console: Any, result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table("mask", *POLICIES, title="work imbalance (tokens)")
    for name in MASKS:
        table.add_row(name, *(
            f"{result[f'imbalance_{p}_{name}']:.4f} ({result[f'token_imbalance_{p}_{name}']:.3f})"
            for p in POLICIES
        ))  # fmt: skip
    console.print(table)
    table = Table(
        "mask", "method", "busiest rank, CPU s", "mean", "wall s", "MB per rank", "largest", "auto",
        title="forward and backward, balanced layout",
    )  # fmt: skip
    for name in MASKS:
        for job in (*METHODS, *POLICIES[1:]):
            if f"cpu_s_{job}_{name}" not in result:
                continue
            label = job if job in METHODS else f"gather, {job}"
            keys = ("cpu_s", "cpu_mean_s", "seconds", "megabytes", "megabytes_largest")
            table.add_row(
                name, label, *(f"{result[f'{key}_{job}_{name}']:.2f}" for key in keys),
                "*" if result[f"auto_{name}"] == job else "",
            )  # fmt: skip
    console.print(table)
    shown = ("relative_error", "visible", "contiguous_over", "zigzag_over", "timed_imbalance")
    shown += tuple(f"megabytes_needed_{policy}" for policy in POLICIES)
    for key, value in result.items():
        if key.startswith(shown):
            console.print(f"{key:32} {value}", highlight=False)


if __name__ == "__main__":
    main()
