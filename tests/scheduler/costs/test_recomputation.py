"""Selection of recomputation: the knapsack equals brute force."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import InputError
from raymm.scheduler.costs.recomputation import (
    LayerOption,
    choose_options,
)

options = st.lists(
    st.builds(LayerOption, st.just("x"), st.integers(0, 12).map(float), st.integers(0, 20)),
    min_size=1, max_size=4,
).map(lambda found: [one._replace(name=str(n)) for n, one in enumerate(found)])


def brute_force(layers, limit: int) -> float | None:
    """Return the least seconds of all combinations that fit."""
    fitting = [
        sum(option.seconds for option in chosen)
        for chosen in product(*layers) if sum(option.nbytes for option in chosen) <= limit
    ]
    return min(fitting, default=None)


@given(st.lists(options, max_size=6), st.integers(0, 100))
def test_least_time_within_the_limit(layers, limit):
    due = brute_force(layers, limit)
    if due is None:
        with pytest.raises(InputError, match="even the most frugal"):
            choose_options(layers, limit)
        return
    found = choose_options(layers, limit)
    chosen = [one[int(name)] for one, name in zip(layers, found.names, strict=True)]
    assert found.seconds == sum(option.seconds for option in chosen) == due
    assert found.nbytes == sum(option.nbytes for option in chosen) <= limit


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=5))
def test_fractions_of_seconds(seconds):
    layers = [
        [LayerOption("keep", 0.0, 30), LayerOption("part", min(a, b), 11),
         LayerOption("all", max(a, b) + c, 3)]
        for a, b, c in seconds
    ]  # fmt: skip
    for limit in range(3 * len(layers), 31 * len(layers), 7):
        assert choose_options(layers, limit).seconds == pytest.approx(brute_force(layers, limit))


def test_a_deep_model():
    """Use eighty layers of two kinds, and as many limits.

    The result is within one layer of the relaxation, more memory is never slower, and with full
    memory nothing is recomputed.
    """
    kinds = [
        [LayerOption("keep", 0.0, 1000 + k), LayerOption("matmuls", 0.7 + k / 50, 610),
         LayerOption("attention", 2.0, 320 + k), LayerOption("all", 3.1 + k / 9, 64)]
        for k in range(2)
    ]  # fmt: skip
    layers = [kinds[i % 2] for i in range(80)]
    last = float("inf")
    for limit in range(80 * 64, 80 * 1001 + 1, 9000):
        found = choose_options(layers, limit)
        assert found.nbytes <= limit and found.seconds <= last
        last = found.seconds
    assert choose_options(layers, 80 * 1001).names == ("keep",) * 80
    with pytest.raises(InputError, match="limit is 5,119 bytes.* 5,120"):
        choose_options(layers, 80 * 64 - 1)
