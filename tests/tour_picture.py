"""Sequence pictures of the guided tours in ``docs/``: the functions that a page names, by process.

    python -m tests.tour_picture

draws ``docs/images/a-step.svg`` and the others again. A heading such as ``## Driver: submits the
step`` begins a section in the column of that process, and every numbered item that begins with the
link of a function adds it to the section. An arrow leads to the next section of another process.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.house import ROOT

TOURS = ("a-step", "a-plan", "a-checkpoint", "a-failure")
COLOURS = ("#A8437D", "#0068A3", "#007A59", "#B87300", "#5B5B9E")
_SECTION = re.compile(r"^## ([\w ]+): (.+)$")
_FUNCTION = re.compile(r"^\d+\. \[`([\w.]+)`\]")
# Pixels: widths of a column and of the box of a section in it, and heights.
COLUMN, BOX, LINE, HEAD, GAP = 300, 282, 17, 44, 18
_STYLE = """<style>
text { font: 12px monospace }
.process { font: bold 17px sans-serif; text-anchor: middle }
.title { font: bold 12px sans-serif; text-anchor: middle }
.box { fill: #fff; stroke-width: 1.5 }
.life { stroke: #999; stroke-dasharray: 4 4 }
.arrow { fill: none; stroke: #666; stroke-width: 1.6; marker-end: url(#head) }
</style>
<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker>"""


class Section(NamedTuple):
    """Consecutive functions of one process."""

    process: str
    title: str
    functions: list[str]


def sections(page: str) -> list[Section]:
    """Return the sections of a tour's text, in order, without those that name no function."""
    found: list[Section] = []
    for line in page.splitlines():
        if match := _SECTION.match(line):
            found.append(Section(*match.groups(), []))
        elif (match := _FUNCTION.match(line)) and found:
            found[-1].functions.append(match[1])
    return [section for section in found if section.functions]


def drawing(page: str) -> str:
    """Return the picture of a tour's text as SVG."""
    steps = sections(page)
    processes = list(dict.fromkeys(section.process for section in steps))
    parts: list[str] = []
    y, number, before = HEAD + GAP, 0, -1
    for process, title, functions in steps:
        column = processes.index(process)
        left, colour = column * COLUMN + GAP // 2, COLOURS[column % len(COLOURS)]
        if before not in (-1, column):
            end = left if column > before else left + BOX
            parts.append(f'<path d="M{_middle(before)} {y - GAP} V{y + 14} H{end}" class="arrow"/>')
        height = LINE * (len(functions) + 1) + 12
        parts.append(
            f'<rect x="{left}" y="{y}" width="{BOX}" height="{height}" rx="6" stroke="{colour}" '
            f'class="box"/>\n<text x="{_middle(column)}" y="{y + 18}" class="title" '
            f'fill="{colour}">{escape(title)}</text>'
        )
        for row, name in enumerate(functions, 2):
            number += 1
            parts.append(f'<text x="{left + 10}" y="{y + LINE * row}">{number} {name}</text>')
        before, y = column, y + height + GAP
    width = COLUMN * len(processes)
    lanes = [
        f'<path d="M{_middle(column)} {HEAD} V{y}" class="life"/>\n<text x="{_middle(column)}" '
        f'y="28" class="process" fill="{COLOURS[column % len(COLOURS)]}">{escape(process)}</text>'
        for column, process in enumerate(processes)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}">', _STYLE, f'<rect width="{width}" height="{y}" fill="#fff"/>', *lanes,
        *parts, "</svg>\n",
    ])


def _middle(column: int) -> int:
    return column * COLUMN + COLUMN // 2


def picture(tour: str) -> Path:
    """Return the file of a tour's picture."""
    return ROOT / "docs" / "images" / f"{tour}.svg"


if __name__ == "__main__":
    for tour in TOURS:
        picture(tour).write_text(drawing((ROOT / "docs" / f"{tour}.md").read_text()))
        print(f"wrote {picture(tour).relative_to(ROOT)}")
