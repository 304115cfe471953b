"""Colours: one hue per module, the same in every picture of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.colors import to_rgb

from raymm.scheduler.program.program import Op

RGB = tuple[float, float, float]

# The colours of Okabe and Ito, which colour-blind readers can distinguish, without black and yellow
# (too light for text on it), and three more for graphs with many modules.
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
        "#7A5195", "#8C613C", "#7F9C1A")
# Common modules have fixed colours, also in pictures that show only some modules.
USUAL = {"llm": HUES[0], "vision": HUES[2], "audio": HUES[1], "video": HUES[3]}
WAIT = "#D4D4D4"
COLLECTIVE = "#6B6B6B"
PROGRESS = HUES[2]
TEXT = "#222222"
FAINT = "#777777"


def module_hues(modules: Iterable[str]) -> dict[str, RGB]:
    """Return a base colour per module, which depends on the names and not on their order."""
    names = sorted(set(modules))
    hues = {name: USUAL[name] for name in names if name in USUAL}
    free = [hue for hue in HUES if hue not in hues.values()] or list(HUES)
    unnamed = [name for name in names if name not in USUAL]
    hues |= {name: free[i % len(free)] for i, name in enumerate(unnamed)}
    return {name: to_rgb(hues[name]) for name in names}


def tint(colour: RGB, amount: float) -> RGB:
    """Return the colour mixed with white: 0 keeps it, 1 makes it white."""
    return tuple(c + (1.0 - c) * amount for c in colour)  # type: ignore[return-value]


def shade(colour: RGB, amount: float) -> RGB:
    """Return the colour mixed with black: 0 keeps it, 1 makes it black."""
    return tuple(c * (1.0 - amount) for c in colour)  # type: ignore[return-value]


def ink_on(colour: RGB) -> str:
    """Return dark or white ink, whichever is easier to read on the colour."""
    red, green, blue = colour
    return TEXT if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


class Look(NamedTuple):
    """Appearance of a compute op: fill, edge and hatch of its box, and its name in the legend."""

    fill: RGB
    edge: RGB
    hatch: str
    name: str


WHITE: RGB = (1.0, 1.0, 1.0)
_NAMES = {
    Op.FORWARD_NO_GRAD: "forward, no grad",
    Op.FORWARD_CHECKPOINTED: "forward, to be recomputed",
    Op.FORWARD: "forward",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD_INPUT: "backward of inputs (B_d)",
    Op.BACKWARD: "backward",
    Op.BACKWARD_WEIGHT: "backward of weights (B_w)",
}


def op_looks(hue: RGB) -> dict[Op, Look]:
    """Return the look of every compute op in a module's hue, from light to dark in the order of a
    microbatch. Lightness distinguishes ops, also for colour-blind readers and in grey prints."""
    fills = {
        Op.FORWARD_NO_GRAD: tint(hue, 0.89),
        Op.FORWARD_CHECKPOINTED: tint(hue, 0.70),
        Op.FORWARD: tint(hue, 0.48),
        Op.RECOMPUTE: tint(hue, 0.50),
        Op.BACKWARD_INPUT: hue,
        Op.BACKWARD: shade(hue, 0.38),
        Op.BACKWARD_WEIGHT: shade(hue, 0.70),
    }
    return {
        op: Look(
            fill,
            hue if op is Op.FORWARD_NO_GRAD else WHITE,
            "/////" if op is Op.RECOMPUTE else "",
            _NAMES[op],
        )
        for op, fill in fills.items()
    }
