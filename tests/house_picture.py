"""Picture of the rooms: their imports and their contents.

An arrow points from a room to an imported one. Imports that other arrows imply have no arrow (a
transitive reduction), and rooms are as high as their importers permit, so that few arrows are long;
long arrows pass other rooms through separate gaps (Sugiyama, 1981).
"""

from __future__ import annotations

import functools
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Outline

COLOURS = {"raymm": "#A8437D", "actors": "#0068A3", "kernels": "#B87300", "scheduler": "#007A59"}
# Two columns of two packages each, from the top; a unit is a pixel of a picture 1,000 wide.
COLUMNS = (("raymm", "kernels"), ("actors", "scheduler"))
WIDTH, GUTTER, HEADING, FLOOR, BETWEEN = 1000.0, 44.0, 34.0, 74.0, 30.0
BOX_HEIGHT, MOST_BOX_WIDTH, GAP, PASSAGE = 55.0, 290.0, 12.0, 4.0
NAME_SIZE, SENTENCE_SIZE, LETTER = 9.2, 6.7, 5.15  # points, points, units per small letter

Edges = Mapping[str, set[str]]
Place = tuple[float, float, float]  # centre, bottom, width


def draw_rooms(path: str | Path, imports: Edges, sentences: Mapping[str, str]) -> Path:
    """Draw the rooms of the four packages; ``.png`` or ``.svg``.

    Args:
        path: output file.
        imports: imported rooms per room, without cycles.
        sentences: contents of every room.

    Returns:
        The output path.
    """
    inside = {
        package: _reduced({
            room: {other for other in imports[room] if other.split("/")[0] == package}
            for room in imports if room.split("/")[0] == package
        })
        for package in COLOURS
    }
    levels = {package: _levels(edges) for package, edges in inside.items()}
    height = max(_height(levels[a]) + BETWEEN + _height(levels[b]) for a, b in COLUMNS)
    with matplotlib.rc_context({"font.family": "sans-serif"}):
        figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=125)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height))
        axes.set_axis_off()
        column_width = (WIDTH - GUTTER) / 2
        for column, packages in enumerate(COLUMNS):
            left, top = column * (column_width + GUTTER), height
            floors = sum(len(levels[package]) for package in packages)
            floor = (height - BETWEEN - 2 * HEADING) / floors
            for package in packages:
                bottom = top - HEADING - floor * len(levels[package])
                _ground(axes, package, (left, bottom, column_width, top - bottom))
                places = _places(levels[package], left, bottom, column_width, floor)
                for source, targets in inside[package].items():
                    for target in sorted(targets):
                        _arrow(axes, source, target, places, COLOURS[package])
                for room in inside[package]:
                    _room(axes, room, sentences[room], places[room])
                if package == "raymm":
                    raymm_bottom = bottom
                elif package == "actors":
                    actors_bottom = bottom
                top = bottom - BETWEEN
        right = column_width + GUTTER
        _between(axes, (column_width, height - 60), (right, height - 60))
        _between(axes, (right + column_width / 2, actors_bottom),
                 (right + column_width / 2, actors_bottom - BETWEEN))  # fmt: skip
        across = column_width + GUTTER / 2
        _between(axes, (right, actors_bottom + 20), (across, actors_bottom + 20),
                 (across, raymm_bottom - BETWEEN - 60), (column_width, raymm_bottom - BETWEEN - 60))
        figure.savefig(path)
    return Path(path)


def _reduced(edges: Edges) -> dict[str, set[str]]:
    """Return the edges that no other path implies."""

    @functools.cache
    def reach(room: str) -> frozenset[str]:
        return frozenset(edges[room]).union(*(reach(other) for other in edges[room]))

    return {
        room: {t for t in targets if not any(t in reach(other) for other in targets)}
        for room, targets in edges.items()
    }


