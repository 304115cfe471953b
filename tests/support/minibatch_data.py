"""Sample sizes for tests of mini-batches: real ones, and random ones."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
from hypothesis import strategies as st

from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes
from tests.support import SUPPORT

NAMES = ("vision", "text")


@cache
def real(name: str) -> SampleSizes:
    """Return tiles and tokens of ``ai2d``, ``chartqa`` or, as two data sets, ``both``."""
    if name == "both":
        parts = [real("ai2d"), real("chartqa")]
        return SampleSizes(
            NAMES,
            np.concatenate([part.values for part in parts]),
            np.repeat([0, 1], [len(part) for part in parts]),
        )
    table = np.array(json.loads((SUPPORT / "minibatch_sizes.json").read_text())[name])
    return SampleSizes(NAMES, np.repeat(table[:, :2], table[:, 2], axis=0))


@st.composite
def sizes(draw: st.DrawFn, least: int = 1, most: int = 80) -> SampleSizes:
    """Draw one to three modalities and data sets, including zeros and long tails."""
    modalities = draw(st.integers(1, 3))
    unit = st.one_of(st.integers(0, 5), st.integers(0, 300))
    rows = draw(st.lists(
        st.tuples(*[unit] * modalities), min_size=least, max_size=most,
    ))
    sources = draw(st.lists(
        st.integers(0, draw(st.integers(0, 2))), min_size=len(rows), max_size=len(rows),
    ))
    return SampleSizes(
        tuple("abc"[:modalities]), np.array(rows, np.int64).reshape(-1, modalities),
        np.array(sources, np.int64),
    )


def groups_of(plan: MiniBatchPlan) -> list[list[list[int]]]:
    """Return the samples per step and rank, as plain lists."""
    return [
        [plan.group(step, rank).tolist() for rank in range(plan.ranks)]
        for step in range(plan.steps)
    ]
