"""Cornstarch v2: steps of frozen-aware and -unaware pipelines, from Table 2's stage times.

Stage times, and the stage counts that they imply, are those of
:mod:`benchmarks.shared.paper_rows`; a step has 12 microbatches of 4 samples under 1F1B, and
messages cost nothing.
"""

from __future__ import annotations

from benchmarks.papers.tables import Row, Table, paired
from benchmarks.shared.paper_rows import ROWS, table_plan
from raymm.scheduler.schedule.lower import iteration_time

# Table 2: seconds per iteration, (aware, unaware).
TABLE_2 = {
    "SSS": (21.81, 25.67), "MMS": (40.34, 41.21), "LLS": (66.14, 66.20), "SSM": (66.56, 73.94),
    "MMM": (70.37, 173.01), "LLM": (87.43, 177.39), "SSL": (138.45, 137.62),
    "MML": (138.97, 180.28), "LLL": (143.76, 247.79),
}
# §5.2: mean gain over both baselines, over FSDP, over Megatron*.
MEAN_GAINS = {"both baselines": 2.26, "FSDP": 3.36, "Megatron*": 1.62}


def tables() -> list[Table]:
    """Return Table 2 and the mean gains."""
    rows = []
    for row in ROWS:
        for aware in (True, False) if row.name in TABLE_2 else ():
            plan = table_plan(row, 1e-3, aware, "1f1b")
            rows.append((
                f"{row.name}, {'aware' if aware else 'unaware'}",
                TABLE_2[row.name][not aware], iteration_time(plan),
            ))
    missing = "stages per module (those that the printed times imply are used), time outside stages"
    figure_5 = "bars of Figure 5, FSDP's traffic and overlap, Megatron*'s stages"
    return [
        Table(
            "Cornstarch v2, Table 2: iteration", "§5.3", "s per iteration, from its stage times",
            tuple(Row(*row) for row in rows), missing,
        ),
        Table(
            "Cornstarch v2, Table 2: gain", "§5.3", "iteration time, unaware over aware",
            paired(rows, lambda name: name.split(",")[0]), missing,
        ),
        Table(
            "Cornstarch v2, Figure 5: mean gain", "§5.2", "throughput, Cornstarch over a baseline",
            tuple(Row(name, gain, None, figure_5) for name, gain in MEAN_GAINS.items()), figure_5,
        ),
    ]
