"""What a person sees of a mapping: a table, an explanation, its picture."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.table import Table

from raymm.draw.mapping import draw_mapping
from raymm.draw.notebook import figures_html
from raymm.draw.row_table import html_table, row_table, time_text
from raymm.planning.mapping_result import MappingResult
from raymm.scheduler.multiplex.mapping import module_seconds
from raymm.scheduler.schedule.memory import GIB

_LEFT = ("module", "GPUs")


def mapping_rows(planned: MappingResult) -> list[dict[str, str]]:
    """A row per module of every stage: its GPUs, its quota of each, milliseconds of forward and
    backward beside the others and alone, those of the stage, and GiB on each of its GPUs."""
    problem, mapping = planned.problem, planned.mapping
    rows = []
    for index, stage in enumerate(mapping.stages):
        times = module_seconds(problem, stage.placements, mapping.slices)
        for first, (placement, seconds) in enumerate(zip(stage.placements, times, strict=True)):
            m, degree = problem.names.index(placement.module), len(placement.gpus).bit_length() - 1
            whole = float(problem.seconds[m, degree, placement.quota])
            alone = whole * placement.slices / mapping.slices
            rows.append({
                "stage": str(index) if not first else "",
                "module": placement.module + (
                    f" {placement.slices}/{mapping.slices}" if mapping.slices > 1 else ""
                ),
                "GPUs": gpus_text(placement.gpus),
                "quota": f"{placement.quota / mapping.steps:.0%}",
                "ms": milliseconds(seconds),
                "alone": milliseconds(alone),
                "GiB": f"{int(problem.memory[m, degree]) / GIB:.2f}",
                "stage ms": milliseconds(stage.seconds) if not first else "",
            })
    return rows


def mapping_table(planned: MappingResult) -> Table:
    """:func:`mapping_rows`, for a console."""
    rows = mapping_rows(planned)
    stages, gpus = len(planned.mapping.stages), planned.mapping.gpus
    return row_table(
        rows,
        title=f"{stages} stage{'s' * (stages != 1)} on {gpus} GPU{'s' * (gpus != 1)}, multiplexed"
        + (" (estimates)" if planned.estimated else ""),
        caption="quota: share of each GPU's multiprocessors; ms: forward and backward beside the "
        "others; memory in GiB on each GPU",
        left=_LEFT,
        sections=[i for i, row in enumerate(rows) if row["stage"] and i],
    )


def explanation(planned: MappingResult) -> str:
    """How long an iteration takes, and how that was found."""
    mapping = planned.mapping
    samples = f" of {planned.batch} samples" if planned.batch else ""
    lines = [f"predicted {time_text(mapping.seconds)} per iteration{samples}; {planned.source}"]
    if mapping.bound:
        proof = "proven optimal (of whole modules)" if mapping.optimal else (
            f"no mapping of whole modules takes less than {time_text(mapping.bound)} (gap "
            f"{mapping.gap:.1%})"
        )
        lines.append(f"found by {mapping.method}; under this model {proof}")
    else:
        lines.append(f"found by {mapping.method}; nothing is proven of it")
    lines.append(f"interference: {planned.interference}")
    if planned.problem.memory_bytes is not None:
        lines.append(
            f"memory: at most {max(planned.memory) / GIB:.2f} GiB on a GPU over an iteration, of "
            f"{planned.problem.memory_bytes / GIB:.2f} GiB"
        )
    if planned.unfit:
        lines.append(f"does not fit: {planned.unfit}")
    lines.append("not counted: the optimizer, messages between modules, kernel launches"
                 if planned.estimated else
                 "not counted: the optimizer, messages between modules")  # fmt: skip
    return "\n".join([*lines, *(f"note: {note}" for note in planned.notes)])


def draw_planned(
    planned: MappingResult, path: str | Path, title: str | None = None
) -> Path:
    """Draw the mapping, a lane per GPU.

    Args:
        planned: the mapping.
        path: file to write, ``.png`` or ``.svg``.
        title: heading of the picture.
    """
    return draw_mapping(
        planned.problem, planned.mapping, path, title=title,
        note=("estimates, not measured" if planned.estimated else "")
    )


def planned_html(planned: MappingResult) -> str:
    """Table, explanation and the picture of the mapping, for notebooks."""
    with tempfile.TemporaryDirectory() as folder:
        picture = draw_planned(planned, Path(folder) / "mapping.png")
        return html_table(mapping_rows(planned), explanation(planned)) + figures_html(
            {"the mapping": picture}
        )


def gpus_text(gpus: tuple[int, ...]) -> str:
    """``0-3``, or ``0,2`` where they are not neighbours."""
    if len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1:
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))


def milliseconds(seconds: float) -> str:
    """A number of three digits, or whole."""
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
