"""What a person sees of a comparison with baselines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rich.table import Table

from raymm.draw.row_table import row_table, time_text
from raymm.scheduler.baselines.baseline import Baseline

# Less than the digits that are printed.
SAME = 5e-4


class Timed(Protocol):
    """A plan, a mapping: what has predicted seconds of a step."""

    @property
    def seconds(self) -> float: ...


def comparison_rows(
    seconds: float, solved: Mapping[str, Timed | str], baselines: Iterable[Baseline[Any, Any]]
) -> list[dict[str, str]]:
    """A row for raymm's and for each baseline: predicted time of a step, and how much longer it
    is than raymm's; or why there is none.

    Args:
        seconds: of raymm's own.
        solved: per name, what a baseline found, or why it found nothing.
        baselines: these.
    """
    rows = [{"planner": "raymm", "step": time_text(seconds), "longer": "", "what it is": ""}]
    for baseline in baselines:
        solution, source = solved[baseline.name], baseline.source
        step, longer = "-", "-"
        if isinstance(solution, str):
            source = f"{source}: {solution}"
        else:
            more = solution.seconds / seconds - 1
            step = time_text(solution.seconds)
            longer = "the same" if abs(more) < SAME else f"{more:+.1%}"
        rows.append({
            "planner": baseline.name, "step": step, "longer": longer, "what it is": source
        })
    return rows


def comparison_table(
    seconds: float, solved: Mapping[str, Timed | str], baselines: Iterable[Baseline[Any, Any]]
) -> Table:
    """:func:`comparison_rows` as a rich table.

    Args:
        seconds, solved, baselines: as of :func:`comparison_rows`.
    """
    table = row_table(
        comparison_rows(seconds, solved, baselines), title="predicted step, and that of baselines",
        caption="by the same costs", left=("planner", "what it is"),
    )
    table.columns[-1].no_wrap = False
    return table
