"""Steps whose tasks take no time or the same time, in Python."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.compiled import machine_code
from tests.support.random_plans import contents, profiled_plans

TIED_COSTS = st.sampled_from([LayerCost(s, s, s, 4, 1, 1) for s in (0, 1)])


@pytest.fixture(scope="module")
def in_python() -> Iterator[None]:
    """Keep the loops from being compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code, "PATIENCE_S", math.inf)
        yield


@st.composite
def tied_steps(draw: st.DrawFn) -> tuple[Plan, list[set[str]]]:
    """Draw a plan whose layers take 0 or 1 s, and the modules with input of each microbatch."""
    plan = draw(profiled_plans(TIED_COSTS))
    return plan, draw(contents(plan))
