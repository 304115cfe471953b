"""Compute the figures of the papers, print the tables, then the result line."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.tables import Table
from benchmarks.shared import common

PAPERS = ("cornstarch_v1", "omnibal", "lv_xattn", "cornstarch_v2", "mosaic")


def draw(paper: str, tables: Sequence[Table], folder: Path) -> None:
    """Draw raymm's figures over the printed ones, with a band of 10 %."""
    from matplotlib.figure import Figure

    from raymm.draw import palette

    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    shown = [table for table in tables if table.compared]
    values = [v for table in shown for row in table.compared for v in (row.paper, row.raymm)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    axes.fill_between(ends, [e / 1.1 for e in ends], [e * 1.1 for e in ends],
                      color=palette.WAIT, alpha=0.6, linewidth=0, label="within 10 %")
    axes.plot(ends, ends, color=palette.FAINT, linewidth=0.8)
    for at, table in enumerate(shown):
        axes.scatter(
            [row.paper for row in table.compared], [row.raymm for row in table.compared], s=16,
            color=palette.HUES[at % len(palette.HUES)], marker="os^Dv"[at // len(palette.HUES)],
            linewidths=0, alpha=0.85, label=table.name.partition(", ")[2],
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("paper", color=palette.TEXT)
    axes.set_ylabel("raymm", color=palette.TEXT)
    axes.set_title(shown[0].name.partition(", ")[0], color=palette.TEXT)
    axes.grid(color=palette.FAINT, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=palette.TEXT)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(folder / f"papers_{paper}.png")


def main() -> None:
    options = common.parser("figures of five papers, computed by raymm")
    options.add_argument("--papers", nargs="+", default=PAPERS, choices=PAPERS, metavar="PAPER",
                         help=f"papers: {', '.join(PAPERS)}")
    options.add_argument("--draw", type=Path, help="folder for a picture of every paper")
    args = options.parse_args()
    console = common.console()
    found: list[Table] = []
    started = time.perf_counter()
    for paper in args.papers:
        tables = importlib.import_module(f"benchmarks.papers.{paper}").tables()
        for table in tables:
            console.print(table.rich())
        if args.draw is not None:
            draw(paper, tables, args.draw)
        found += tables
    result = {
        "machine": common.machine(),
        "seconds": round(time.perf_counter() - started, 1),
        "tables": [table.to_dict() for table in found],
    }
    for table in result["tables"]:
        console.print(
            f"{table['name']:45} median {table['median_difference']}, worst "
            f"{table['worst_difference']}, rank correlation {table['rank_correlation']}",
            highlight=False, soft_wrap=True,
        )
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
