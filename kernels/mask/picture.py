"""Picture of a mask, readable at sixteen tokens and at a million."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from raymm.kernels.mask.columns import ATTEND, IDENTITY, KEY_START, START

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Most rows that are counted per pixel, evenly spaced.
_ROWS_PER_PIXEL = 32
# Colors of Okabe and Ito, distinct for color-blind readers: text, then encoders.
_HUES = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#8C613C")
_FEWEST_SHOWN = 0.35  # a pixel with a visible pair must not look empty


class Mask(Protocol):
    """The part of :class:`raymm.kernels.mask.mask.AttentionMask` that a picture reads."""

    query_table: np.ndarray
    key_table: np.ndarray
    n_queries: int
    n_keys: int

    @property
    def query_stops(self) -> np.ndarray:
        """Ends of the segments of rows, (S,) int64."""
        ...

    @property
    def key_stops(self) -> np.ndarray:
        """Ends of the segments of keys, (Sk,) int64."""
        ...

    def bounds(self) -> np.ndarray:
        """Return lo1, hi1, lo2, hi2 of every row, (4, Tq) int64."""
        ...

    def area(self) -> int:
        """Return the number of visible pairs."""
        ...


def visible_share(mask: Mask, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible share of each pixel, computed from the table.

    Args:
        width: most pixels a side; short masks get a whole number of pixels per token.

    Returns:
        Shares (kinds, H, W) float in [0, 1], the fraction of each pixel's pairs that are visible
        with a key of the kind; and the identity bits of the kinds, (kinds,) int64.
    """
    rows = np.linspace(0, mask.n_queries, min(width, mask.n_queries) + 1).astype(np.int64)
    columns = np.linspace(0, mask.n_keys, min(width, mask.n_keys) + 1).astype(np.int64)
    identities = np.unique(mask.key_table[:, IDENTITY])
    lengths = mask.key_stops - mask.key_table[:, KEY_START]
    before = [
        np.append(0, np.cumsum(np.repeat(mask.key_table[:, IDENTITY] == identity, lengths)))
        for identity in identities
    ]
    bounds = mask.bounds()
    attend = np.repeat(
        mask.query_table[:, ATTEND], mask.query_stops - mask.query_table[:, START]
    )
    shares = np.zeros((len(identities), len(rows) - 1, len(columns) - 1))
    for y, (top, bottom) in enumerate(zip(rows[:-1], rows[1:], strict=True)):
        count = min(bottom - top, _ROWS_PER_PIXEL)
        picked = np.linspace(top, bottom - 1, count).astype(np.int64)
        lo1, hi1, lo2, hi2 = bounds[:, picked, None]
        for kind, identity in enumerate(identities):
            sees = (attend[picked] & identity) != 0

            def count_keys(
                lo: np.ndarray, hi: np.ndarray, before: np.ndarray = before[kind]
            ) -> np.ndarray:
                cumulative = before[np.clip(columns, lo, np.maximum(lo, hi))]
                return cumulative[:, 1:] - cumulative[:, :-1]

            overlap = count_keys(np.maximum(lo1, lo2), np.minimum(hi1, hi2))
            seen = count_keys(lo1, hi1) + count_keys(lo2, hi2) - overlap
            shares[kind, y] = (seen * sees[:, None]).mean(axis=0) / np.diff(columns)
    return shares, identities


def draw_mask(mask: Mask, width: int = 512) -> Figure:
    """Draw a mask: rows are queries, columns keys. The color is the key's kind and its strength the
    visible share of the pixel. Strips along the top and the left show the kinds of the tokens.

    Raises:
        ValueError: the width is below 16, or the mask has no rows or keys.
    """
    import matplotlib
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if width < 16:
        raise ValueError(f"width must be at least 16 pixels, got {width}")
    if not mask.n_queries or not mask.n_keys:
        raise ValueError(f"cannot draw a mask of {mask.n_queries} rows and {mask.n_keys} keys")
    shares, identities = visible_share(mask, width)
    hues = np.array([to_rgb(_HUES[_kind(i) % len(_HUES)]) for i in identities])
    # Lift small shares to a visible tint; the order of shares is kept.
    strength = np.where(shares > 0, _FEWEST_SHOWN + (1 - _FEWEST_SHOWN) * shares, 0.0)
    total = shares.sum(axis=0)
    weight = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
    ink = (strength * weight).sum(axis=0)[..., None]
    image = 1 - ink * (1 - np.einsum("kyx,kc->yxc", weight, hues))

    with matplotlib.rc_context({"font.size": 8, "axes.linewidth": 0.6}):
        figure = Figure(figsize=(5.4, 5.6), dpi=150, layout="constrained")
        grid = figure.add_gridspec(
            2, 2, width_ratios=(1, 30), height_ratios=(1, 30), wspace=0.01, hspace=0.01
        )
        axes = figure.add_subplot(grid[1, 1])
        extent = (0, mask.n_keys, mask.n_queries, 0)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
        if len(identities) > 1:
            _strip(figure.add_subplot(grid[0, 1]), mask, False)
            if mask.n_queries == mask.n_keys:
                _strip(figure.add_subplot(grid[1, 0]), mask, True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
            axis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.tick_right()
        axes.yaxis.set_label_position("right")
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        share = mask.area() / (mask.n_queries * mask.n_keys)
        figure.suptitle(
            f"{mask.n_queries:,} queries × {mask.n_keys:,} keys, {share:.1%} visible", fontsize=9
        )
        if len(identities) > 1:
            handles = [
                Patch(color=hue, label=_name(identity))
                for hue, identity in zip(hues, identities, strict=True)
            ]
            figure.legend(
                handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
            )
    return figure


def _strip(axes, mask: Mask, vertical: bool) -> None:
    """Draw the kinds of the tokens along one side."""
    from matplotlib.colors import to_rgb

    ends = mask.key_stops
    for start, stop, identity in zip(
        mask.key_table[:, KEY_START], ends, mask.key_table[:, IDENTITY], strict=True
    ):
        hue = to_rgb(_HUES[_kind(identity) % len(_HUES)])
        (axes.axhspan if vertical else axes.axvspan)(start, stop, color=hue, lw=0)
    (axes.set_ylim if vertical else axes.set_xlim)(*((mask.n_keys, 0)[:: 1 if vertical else -1]))
    axes.set_axis_off()


def _kind(identity: int) -> int:
    """Return the lowest bit of an identity: 0 for text, else the encoder's number."""
    return max((int(identity) & -int(identity)).bit_length() - 1, 0)


def _name(identity: int) -> str:
    kind = _kind(identity)
    return "text" if kind == 0 else f"encoder {kind}"
