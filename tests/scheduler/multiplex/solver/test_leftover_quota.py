"""Spare quota is given to the modules of a stage if no module gets slower."""

from __future__ import annotations

import pytest

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.mapping import Mapping, Placement, predicted_stage
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.leftover_quota import with_leftover_quota


def surface(name: str, *seconds: float, bandwidth: float = 0.0) -> ScalingSurface:
    """Return a surface in quarters on one GPU or two, where it is twice as fast."""
    return ScalingSurface(
        name, (1, 2), (1, 2, 3, 4), 4, (seconds, tuple(s / 2 for s in seconds)), (1, 1),
        tuple(bandwidth * q for q in (1, 2, 3, 4)),
    )


SATURATED, FALLING, RISING = (4.0, 2.0, 2.0, 2.0), (4.0, 2.0, 1.5, 1.0), (4.0, 2.0, 2.5, 3.0)


def quotas(*placements: Placement, interference=0.0, **modules: ScalingSurface) -> list[int]:
    problem = MappingProblem(
        tuple(modules.values()), (), 2, 4, None, Interference(additive=interference)
    )
    stage = predicted_stage(problem, placements)
    mapping = Mapping(2, 4, (stage,), stage.seconds)
    found = with_leftover_quota(problem, mapping)
    found.check(problem)
    assert found.seconds <= mapping.seconds and found.bound <= found.seconds
    assert [p.gpus for p in found.stages[0].placements] == [p.gpus for p in placements]
    return [p.quota for p in found.stages[0].placements]


@pytest.mark.parametrize(("seconds", "quota"), [
    (SATURATED, 4), (FALLING, 4), (RISING, 2), ((4.0, 2.0, 2.0, 3.0), 3),
])  # fmt: skip
def test_a_module_alone_gets_the_whole_gpu_unless_that_is_slower(seconds, quota) -> None:
    assert quotas(Placement("a", (0, 1), 2), a=surface("a", *seconds)) == [quota]


def test_modules_side_by_side() -> None:
    a, b = surface("a", *SATURATED), surface("b", 1.0, 1.0, 1.0, 1.0)
    together = Placement("a", (0, 1), 2), Placement("b", (1,), 1)
    # The slower one first; it cannot use quota on GPU 0 alone: one quota on both.
    assert quotas(*together, a=a, b=b) == [3, 1]
    # On separate GPUs both get all.
    assert quotas(Placement("a", (0,), 2), Placement("b", (1,), 1), a=a, b=b) == [4, 4]
    # More bandwidth in use would delay the slower one: nothing is given.
    busy = surface("b", 1.0, 1.0, 1.0, 1.0, bandwidth=0.25)
    slow = surface("a", 4.0, 2.0, 9.0, 9.0)
    apart = Placement("a", (0,), 2), Placement("b", (0,), 1)
    assert quotas(*apart, a=slow, b=busy, interference=0.5) == [2, 1]
    assert quotas(*apart, a=slow, b=busy) == [2, 2]
