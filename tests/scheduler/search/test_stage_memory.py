"""Time that memory adds to stages, compared with all choices of their layers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import LayerCost, working_bytes
from raymm.scheduler.costs.recomputation import LayerOption
from raymm.scheduler.search.stage_memory import ModuleMemory, StageBytes, StageMemory, range_maximum


@given(st.lists(st.floats(0, 100), max_size=8))
def test_the_largest_value_of_every_range(values):
    table = range_maximum(values)
    for lo, hi in itertools.product(range(len(values) + 1), repeat=2):
        assert table[lo, hi] == max(values[lo:hi], default=0)


@st.composite
def modules(draw):
    """Draw layers with options, and a room for them."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        kept = draw(st.integers(0, 12))
        options = tuple(
            LayerOption(name, float(draw(st.integers(0, 6))), draw(st.integers(0, kept)),
                        draw(st.integers(0, 20)))
            for name in draw(st.lists(st.sampled_from(["matmuls", "all"]), unique=True))
        )  # fmt: skip
        layers.append(LayerCost(1.0, 1.0, 1.0, kept, 0, 0, options=options))
    return layers, draw(st.integers(0, 120)), draw(st.integers(0, 3))


def memory_of(layers, room: int, saved: int, adaptive: bool) -> ModuleMemory:
    shape = (len(layers) + 1,) * 2
    zeros = np.zeros(shape)
    sizes = StageBytes(np.full(shape, float(room)), zeros, zeros, zeros, zeros + saved, zeros)
    recomputing = np.zeros(shape, dtype=bool)
    return ModuleMemory(layers, [True] * len(layers), sizes, recomputing, adaptive)


@given(modules(), st.integers(1, 4))
def test_added_seconds_equal_all_choices(module, live):
    layers, room, saved = module
    fixed, adaptive = (memory_of(layers, room, saved, a) for a in (False, True))
    stages = StageMemory({"m": adaptive}, {"m": live}, adaptive=True)
    for lo, hi in itertools.combinations(range(len(layers) + 1), 2):
        own = layers[lo:hi]
        whole = live * (saved + sum(c.activation_bytes for c in own)) <= room
        assert fixed.added(live)[lo, hi] == (0.0 if whole else math.inf)
        best = math.inf
        for chosen in itertools.product(*(c.choices for c in own)):
            held = live * (saved + sum(option.nbytes for option in chosen))
            temporary = max(working_bytes(c, o) for c, o in zip(own, chosen, strict=True))
            if held + temporary <= room:
                best = min(best, sum(option.seconds for option in chosen))
        best = 0.0 if whole else best
        bound = adaptive.added(live)[lo, hi]
        assert bound <= best * (1 + 1e-9)
        raised = adaptive.refine(live, lo, hi)
        exact = adaptive.added(live)[lo, hi]
        assert exact == pytest.approx(best) and raised == bool(exact > bound * (1 + 1e-9))
        choice = adaptive.choice(live, lo, hi)
        assert (choice is not None) == (not whole and best < math.inf)
        names = () if choice is None else choice.names
        assert stages.options("m", ((lo, hi),), live - 1) == [names]


def test_stages_of_equal_layers_need_as_many_seconds_as_layers():
    """Recompute every layer, as there is no room for activations."""
    option = LayerOption("all", 1.0, 0, 0)
    layers = [LayerCost(1.0, 1.0, 1.0, 10, 0, 0, options=(option,))] * 3
    memory = memory_of(layers, 5, 0, True)
    for lo, hi in itertools.combinations(range(4), 2):
        memory.refine(1, lo, hi)
        assert memory.added(1)[lo, hi] == hi - lo


def test_early_stages_hold_more_microbatches():
    """A stage holds as many as 1F1B: those of later stages and beyond, up to the step's."""
    layers = [LayerCost(1.0, 1.0, 1.0, 10, 0, 0)] * 2
    stages = StageMemory({"m": memory_of(layers, 25, 0, False)}, {"m": 8})
    added = stages.added("m", 2, 0)
    assert added.shape == (2, 3, 3)
    assert added[0, 0, 1] == added[1, 1, 2] == 0 and math.isinf(stages.added("m", 2, 1)[0, 0, 1])
