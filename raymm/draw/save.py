"""Atomic writing of figures to files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

SUFFIXES = (".png", ".svg")
DPI = 130  # pixels per inch of a PNG: small text stays sharp


def picture_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture, before any work is done. Raises ValueError unless the name ends
    in ``.png`` or ``.svg``."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"picture {str(target)!r}: the name must end in {' or '.join(SUFFIXES)}")
    return target


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sized in inches, without pyplot state and display."""
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure atomically, and create missing folders. The same figure results in the same
    PNG. Raise a ``ValueError`` if the name ends neither in ``.png`` nor in ``.svg``, and an
    ``OSError`` if the folder cannot be written; no file is left."""
    target = picture_path(path)
    kind = target.suffix.lower()[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=f".tmp.{kind}"
    )
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            if kind == "svg":
                figure.savefig(stream, format=kind, dpi=DPI, metadata={"Date": None})
            else:
                _save_png(figure, stream)
        os.chmod(temporary, 0o644)  # mkstemp creates private files
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _save_png(figure: Figure, stream: BinaryIO) -> None:
    """Write a figure with a palette of 256 colours, at a third of the size. Flat colours are exact;
    only the shades at the edges of letters are merged."""
    figure.set_dpi(DPI)
    canvas = cast(FigureCanvasAgg, figure.canvas)
    canvas.draw()
    indexed = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(
        256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
    )
    indexed.save(stream, format="PNG", dpi=(DPI, DPI))


def text_width(figure: Figure, text: str, size: float) -> float:
    """Return the width of a text in inches, of its widest line if there are several. ``figure``
    must not be drawn yet; ``size`` is in points."""
    artist = figure.text(0, 0, text, fontsize=size)
    box = artist.get_window_extent(cast(FigureCanvasAgg, figure.canvas).get_renderer())
    artist.remove()
    return box.width / figure.dpi
