"""Layers per stage from a module's spec."""

import pytest

from raymm.errors import PlanError
from raymm.runtime.specs import ParallelSpec, split_layers
from raymm.scheduler.graph.module_graph import ModuleNode

# Seven blocks, then the projector.
ENCODER = ModuleNode("vision", (False,) * 7 + (True,), projector=True)


@pytest.mark.parametrize(
    ("spec", "ranges"),
    [
        (ParallelSpec(), ((0, 8),)),
        (ParallelSpec(pp=3), ((0, 3), (3, 5), (5, 8))),
        (ParallelSpec(pp=7), (*((i, i + 1) for i in range(6)), (6, 8))),
        (ParallelSpec(pp=2, chunks=2), ((0, 2), (2, 4), (4, 6), (6, 8))),
        (ParallelSpec(pp=2, layers=(7, 1)), ((0, 7), (7, 8))),
    ],
)
def test_blocks_are_split_evenly_with_the_projector_last(spec, ranges):
    assert split_layers(ENCODER, spec) == ranges


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ParallelSpec(pp=8), "pp of 'vision' is 8, but it can be cut into at most 7 stages"),
        (ParallelSpec(pp=4, chunks=2), r"pp \* chunks of 'vision' is 8"),
        (ParallelSpec(pp=2, layers=(4, 3)), r"layers of 'vision' is \(4, 3\); it must add up"),
    ],
)
def test_specs_that_do_not_fit_the_module_are_refused(spec, message):
    with pytest.raises(PlanError, match=message):
        split_layers(ENCODER, spec)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cp": 0}, "cp is 0; it must be a whole number, at least 1"),
        ({"tp": True}, "tp is True; it must be a whole number"),
        ({"dp": 2.0}, r"dp is 2\.0"),
        ({"pp": 0}, "pp is 0; a module needs at least one stage"),
        ({"pp": 2, "layers": (8, 0)}, "layers is 0; it must be a whole number, at least 1"),
        ({"sharding": "zero2"}, "sharding is 'zero2'; accepted: none, zero1"),
        ({"pp": 2, "dp": 2, "ranks": (0, 1)}, r"one entry per rank \(pp=2, dp=2\)"),
    ],
)
def test_invalid_degrees_are_refused(values, message):
    with pytest.raises(PlanError, match=message):
        ParallelSpec(**values)
