"""A picture of what a model has answered: held-out items with what it wrote below, and what is
right where it wrote something else."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from PIL import Image

from raymm.draw.save import new_figure, save_figure

COLUMNS, ROWS = 6, 4
_WIDTH = 26  # letters of a line
_RIGHT, _WRONG = "#1a7f37", "#b42318"


def draw_answers(texts: Sequence[Mapping[str, str]], data: Path, out: Path) -> Path:
    """Write a PNG of the first texts, equally many of both questions, and return its path.

    Args:
        texts: with ``id``, ``text`` and ``answer``.
        data: JSON lines of the samples, by whose ``id`` a picture is found.
        out: the file.
    """
    rows = map(json.loads, data.read_text(encoding="utf-8").splitlines())
    pictures = {row["id"]: data.parent / row["images"][0] for row in rows}
    figure = new_figure(2.1 * COLUMNS, 2.6 * ROWS)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(ROWS, COLUMNS).flatten()
    for axis in axes:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    for axis, text in zip(axes, _mixed(texts), strict=False):
        right = text["text"] == text["answer"]
        lines = [_short(text["text"]) or "(nothing)"]
        lines += [] if right else [f"({_short(text['answer'])})"]
        with Image.open(pictures[text["id"]]) as picture:
            axis.imshow(picture.convert("RGB"))
        axis.set_xlabel("\n".join(lines), fontsize=9, color=_RIGHT if right else _WRONG)
    return save_figure(figure, out)


def _mixed(texts: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    questions: dict[str, list[Mapping[str, str]]] = {}
    for text in texts:
        questions.setdefault(text["id"].partition("/")[0], []).append(text)
    return [text for group in zip_longest(*questions.values()) for text in group if text]


def _short(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, max_lines=2, placeholder="…"))
