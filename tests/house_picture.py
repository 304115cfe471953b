"""A picture of the rooms: who stands on whom, and how large each room is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

COLOURS = {"kernels": "#E69F00", "scheduler": "#009E73", "actors": "#0072B2", "raymm": "#CC79A7"}
# Where each package stands: left, bottom and right edge, and its height, in units of the picture.
BOUNDS = {
    "kernels": (0.0, 0.0, 43.0, 30.0), "scheduler": (47.0, 0.0, 100.0, 30.0),
    "actors": (0.0, 35.0, 100.0, 38.0), "raymm": (0.0, 78.0, 100.0, 62.0),
}  # fmt: skip
_GAP = 1.2
_MOST_HEIGHT = 5.0


def draw_rooms(
    path: str | Path, lines: Mapping[str, int], imports: Mapping[str, set[str]]
) -> Path:
    """Draw the rooms of the four packages; ``.png`` or ``.svg``.

    Args:
        path: the file to write.
        lines: of every room.
        imports: per room the rooms that it imports. They make no circle.

    Returns:
        the path written.
    """
    with matplotlib.rc_context({"font.size": 7, "font.family": "sans-serif"}):
        figure = Figure(figsize=(11, 13.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        places: dict[str, tuple[float, float, float, float]] = {}
        for package, bounds in BOUNDS.items():
            rooms = [room for room in lines if room.split("/")[0] == package]
            places |= _places(_floors(rooms, imports), lines, bounds)
            _package(axes, package, bounds)
        for source, targets in imports.items():
            for target in targets:
                if source.split("/")[0] == target.split("/")[0]:
                    _arrow(axes, places[source], places[target], COLOURS[source.split("/")[0]])
        for room, place in places.items():
            _room(axes, room, lines[room], place)
        for source, target in (("raymm", "actors"), ("actors", "kernels"), ("actors", "scheduler")):
            _between(axes, BOUNDS[source], BOUNDS[target])
        axes.set_xlim(-1, 101)
        axes.set_ylim(-1, 143)
        axes.set_axis_off()
        figure.savefig(path)
    return Path(path)


def _floors(rooms: Sequence[str], imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms of a package by floor, the ground first."""
    floor: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in floor:
            floor[room] = 1 + max((of(o) for o in imports[room] if o in rooms), default=-1)
        return floor[room]

    by_floor: dict[int, list[str]] = defaultdict(list)
    for room in rooms:
        by_floor[of(room)].append(room)
    return [by_floor[number] for number in sorted(by_floor)]


def _places(
    floors: Sequence[Sequence[str]], lines: Mapping[str, int], bounds: Sequence[float]
) -> dict[str, tuple[float, float, float, float]]:
    """(x, y, width, height) per room; a room's width grows with its lines."""
    left, bottom, right, height = bounds
    step = (height - 3.0) / len(floors)
    places = {}
    for number, rooms in enumerate(floors):
        free = right - left - 2 * _GAP - _GAP * (len(rooms) - 1)
        weights = [max(lines[room], 200) ** 0.5 for room in rooms]
        widths = [min(free * weight / sum(weights), 22.0) for weight in weights]
        spare = free - sum(widths)
        x = left + _GAP + spare / 2
        for room, width in zip(rooms, widths, strict=True):
            places[room] = x, bottom + _GAP + number * step, width, min(step - 1.2, _MOST_HEIGHT)
            x += width + _GAP
    return places


def _package(axes: Axes, package: str, bounds: Sequence[float]) -> None:
    left, bottom, right, height = bounds
    axes.add_patch(FancyBboxPatch(
        (left, bottom), right - left, height, boxstyle="round,pad=0,rounding_size=0.8",
        fc=COLOURS[package], ec="none", alpha=0.10,
    ))  # fmt: skip
    axes.text(left + _GAP, bottom + height - 1.6, f"{package}/", fontsize=11, weight="bold",
              color=COLOURS[package], va="center")  # fmt: skip


def _room(
    axes: Axes, room: str, lines: int, place: tuple[float, float, float, float]
) -> None:
    x, y, width, height = place
    package, _, name = room.partition("/")
    axes.add_patch(FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.5", fc="white",
        ec=COLOURS[package], lw=1.0, zorder=3,
    ))  # fmt: skip
    words = name or package
    if len(words) > width * 0.95 and "/" in words:
        words = words.replace("/", "/\n", 1)
    axes.text(x + width / 2, y + height / 2, f"{words}\n{lines:,}", ha="center", va="center",
              zorder=4, fontsize=6.5, linespacing=1.1)  # fmt: skip


def _arrow(
    axes: Axes, source: tuple[float, float, float, float],
    target: tuple[float, float, float, float], colour: str,
) -> None:
    axes.add_patch(FancyArrowPatch(
        (source[0] + source[2] / 2, source[1]), (target[0] + target[2] / 2, target[1] + target[3]),
        arrowstyle="-|>", mutation_scale=5, lw=0.5, color=colour, alpha=0.45, zorder=2,
        shrinkA=0, shrinkB=0,
    ))  # fmt: skip


def _between(axes: Axes, upper: Sequence[float], lower: Sequence[float]) -> None:
    """One arrow for all imports of a package by another."""
    x = (max(upper[0], lower[0]) + min(upper[2], lower[2])) / 2
    axes.add_patch(FancyArrowPatch(
        (x, upper[1]), (x, lower[1] + lower[3]), arrowstyle="-|>", mutation_scale=14, lw=2.5,
        color="#666666", zorder=5, shrinkA=0, shrinkB=0,
    ))  # fmt: skip
