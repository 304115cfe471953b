"""Claim: moving queries (LV-XAttn) beats moving keys and values if there are few queries.

Run with `python -m benchmarks.cross_attention --json`.

A few queries (text) and many keys (video), and the reverse; one layer, forward and backward, every
query sees every key. Methods alternate in one run on a network that is slower than the loopback,
because wall time on the loopback would not depend on the bytes. All ranks share the slow loopback.

- `lv_over_ring_<Sq>x<Skv>`, `lv_over_ulysses_...`: seconds of the ring (of Ulysses) over those of
  query rotation, the fastest of several rounds each (other work on the machine only adds time);
  `..._median_...`: medians;
- `bytes_ratio_<Sq>x<Skv>`: bytes of the ring over those of query rotation, counted;
- `loopback_gbit`: Gbit/s of one large message, measured (an emulated link does not slow it);
- `auto_<Sq>x<Skv>`: method that `auto` would select by bytes, `auto_over_best_...` its seconds over
  those of the fastest;
- `seconds_<method>_...`, `cpu_s_<method>_...` (the busiest rank's), `megabytes_<method>_...` (per
  rank);
- `relative_error_...`: the largest error of O, dQ, dK, dV of all methods against dense float64;
  `relative_error_one_process_...`: of one process in the same dtype.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.ranks import LIMITS, Ranks, gloo_ranks, slow_network
from benchmarks.shared.sharded_attention import (
    Call,
    Measured,
    bandwidth_on_rank,
    largest_error,
    measure,
    write_expected,
)
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.patterns import full
from raymm.scheduler.context_parallel.traffic import choose_method

CASES = ((512, 8192), (512, 32768), (8192, 512), (32768, 512))
METHODS = ("rotate", "ring", "ulysses", "gather")
CHECKED_ROWS = 64
BANDWIDTH_MEGABYTES = 40


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--limit", choices=("auto", *LIMITS), default="auto")
    options.add_argument("--gbit", type=float, default=1.0, help="Gbit/s shared by all ranks")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--heads", type=int, nargs=2, default=(8, 4), help="query and key heads")
    options.add_argument("--head-dim", type=int, default=64)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument(
        "--cases", nargs="+", type=_case, default=CASES, metavar="SqxSkv", help="rows and keys"
    )
    args = options.parse_args()
    console = common.console()
    machine = common.machine()  # before this process loses its network
    limit, why = slow_network(args.limit, args.gbit)
    if limit != "namespace":
        what = {"emulated": "the link is EMULATED in user space", "none": "it ran UNLIMITED"}
        console.print(f"no namespace with a limited loopback ({why}): {what[limit]}")
    result: dict[str, Any] = {
        "machine": machine, "limit": limit, "gbit": args.gbit if limit != "none" else None,
        **{name: getattr(args, name) for name in ("ranks", "heads", "head_dim", "dtype", "rounds")},
    }  # fmt: skip
    table = Table(title=f"{args.ranks} ranks, {args.dtype}, loopback: {limit}")
    for title in ("Sq x Skv", "method", "s", "busiest rank, CPU s", "MB per rank", "auto", "error"):
        table.add_column(title, justify="right")
    with gloo_ranks(args.ranks) as ranks, tempfile.TemporaryDirectory() as folder:
        rate = ranks.run(bandwidth_on_rank, megabytes=BANDWIDTH_MEGABYTES)[1]
        result["loopback_gbit"] = round(rate * 8 / 1e9, 3)
        for queries, keys in args.cases:
            call = Call(
                full(queries, keys), ContextLayout.even(queries, args.ranks),
                ContextLayout.even(keys, args.ranks), tuple(args.heads), args.head_dim,
                args.dtype, args.gbit if limit == "emulated" else 0.0,
            )  # fmt: skip
            found = one_case(ranks, call, args, Path(folder))
            result |= {f"{key}_{queries}x{keys}": value for key, value in found.items()}
            for method in usable(call):
                table.add_row(
                    f"{queries} x {keys}", method, f"{found[f'seconds_{method}']:.3f}",
                    f"{found[f'cpu_s_{method}']:.3f}", f"{found[f'megabytes_{method}']:.2f}",
                    "*" if found["auto"] == method else "", f"{found['relative_error']:.1e}",
                )  # fmt: skip
    console.print(table)
    for key, value in result.items():
        if key.startswith(("lv_over", "bytes_ratio", "auto_over", "loopback")):
            console.print(f"{key:32} {value}", highlight=False)
    common.emit(result, args.json)


def _case(text: str) -> tuple[int, int]:
    queries, keys = text.split("x")
    return int(queries), int(keys)


def usable(call: Call) -> list[str]:
    """Return the methods that support this shape."""
    rows = choose_method(call.shape, methods=METHODS).table
    refused = {row.method for row in rows if row.refused}
    return [method for method in METHODS if method not in refused]


def one_case(ranks: Ranks, call: Call, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all methods in alternating rounds."""
    methods = usable(call)
    path, rows = folder / "expected.pt", slice(0, CHECKED_ROWS)
    alone = write_expected(call, rows, path)
    # This also is the warm-up of every method.
    error = max(largest_error(ranks, call, method, rows, path) for method in methods)
    runs: dict[str, list[Measured]] = {method: [] for method in methods}
    for number in range(args.rounds):
        for method in methods if number % 2 == 0 else methods[::-1]:
            runs[method].append(measure(ranks, call, method))
    times = {m: [one.seconds for one in runs[m]] for m in methods}
    fastest = {m: min(times[m]) for m in methods}
    sent = {m: sum(runs[m][0].forward) + sum(runs[m][0].backward) for m in methods}
    auto = choose_method(call.shape, methods=METHODS).method
    found: dict[str, Any] = {
        "bytes_ratio": round(sent["ring"] / sent["rotate"], 2),
        "auto": auto,
        "auto_over_best": round(fastest[auto] / min(fastest.values()), 3),
        "relative_error": error,
        "relative_error_one_process": alone,
    }
    for m in ("ring", "ulysses"):
        if m in methods:
            medians = (statistics.median(times[one]) for one in (m, "rotate"))
            found[f"lv_over_{m}"] = round(fastest[m] / fastest["rotate"], 3)
            found[f"lv_over_{m}_median"] = round(next(medians) / next(medians), 3)
    for m in methods:
        found[f"seconds_{m}"] = round(fastest[m], 4)
        found[f"cpu_s_{m}"] = round(statistics.median(max(one.cpu_s) for one in runs[m]), 4)
        found[f"megabytes_{m}"] = round(sent[m] / len(runs[m][0].forward) / 1e6, 3)
    return found


if __name__ == "__main__":
    main()
