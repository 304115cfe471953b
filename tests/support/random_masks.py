"""Random masks: any segment table."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from benchmarks.gpu.every_mask import table
from raymm.kernels.mask.mask import AttentionMask


@st.composite
def tables(
    draw: st.DrawFn, most_queries: int = 96, most_keys: int = 96, square: bool = False
) -> AttentionMask:
    """Draw any segment table.

    Bounds may cross, leave [0, Tk] or be empty, intervals may overlap, bits may hide everything,
    and there may be as many rows as keys, others, or none.
    """
    n_queries = draw(st.integers(0, most_queries))
    n_keys = n_queries if square else draw(st.integers(0, most_keys))
    return table(
        draw(st.integers(0, 2**32 - 1)),
        n_queries,
        n_keys,
        draw(st.integers(1, 8)),
        draw(st.integers(1, 6)),
    )


def same_tables(first: AttentionMask, second: AttentionMask) -> bool:
    """Return True if both have the same sizes and tables."""
    return (
        first.shape == second.shape
        and np.array_equal(first.query_table, second.query_table)
        and np.array_equal(first.key_table, second.key_table)
    )
