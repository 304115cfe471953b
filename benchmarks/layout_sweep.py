"""Claim: layouts train each feature and option exactly as one process does, or reject it.

Run with `python -m benchmarks.layout_sweep --json --results /tmp/cells.json`.

A cell is a tiny model with a feature (a rope type, windows, softcaps, dropout, experts, adapters,
...), trained with an option (an optimizer, averages, bf16, DPO, ...) on Ray actors under a layout.
Its losses, every gradient relative to its own norm, and its parameters after three optimizer steps
must equal those of transformers, peft and torch in one process. For dropout and layer drop, the
reference is one process of raymm. A cell is ``exact``; ``refused`` before the start by a message
that names the incompatible features; ``wrong``; or ``unclear``: anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shared.common import console, emit, machine, parser
from benchmarks.shared.family_check import EXACT, REFUSED, UNCLEAR, WRONG
from benchmarks.shared.sweep_cells import Cell, cells, outcomes
from benchmarks.shared.sweep_tables import FEATURES, LAYOUTS, OPTIONS

RESULTS = (EXACT, REFUSED, WRONG, UNCLEAR)
# Logical CPUs: the largest number of processes of a layout, with a margin.
_CPUS = 8
_QUICK_LAYOUTS = ("tp 2", "fsdp 2", "packing, cp 2")
# Displayed characters of a message.
_SHOWN = 400


def quick_cells() -> list[Cell]:
    """Return the cells of the test: three of every five pairs, each under one of three layouts."""
    every = cells(FEATURES, OPTIONS, _QUICK_LAYOUTS)
    chosen = [cell for number, cell in enumerate(every) if number % 3 == number // 3 % 3]
    return [cell for number, cell in enumerate(chosen) if number % 5 < 3]


@contextmanager
def _cluster() -> Iterator[None]:
    """Start a local Ray cluster whose workers are forked."""
    import ray

    from raymm.runtime.embedded.embedded_ray import start_embedded_ray
    from raymm.runtime.embedded.forked_workers import start_servers

    start_servers(2, ["transformers.models.llama.modeling_llama"])
    start_embedded_ray(num_cpus=_CPUS, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    arguments = _arguments()
    chosen = quick_cells() if arguments.quick else cells(FEATURES, OPTIONS, LAYOUTS)
    only, layouts = arguments.only, arguments.layout
    chosen = [
        cell for cell in chosen
        if (not only or {cell.feature, cell.option} & set(only))
        and (not layouts or cell.layout in layouts)
    ]  # fmt: skip
    path, out, started = arguments.results, console(), time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    if path is not None and path.exists():
        found = json.loads(path.read_text())
    if arguments.missing:
        chosen = [cell for cell in chosen if str(cell) not in found]
    with _cluster():
        begin = time.monotonic()
        for cell, outcome in outcomes(chosen):
            seconds, begin = time.monotonic() - begin, time.monotonic()
            found[str(cell)] = {
                "result": outcome.result, "sentence": outcome.sentence,
                "seconds": round(seconds, 2),
            }
            out.print(
                f"{seconds:5.1f} s  {cell}: {outcome.result}  {outcome.sentence[:_SHOWN]}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
            if path is not None:
                path.write_text(json.dumps(found, indent=1))
    known = {str(cell) for cell in cells(FEATURES, OPTIONS, LAYOUTS)}
    found = {name: one for name, one in found.items() if name in known}
    summary: dict[str, Any] = {"cells": len(found)}
    summary |= {r: sum(one["result"] == r for one in found.values()) for r in RESULTS}
    summary |= {
        "seconds": round(sum(one["seconds"] for one in found.values()), 1),
        "elapsed": round(time.monotonic() - started, 1), "machine": machine(),
    }
    out.print(", ".join(f"{summary[r]} {r}" for r in RESULTS))
    emit(summary, arguments.json)
    if summary[WRONG] or summary[UNCLEAR]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs="+", metavar="NAME", choices=[*FEATURES, *OPTIONS],
                         help="run only these features and options")  # fmt: skip
    options.add_argument("--layout", nargs="+", metavar="NAME", choices=list(LAYOUTS),
                         help="run only these layouts")  # fmt: skip
    options.add_argument("--quick", action="store_true", help="run the cells of the test")
    options.add_argument("--results", type=Path, metavar="FILE",
                         help="JSON file of all cells, also of earlier runs")  # fmt: skip
    options.add_argument("--missing", action="store_true",
                         help="run only cells that the results file lacks")  # fmt: skip
    return options.parse_args()


if __name__ == "__main__":
    main()
