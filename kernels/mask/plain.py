"""Masks that attention kernels of libraries compute without a mask tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from raymm.kernels.mask.columns import BASES, SLOPES, START
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import documents

_CACHED_FORMS = 256


class PlainForm(NamedTuple):
    """Form of a self-attention mask over documents that follow one another.

    Attributes:
        lengths: tokens of each document.
        causal: True if a token sees only itself and earlier tokens.
        window: most tokens that a token sees, itself included; None for no window.
    """

    lengths: tuple[int, ...]
    causal: bool
    window: int | None

    @property
    def name(self) -> str:
        """``"full"`` or ``"causal"``, with ``"_documents"`` and ``"_window"``."""
        name = "causal" if self.causal else "full"
        name += "_documents" if len(self.lengths) > 1 else ""
        return name + ("_window" if self.window is not None else "")


@lru_cache(_CACHED_FORMS)
def plain_form(mask: AttentionMask) -> PlainForm | None:
    """Return the form of a mask; None if it has no such form."""
    table, length = mask.query_table, mask.n_queries
    if not length or length != mask.n_keys or mask.needs_bits:
        return None
    starts, lo, slopes = table[:, START], table[:, BASES][:, 0], table[:, SLOPES]
    firsts = starts[(slopes[:, 0] == 0) & (lo == starts)]
    if not len(firsts) or firsts[0] != 0:
        return None
    causal, moving = bool(slopes[:, 1].all()), lo[slopes[:, 0] == 1]
    window = int(1 - moving[0]) if len(moving) else None
    if window is not None and (window < 1 or not causal):
        return None
    lengths = tuple(np.diff(np.append(firsts, length)).tolist())
    expected = documents(lengths, causal=causal)
    if window is not None:
        expected = expected.windowed(window)
    if not np.array_equal(expected.bounds(), mask.bounds()):
        return None
    return PlainForm(lengths, causal, window)


def batch_form(masks: tuple[AttentionMask, ...]) -> tuple[PlainForm, ...]:
    """Return the form of each mask of a batch; empty if a mask has none, or if they differ in more
    than the lengths of documents."""
    forms = [plain_form(mask) for mask in masks]
    plain = tuple(form for form in forms if form is not None)
    kinds = {(form.causal, form.window) for form in plain}
    return plain if len(plain) == len(forms) and len(kinds) == 1 else ()
