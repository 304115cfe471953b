"""Claim: balanced mini-batches beat random, length-grouped and OmniBal's ISF batches.

Run with `python -m benchmarks.minibatch --json --data a.json b.json`.

Input are files of sample sizes alone: a JSON list per data set of objects with `vit_num` (image
tiles) and `token_num` (text tokens), as OmniBal publishes them. Figures for every data set, and for
all together if there are several, per method and number of data-parallel ranks:

- `pad`, `dist_vit`, `dist_llm`: OmniBal's PadRatio and DistRatios (eq. 1 and 2);
- `efficiency`: mean over steps of mean rank cost over largest, on FLOPs of InternVL-Chat-1.5's 6B +
  20B; `step_efficiency`: with a pipeline of 4 microbatches in flight that differ;
- `batch`: samples per group; `left_out`: samples that are in no step;
- `groups_over_bound`: groups over the least number that could hold their samples within the
  budgets;
- `mixing`: total-variation distance between a step's mix of data sets and the mix of all data, and
  `random_mixing`, the same for shuffled samples;
- `seconds`: CPU time to plan.

Also the CPU seconds to plan 1.2 million samples drawn with replacement from all files.

Without files, only figures for sizes drawn from seeded distributions of `drawn_sizes.py`, at 8 to
256 ranks. `drawn_steps_over_bound`: steps over the least number that could hold the samples within
the budgets (every step has a group per rank), worst and median; `drawn_efficiency_min`; and
`drawn_step_efficiency_over_isf_min`, where ISF has groups for all ranks. `documents`: 30,000 sizes
like DocVQA's, planned with the default costs as in a run without a profile; the least
`documents_efficiency_min` and the most `documents_plan_seconds_max` CPU seconds of a plan.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.drawn_sizes import DISTRIBUTIONS, NAMES, drawn_sizes
from benchmarks.shared.isf import plan_isf, search_budgets
from benchmarks.shared.transformer_cost import transformer_cost
from raymm.errors import PlanError
from raymm.scheduler.minibatch.balanced import plan_balanced
from raymm.scheduler.minibatch.budgets import least_groups
from raymm.scheduler.minibatch.costs import CostModel
from raymm.scheduler.minibatch.methods import plan_length_grouped, plan_random
from raymm.scheduler.minibatch.metrics import balance
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes

BATCH = 4  # target samples per group of all methods (OmniBal, Table 5)
ISF_ITERATIONS = 50  # as in the authors' code
MILLION = 1_200_000
# Samples and ranks; the last have few steps.
DRAWN_CASES = ((20_000, 8), (20_000, 64), (20_000, 256), (2_000, 64))
DRAWN_SEED = 0
DOCUMENTS, DOCUMENT_RANKS = 30_000, (8, 64, 256)
# InternViT-6B: 45 layers of 3200, 1025 tokens per tile, with attention within the tile.
# InternLM2-20B: 48 layers of 6144.
MODEL = CostModel((
    transformer_cost(5.5e9, 45, 3200, tokens_per_unit=1025, units_attend=False),
    transformer_cost(19.9e9, 48, 6144, causal=True),
))
KNOB = (0.0, 0.005, 0.01, 0.02, 0.05, 1.0)  # setting from balance to mixing


@dataclass(frozen=True)
class Method:
    """Method that makes one row of the tables."""

    name: str
    plan: Callable[[SampleSizes, int, int], MiniBatchPlan]  # sizes, ranks, epoch


def methods(budgets: tuple[int, ...] | None) -> list[Method]:
    """Return the compared methods; `balanced_at_isf_budgets` has the budgets that ISF's search
    found.
    """
    return [
        Method("random", lambda s, r, e: plan_random(s, r, BATCH, epoch=e)),
        Method("random_sharded", lambda s, r, e: plan_random(
            s, r, BATCH, sharded=True, epoch=e
        )),
        Method("length_grouped", lambda s, r, e: plan_length_grouped(s, r, BATCH, epoch=e)),
        Method("isf_statistics", lambda s, r, e: plan_isf(s, r, epoch=e)),
        Method("isf_searched", lambda s, r, e: plan_isf(
            s, r, search_budgets(s, r, BATCH), iterations=ISF_ITERATIONS, epoch=e
        )),
        Method("balanced_at_isf_budgets", lambda s, r, e: plan_balanced(
            s, r, search_budgets(s, r, BATCH), model=MODEL, epoch=e
        )),
        Method("balanced", lambda s, r, e: plan_balanced(
            s, r, budgets, samples_per_group=BATCH, model=MODEL, epoch=e
        )),
    ]


def read(path: Path) -> np.ndarray:
    """Return (N, 2) tiles and tokens of one file.

    Raises:
        SystemExit: the file is not such a list; the message names the entry.
    """
    entries = json.loads(path.read_text())
    try:
        return np.array([(int(e["vit_num"]), int(e["token_num"])) for e in entries]).reshape(-1, 2)
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{path}: every entry needs vit_num and token_num ({error!r})") from error


def joined(parts: list[np.ndarray]) -> SampleSizes:
    """Join several data sets into one with a source per sample."""
    return SampleSizes(
        NAMES, np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    )


def figures(plan: MiniBatchPlan, sizes: SampleSizes) -> dict[str, float]:
    """Return the figures of one plan."""
    found = balance(plan, sizes, MODEL)
    result = {
        "pad": found.pad["text"],
        "dist_vit": found.dist["vision"],
        "dist_llm": found.dist["text"],
        "efficiency": found.efficiency,
        "step_efficiency": found.step_efficiency,
        "batch": found.average_batch,
        "groups": found.groups,
        "left_out": found.left_out,
        "mixing": found.mixing,
        "random_mixing": found.random_mixing,
    }
    if plan.packed:
        least = least_groups(SampleSizes(NAMES, sizes.values[plan.samples]), plan.budgets)
        result["groups_over_bound"] = plan.groups / least
    return result


def compare(
    sizes: SampleSizes, ranks: int, epochs: int, budgets: tuple[int, ...] | None
) -> dict[str, dict[str, Any]]:
    """Return means over epochs per method; `worst_efficiency` is the least of the epochs."""
    result: dict[str, dict[str, Any]] = {}
    for method in methods(budgets):
        rows, seconds = [], []
        try:
            for epoch in range(epochs):
                start = time.process_time()
                plan = method.plan(sizes, ranks, epoch)
                seconds.append(time.process_time() - start)
                rows.append(figures(plan, sizes))
        except PlanError as error:
            result[method.name] = {"error": str(error)}
            continue
        result[method.name] = {
            **{key: round(statistics.fmean(row[key] for row in rows), 6) for key in rows[0]},
            "worst_efficiency": round(min(row["efficiency"] for row in rows), 6),
            "budgets": plan.budgets,
            "seconds": round(statistics.median(seconds), 4),
        }
    return result


def knob(sizes: SampleSizes, ranks: int, epochs: int) -> dict[str, dict[str, float]]:
    """Return figures of balance and mixing by setting, and without the levelling of sources."""
    result = {}
    for weight in (None, 0.0):
        for alike in KNOB:
            options = {} if weight is None else {"source_weight": weight}
            rows = [
                figures(plan_balanced(
                    sizes, ranks, samples_per_group=BATCH, model=MODEL, alike=alike, epoch=epoch,
                    **options,
                ), sizes)
                for epoch in range(epochs)
            ]
            keys = ("dist_vit", "dist_llm", "efficiency", "mixing", "random_mixing")
            name = f"alike_{alike}" + ("" if weight is None else "_sources_ignored")
            result[name] = {
                key: round(statistics.fmean(row[key] for row in rows), 6) for key in keys
            }
    return result


def million(sizes: SampleSizes, ranks: int, repeats: int) -> dict[str, Any]:
    """Return median CPU seconds to plan 1.2 million samples drawn from the data."""
    drawn = np.random.default_rng(0).integers(0, len(sizes), MILLION)
    many = SampleSizes(NAMES, sizes.values[drawn], sizes.sources[drawn])
    seconds = []
    for epoch in range(repeats):
        gc.collect()
        start = time.process_time()
        plan = plan_balanced(many, ranks, samples_per_group=BATCH, model=MODEL, epoch=epoch)
        seconds.append(time.process_time() - start)
    return {
        "plan_seconds": round(statistics.median(seconds), 3),
        "all_seconds": [round(s, 3) for s in seconds],
        **{key: round(value, 6) for key, value in figures(plan, many).items()},
    }


def drawn(epochs: int) -> dict[str, Any]:
    """Compare the default with ISF at the same budgets, on sizes of other distributions."""
    rows = {}
    for name, (count, ranks) in itertools.product(DISTRIBUTIONS, DRAWN_CASES):
        sizes = drawn_sizes(name, count, DRAWN_SEED)
        mine, theirs = [], []
        for epoch in range(epochs):
            plan = plan_balanced(
                sizes, ranks, samples_per_group=BATCH, model=MODEL, epoch=epoch
            )
            assert plan.budgets is not None
            least = -(-least_groups(sizes, plan.budgets) // ranks)
            mine.append(figures(plan, sizes) | {"steps_over_bound": plan.steps / least})
            with contextlib.suppress(PlanError):
                isf = plan_isf(sizes, ranks, plan.budgets, iterations=ISF_ITERATIONS, epoch=epoch)
                theirs.append(figures(isf, sizes)["step_efficiency"])
        row = {
            key: round(statistics.fmean(one[key] for one in mine), 4)
            for key in ("steps_over_bound", "efficiency", "step_efficiency", "batch")
        }
        if theirs:
            row["isf_step_efficiency"] = round(statistics.fmean(theirs), 4)
        rows[f"{name}_{count}_dp{ranks}"] = row
    over = [row["steps_over_bound"] for row in rows.values()]
    return {
        "drawn": rows,
        "drawn_steps_over_bound_median": round(statistics.median(over), 4),
        "drawn_steps_over_bound_max": max(over),
        "drawn_efficiency_min": min(row["efficiency"] for row in rows.values()),
        "drawn_step_efficiency_over_isf_min": round(min(
            row["step_efficiency"] / row["isf_step_efficiency"]
            for row in rows.values() if "isf_step_efficiency" in row
        ), 4),
    }


def documents(epochs: int) -> dict[str, Any]:
    """Measure the default on many samples with long tails, half of them text only."""
    sizes = drawn_sizes("documents", DOCUMENTS, DRAWN_SEED)
    plan_balanced(sizes, DOCUMENT_RANKS[0])  # compile first
    rows = {}
    for ranks in DOCUMENT_RANKS:
        seconds, found = [], []
        for epoch in range(epochs):
            start = time.process_time()
            plan = plan_balanced(sizes, ranks, samples_per_group=BATCH, epoch=epoch)
            seconds.append(time.process_time() - start)
            found.append(balance(plan, sizes))
        rows[f"dp{ranks}"] = {
            "efficiency": round(statistics.fmean(one.efficiency for one in found), 4),
            "step_efficiency": round(statistics.fmean(one.step_efficiency for one in found), 4),
            "steps": plan.steps,
            "seconds": round(statistics.median(seconds), 3),
        }
    return {
        "documents": rows,
        "documents_efficiency_min": min(row["efficiency"] for row in rows.values()),
        "documents_plan_seconds_max": max(row["seconds"] for row in rows.values()),
    }


def draw(path: Path, sizes: SampleSizes, ranks: int) -> None:
    """Draw the cost of every rank in 40 steps by method."""
    from matplotlib.figure import Figure

    from raymm.draw import palette
    from raymm.scheduler.minibatch.metrics import costs

    shown = {
        "random": ("random, padded", palette.HUES[4]),
        "length_grouped": ("length-grouped, padded", palette.HUES[3]),
        "isf_searched": ("OmniBal ISF, searched", palette.HUES[1]),
        "balanced": ("balanced", palette.HUES[0]),
    }
    figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True)
    chosen = {method.name: method for method in methods(None)}
    for axis, (name, (label, colour)) in zip(axes, shown.items(), strict=True):
        plan = chosen[name].plan(sizes, ranks, 0)
        of_ranks = costs(plan, sizes, MODEL).sum(2)
        # Costs per sample, so that groups of different sizes are comparable.
        of_ranks = of_ranks / of_ranks.mean()
        some = of_ranks[:40]
        step = np.arange(len(some))
        axis.vlines(step, some.min(1), some.max(1), color=colour, alpha=0.35, linewidth=2.5)
        axis.scatter(
            np.repeat(step, ranks), some.ravel(), s=5, color=colour, linewidths=0, zorder=3
        )
        efficiency = balance(plan, sizes, MODEL).efficiency
        axis.set_title(f"{label}\nefficiency {efficiency:.3f}", color=palette.TEXT, fontsize=10)
        axis.set_xlabel("step", color=palette.TEXT)
        axis.grid(axis="y", color=palette.FAINT, alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(colors=palette.TEXT)
    axes[0].set_ylabel("cost of a rank / mean", color=palette.TEXT)
    axes[0].set_ylim(bottom=0)
    figure.savefig(path)


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--data", type=Path, nargs="+", help="files of sample sizes")
    options.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="ranks (dp)")
    options.add_argument("--epochs", type=int, default=3, help="plans per row")
    options.add_argument("--budgets", type=int, nargs=2, help="tiles and tokens per group")
    options.add_argument("--repeats", type=int, default=3, help="large plans; 0 for none")
    options.add_argument("--draw", type=Path, help="also write a picture to this path")
    args = options.parse_args()
    budgets = tuple(args.budgets) if args.budgets else None
    console = common.console()
    if not args.data:
        result = {
            "machine": common.machine(), **drawn(args.epochs), **documents(args.epochs),
        }
        for case, row in (result["drawn"] | result["documents"]).items():
            console.print(f"{case:28} {row}", highlight=False)
        common.emit(result, args.json)
        return

    parts = {path.stem.split("_")[0]: read(path) for path in args.data}
    if len(parts) != len(args.data):
        parts = {path.stem: read(path) for path in args.data}
    sets = {name: SampleSizes(NAMES, part) for name, part in parts.items()}
    together = joined(list(parts.values()))
    if len(parts) > 1:
        sets["together"] = together
    plan_balanced(together, args.ranks[0], budgets)  # compile first
    plan_isf(together, args.ranks[0], iterations=1)

    result: dict[str, Any] = {"machine": common.machine(), "methods": {}}
    for name, sizes in sets.items():
        for ranks in args.ranks:
            case = f"{name}_dp{ranks}"
            result["methods"][case] = rows = compare(sizes, ranks, args.epochs, budgets)
            columns = (
                "pad", "dist_vit", "dist_llm", "efficiency", "step_efficiency", "batch",
                "left_out", "groups_over_bound", "mixing", "random_mixing", "budgets", "seconds",
            )
            table = Table(case, *columns)
            for method, row in rows.items():
                if "error" in row:
                    table.add_row(method, row["error"])
                    continue
                table.add_row(method, *(
                    f"{row[key]:.4f}" if isinstance(row.get(key), float) else str(row.get(key, ""))
                    for key in columns
                ))
            console.print(table)
    if len(parts) > 1:
        result["knob"] = {
            f"dp{ranks}": knob(together, ranks, args.epochs) for ranks in args.ranks
        }
        for ranks, rows in result["knob"].items():
            table = Table(f"together, {ranks}", *next(iter(rows.values())))
            for name, row in rows.items():
                table.add_row(name, *(f"{value:.4f}" for value in row.values()))
            console.print(table)
    if args.repeats:
        for ranks in args.ranks:
            result[f"million_dp{ranks}"] = million(together, ranks, args.repeats)
            console.print(f"1.2 million, dp {ranks}: {result[f'million_dp{ranks}']}")
        result["plan_seconds_1_2m"] = max(
            result[f"million_dp{ranks}"]["plan_seconds"] for ranks in args.ranks
        )
    # Worst figures of the default over data sets and ranks.
    worst = [rows["balanced"] for rows in result["methods"].values()]
    if any("error" in row for row in worst):
        raise SystemExit(f"balanced failed: {[row for row in worst if 'error' in row]}")
    for key in ("pad", "dist_vit", "dist_llm", "left_out", "groups_over_bound"):
        result[key] = max(row[key] for row in worst)
    result["efficiency"] = min(row["worst_efficiency"] for row in worst)
    result["mixing"] = {
        case: [rows["balanced"]["mixing"], rows["balanced"]["random_mixing"]]
        for case, rows in result["methods"].items()
    }
    if args.draw:
        draw(args.draw, together, args.ranks[0])
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
