"""Figures before they are written to files, for assertions on their content."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


class Drawn:
    """Content of the last picture."""

    figure: Figure

    def texts(self) -> list[str]:
        return [text.get_text() for text in self.figure.findobj(Text) if text.get_text()]

    def overlapping_texts(self) -> list[tuple[str, str]]:
        """Return pairs of visible texts whose boxes share more than a pixel in both directions."""
        boxes = sorted(self.placed(), key=lambda entry: entry[1].x0)
        pairs = []
        for index, (one, a) in enumerate(boxes):
            for other, b in boxes[index + 1:]:
                if b.x0 > a.x1 - 1:
                    break
                if min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
                    pairs.append((one, other))
        return pairs

    def outside(self) -> list[str]:
        """Return texts that extend beyond the page."""
        page = self.figure.bbox
        return [
            text for text, box in self.placed()
            if box.x0 < 0 or box.y0 < 0 or box.x1 > page.x1 or box.y1 > page.y1
        ]

    def placed(self) -> list[tuple[str, Bbox]]:
        """Return visible texts and their positions in pixels."""
        self.figure.draw_without_rendering()  # places legends
        renderer = self.figure.canvas.get_renderer()
        # Axes keep ticks beyond their limits, which are not drawn.
        beyond = {
            id(tick.label1) for axes in self.figure.axes for tick in axes.xaxis.get_major_ticks()
            if not axes.get_xlim()[0] <= tick.get_loc() <= axes.get_xlim()[1]
        }
        return [
            (text.get_text(), text.get_window_extent(renderer))
            for text in self.figure.findobj(Text)
            if text.get_text().strip() and text.get_visible() and id(text) not in beyond
        ]


@pytest.fixture
def drawn(monkeypatch) -> Drawn:
    result = Drawn()
    for module in ("schedule", "graph"):
        name = f"raymm.draw.{module}.save_figure"

        def keep(figure, path):
            result.figure = figure
            return path

        monkeypatch.setattr(name, keep)
    return result