def _levels(edges: Edges) -> list[list[str | tuple[str, str]]]:
    """Return rooms by level, the lowest first, and the passages of arrows through levels.

    Passages are (source, target); neighbours in a level are near the nodes that they connect to.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for room, targets in edges.items():
        for target in targets:
            importers[target].add(room)

    @functools.cache
    def lowest(room: str) -> int:
        return 1 + max((lowest(other) for other in edges[room]), default=-1)

    @functools.cache
    def level(room: str) -> int:
        return min((level(other) - 1 for other in importers[room]), default=lowest(room))

    found: list[list] = [[] for _ in range(1 + max(map(level, edges)))]
    joined: dict[object, set] = defaultdict(set)
    for room in edges:
        found[level(room)].append(room)
        for target in edges[room]:
            steps: list = [room]
            for passed in range(level(room) - 1, level(target), -1):
                found[passed].append((room, target))
                steps.append((room, target, passed))
            steps.append(target)
            for upper, lower in zip(steps, steps[1:], strict=False):
                joined[upper].add(lower)
                joined[lower].add(upper)
    for sweep in range(12):
        order = range(len(found)) if sweep % 2 == 0 else range(len(found) - 1, -1, -1)
        for number in order:
            beside = number - 1 if sweep % 2 == 0 else number + 1
            if 0 <= beside < len(found):
                _sort(found[number], number, found[beside], beside, joined)
    return found


def _sort(level: list, number: int, other: list, other_number: int, joined: Mapping) -> None:
    """Order a level by the mean position of connected nodes in another level."""

    def key(node: object, at: int) -> object:
        return (*node, at) if isinstance(node, tuple) else node

    place = {key(node, other_number): (i + 0.5) / len(other) for i, node in enumerate(other)}

    def mean(item: tuple[int, object]) -> float:
        index, node = item
        near = [place[n] for n in joined[key(node, number)] if n in place]
        return sum(near) / len(near) if near else (index + 0.5) / len(level)

    level[:] = [node for _, node in sorted(enumerate(level), key=mean)]


def _height(levels: Sequence) -> float:
    return HEADING + FLOOR * len(levels)


def _places(
    levels: Sequence[Sequence], left: float, bottom: float, width: float, floor: float
) -> dict[object, Place]:
    """Return the positions of every room, and of every passage by (source, target, level)."""
    places: dict[object, Place] = {}
    for number, nodes in enumerate(levels):
        rooms = [node for node in nodes if isinstance(node, str)]
        free = width - GAP * (len(nodes) + 1) - PASSAGE * (len(nodes) - len(rooms))
        box = min(free / max(len(rooms), 1), MOST_BOX_WIDTH)
        margin = (free - box * len(rooms)) / (len(nodes) + 1)
        x = left + GAP + margin
        for node in nodes:
            own = box if isinstance(node, str) else PASSAGE
            key = node if isinstance(node, str) else (*node, number)
            places[key] = x + own / 2, bottom + 9 + number * floor, own
            x += own + GAP + margin
    return places


def _ground(axes: Axes, package: str, bounds: tuple[float, float, float, float]) -> None:
    left, bottom, width, height = bounds
    axes.add_patch(FancyBboxPatch(
        (left + 2, bottom + 2), width - 4, height - 4, boxstyle="round,pad=0,rounding_size=10",
        fc=COLOURS[package], ec="none", alpha=0.10,
    ))  # fmt: skip
    axes.text(left + 16, bottom + height - 19, f"{package}/", fontsize=13, weight="bold",
              color=COLOURS[package], va="center")  # fmt: skip


def _room(axes: Axes, room: str, sentence: str, place: Place) -> None:
    x, y, width = place
    package, _, name = room.partition("/")
    axes.add_patch(FancyBboxPatch(
        (x - width / 2, y), width, BOX_HEIGHT, boxstyle="round,pad=0,rounding_size=6", fc="white",
        ec=COLOURS[package], lw=1.1, zorder=3,
    ))  # fmt: skip
    words = textwrap.wrap(sentence, int((width - 10) / LETTER))
    text = "\n".join(words if len(words) <= 3 else [*words[:2], words[2].rstrip(",;:") + " …"])
    title = name or package
    per_letter = LETTER * NAME_SIZE / SENTENCE_SIZE * 1.15  # bold letters are wider
    size = NAME_SIZE * min(1.0, (width - 6) / (len(title) * per_letter))
    axes.text(x, y + BOX_HEIGHT - 11, title, ha="center", va="center", zorder=4,
              fontsize=size, weight="bold", color="#222222")  # fmt: skip
    axes.text(x, y + 19, text, ha="center", va="center", zorder=4, fontsize=SENTENCE_SIZE,
              color="#444444", linespacing=1.1)  # fmt: skip


def _arrow(
    axes: Axes, source: str, target: str, places: Mapping[object, Place], colour: str
) -> None:
    """Draw an arrow from the bottom of a room to the top of another, vertical in passages."""
    passages = sorted(
        (place for key, place in places.items() if key[:2] == (source, target)),
        key=lambda place: -place[1],
    )
    points = [places[source][:2]]
    for x, y, _ in passages:
        points += [(x, y + BOX_HEIGHT), (x, y)]
    points.append((places[target][0], places[target][1] + BOX_HEIGHT))
    vertices, codes = [points[0]], [Outline.MOVETO]
    for index, ((x, y), (to_x, to_y)) in enumerate(zip(points, points[1:], strict=False)):
        middle = (y + to_y) / 2
        curved = index % 2 == 0
        vertices += [(x, middle), (to_x, middle), (to_x, to_y)] if curved else [(to_x, to_y)]
        codes += [Outline.CURVE4] * 3 if curved else [Outline.LINETO]
    axes.add_patch(FancyArrowPatch(
        path=Outline(vertices, codes), arrowstyle="-|>", mutation_scale=9, lw=1.1, color=colour,
        zorder=2, shrinkA=0, shrinkB=0,
    ))  # fmt: skip


def _between(axes: Axes, *points: tuple[float, float]) -> None:
    """Draw one arrow for all imports of a package by another."""
    axes.add_patch(FancyArrowPatch(
        path=Outline(points), arrowstyle="-|>,head_width=0.3", mutation_scale=16, lw=3.5,
        color="#666666", zorder=5,
    ))  # fmt: skip
