"""Picture of layer costs: a bar per layer with F, B_d and B_w, grouped by module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from raymm.draw.palette import FAINT, TEXT, module_hues, tint
from raymm.draw.save import new_figure, picture_path, save_figure, text_width
from raymm.scheduler.costs.layer_costs import CostProfile

# Inches; font sizes in points.
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 0.75, 0.3, 0.85, 0.6, 0.5
BAR, NARROWEST, WIDEST, HEIGHT = 0.32, 1.1, 14.0, 3.2
LEGEND = 5.0
LABEL_SIZE = 9
PARTS = (("forward", "F", 0.0), ("backward_input", "B_d", 0.42), ("backward_weight", "B_w", 0.75))


def draw_profile(
    profile: CostProfile,
    path: str | os.PathLike[str],
    *,
    projectors: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Draw a profile's times in milliseconds, on one scale for all modules, and return the path.
    Raise a ``ValueError`` for another file suffix.

    Args:
        projectors: modules whose last layer is a projector, which is labelled ``P``.
    """
    target = picture_path(path)
    names = list(profile.modules)
    hues = module_hues(names)
    widths = _widths({name: len(profile.modules[name]) for name in names})
    plots = sum(widths.values()) + BETWEEN * (len(names) - 1)
    total = LEFT + RIGHT + max(plots, LEGEND)
    height = TOP + HEIGHT + BOTTOM
    figure = new_figure(total, height)
    highest = max(
        sum(getattr(layer, field) for field, *_ in PARTS)
        for layers in profile.modules.values() for layer in layers
    )
    left = LEFT
    for number, name in enumerate(names):
        layers = profile.modules[name]
        box = (left / total, BOTTOM / height, widths[name] / total, HEIGHT / height)
        axes = figure.add_axes(box)
        left += widths[name] + BETWEEN
        base = [0.0] * len(layers)
        for field, _, amount in PARTS:
            values = [1e3 * getattr(layer, field) for layer in layers]
            axes.bar(
                range(len(layers)), values, bottom=base, width=0.82,
                color=tint(hues[name], amount), linewidth=0,
            )
            base = [a + b for a, b in zip(base, values, strict=True)]
        axes.set_xlim(-0.6, len(layers) - 0.4)
        axes.set_ylim(0, 1.06e3 * highest or 1.0)
        step = max(1, round(len(layers) * 0.28 / widths[name]))
        ticks = list(range(0, len(layers), step))
        labels = [str(tick) for tick in ticks]
        if name in projectors:
            last = len(layers) - 1
            inner = [(t, label) for t, label in zip(ticks, labels, strict=True) if t < last]
            ticks, labels = [t for t, _ in inner] + [last], [label for _, label in inner] + ["P"]
        axes.set_xticks(ticks, labels, fontsize=LABEL_SIZE - 1, color=TEXT)
        axes.tick_params(axis="y", labelsize=LABEL_SIZE - 1, colors=TEXT, labelleft=number == 0)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", *(("left",) if number else ())):
            axes.spines[side].set_visible(False)
        if number == 0:
            axes.set_ylabel("ms per microbatch", fontsize=LABEL_SIZE, color=TEXT)
        else:
            axes.tick_params(axis="y", length=0)
        tokens = f", {profile.tokens[name]} tokens" if name in profile.tokens else ""
        axes.set_xlabel(f"{name}{tokens}", fontsize=LABEL_SIZE, color=TEXT)
    _legend(figure, total, height, hues[names[0]])
    heading = title or f"{profile.source} costs, {profile.device}, {profile.dtype}"
    figure.text(
        LEFT / total, 1 - 0.22 / height, heading, fontsize=LABEL_SIZE + 2, color=TEXT, va="center"
    )
    return save_figure(figure, target)


def _widths(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the width of each module's plot in inches; many layers get thinner bars."""
    bar = min(BAR, WIDEST / max(1, sum(counts.values())))
    return {name: max(NARROWEST, bar * count) for name, count in counts.items()}


def _legend(figure, total: float, height: float, hue) -> None:
    x, y = LEFT, 0.52
    words = {"F": "forward", "B_d": "gradient of the input", "B_w": "gradient of the weights"}
    for _, label, amount in PARTS:
        figure.text(
            x / total, 1 - y / height, "\u25a0", fontsize=LABEL_SIZE + 3, va="center",
            color=tint(hue, amount),
        )
        text = f"{label}: {words[label]}"
        figure.text(
            (x + 0.2) / total, 1 - y / height, text, fontsize=LABEL_SIZE, va="center", color=FAINT
        )
        x += 0.2 + text_width(figure, text, LABEL_SIZE) + 0.25
