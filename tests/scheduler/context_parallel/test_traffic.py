"""Bytes of every method equal the closed forms, and the selected method has the fewest."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.context_parallel.traffic import (
    METHODS,
    AttentionShape,
    choose_method,
    method_bytes,
)

SHAPES = st.integers(1, 6).flatmap(
    lambda n: st.builds(
        lambda queries, keys, key_heads, groups, dim, e, a, sequences: AttentionShape(
            tuple(queries), tuple(keys), key_heads * groups, key_heads, dim, e, a, sequences
        ),
        st.lists(st.integers(0, 300), min_size=n, max_size=n),
        st.lists(st.integers(0, 300), min_size=n, max_size=n),
        st.integers(1, 12),
        st.integers(1, 4),
        st.integers(1, 128),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([2, 4, 8]),
        st.integers(1, 3),
    )
)


@st.composite
def shapes_and_needs(draw):
    shape = draw(SHAPES)
    n = shape.ranks
    needed = [[draw(st.integers(0, shape.key_tokens[s])) for s in range(n)] for _ in range(n)]
    return shape, draw(st.sampled_from([None, needed]))


def usable(shape: AttentionShape, needed) -> list[str]:
    heads = shape.query_heads % shape.ranks == 0 and shape.key_heads % shape.ranks == 0
    return [
        method for method in METHODS
        if (method != "ulysses" or heads) and (method != "needed" or needed is not None)
    ]


@given(shapes_and_needs())
def test_the_mean_over_ranks_equals_the_closed_form(case):
    shape, needed = case
    n, e, a = shape.ranks, shape.activation_bytes, shape.accumulator_bytes
    hq, hk, d = shape.query_heads, shape.key_heads, shape.head_dim
    queries, keys = sum(shape.query_tokens), sum(shape.key_tokens)
    others = Fraction(n - 1, n)
    ulysses = others / n * d * e * (2 * queries * hq + 2 * keys * hk)
    moved = others * keys * hk * d
    due = {
        "gather": (moved * 2 * e, moved * (2 * e + 2 * a)),
        "ring": (moved * 2 * e, moved * (2 * e + 2 * a)),
        "ulysses": (ulysses, ulysses),
        "rotate": (
            others * queries * hq * (d * (e + a) + 4),
            others * queries * hq * (d * (2 * e + a) + 8),
        ),
    }
    if needed is not None:
        foreign = sum(needed[r][s] for r in range(n) for s in range(n) if r != s)
        moved = Fraction(foreign, n) * hk * d
        due["needed"] = moved * 2 * e, moved * (2 * e + 2 * a)
    for method in usable(shape, needed):
        found = method_bytes(shape, method, needed)
        sums = sum(found.forward), sum(found.backward)
        assert sums == tuple(n * shape.sequences * mean for mean in due[method]), method
        assert found.total == sum(sums) and found.largest == max(found.per_rank)


@given(shapes_and_needs(), st.booleans())
def test_the_choice_is_the_smallest_by_brute_force(case, backward):
    shape, needed = case
    choice = choose_method(shape, needed, backward=backward)
    cost = {}
    for method in usable(shape, needed):
        found = method_bytes(shape, method, needed)
        sent = found.per_rank if backward else found.forward
        cost[method] = max(sent), sum(sent)
    assert cost[choice.method] == min(cost.values())
    earlier = METHODS[: METHODS.index(choice.method)]
    assert all(cost[method] > cost[choice.method] for method in earlier if method in cost)
    assert [row.method for row in choice.table if not row.refused] == list(cost)
    assert choice.chosen.largest == cost[choice.method][0]


def even(ranks: int, queries: int, keys: int, heads=(8, 4)) -> AttentionShape:
    return AttentionShape.even(
        ranks, queries, keys, query_heads=heads[0], key_heads=heads[1], head_dim=64
    )


def test_the_smaller_side_moves_and_heads_decide_about_ulysses():
    few_rows, few_keys = even(4, 512, 32768, (6, 3)), even(4, 32768, 512, (6, 3))
    assert choose_method(few_rows).method == "rotate"
    assert choose_method(few_keys).method == "gather"
    assert choose_method(few_keys, methods=["ring", "rotate"]).method == "ring"
    ring, rotate = (method_bytes(few_rows, method).largest for method in ("ring", "rotate"))
    assert 30 < ring / rotate < 40
    # 4 key heads on 4 ranks, but not on 8.
    assert choose_method(even(4, 4096, 4096)).method == "ulysses"
    assert choose_method(even(8, 4096, 4096)).method == "gather"


def test_hidden_keys_do_not_count():
    """Use 8 ranks that each see half of one neighbour's keys: 1/14 of all foreign keys."""
    shape = even(8, 8192, 8192)
    needed = [[512 if s == (r + 1) % 8 else 0 for s in range(8)] for r in range(8)]
    choice = choose_method(shape, needed)
    assert choice.method == "needed"
    assert choice.chosen.total * 14 == method_bytes(shape, "gather").total
    everything = [list(shape.key_tokens)] * 8
    # Without hidden keys both are equal, and the one without a plan is selected.
    assert choose_method(shape, everything).method == "gather"


def test_a_plan_can_show_why():
    choice = choose_method(even(3, 512, 8192))
    lines = choice.describe().splitlines()
    assert choice.method == "rotate" and sum(line.startswith("*") for line in lines) == 1
    assert any("multiples of 3 ranks" in line for line in lines)
    assert any("needs needed_keys" in line for line in lines)
    assert f"{choice.chosen.largest:,}" in next(line for line in lines if line.startswith("*"))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: AttentionShape((), (), 1, 1, 8), "query_tokens must be"),
        (lambda: AttentionShape((4, -1), (4, 4), 1, 1, 8), r"query_tokens .* got \(4, -1\)"),
        (lambda: AttentionShape((4,), (4, 4), 1, 1, 8), "got 1 and 2"),
        (lambda: AttentionShape((4,), (4,), 3, 2, 8), "multiple of key_heads = 2, got 3"),
        (lambda: AttentionShape((4,), (4,), 2, 2, 0), "head_dim must be at least 1, got 0"),
        (lambda: even(0, 4, 4), "ranks must be at least 1, got 0"),
        (lambda: method_bytes(even(2, 4, 4), "tree"), "one of gather, .* got 'tree'"),
        (lambda: method_bytes(even(8, 8, 8), "ulysses"), "key_heads = 4 must be multiples of 8"),
        (lambda: method_bytes(even(2, 4, 4), "needed"), "needs needed_keys"),
        (lambda: method_bytes(even(2, 4, 4), "needed", [[0]]), r"must be \(2, 2\)"),
        (
            lambda: method_bytes(even(2, 4, 4), "needed", [[0, 3], [0, 0]]),
            r"needed_keys\[0\]\[1\] must be 0 to 2",
        ),
        (lambda: choose_method(even(2, 4, 4), methods=["tree"]), r"got \['tree'\]"),
        (lambda: choose_method(even(2, 4, 4), methods=[]), r"got \[\]"),
        (lambda: choose_method(even(8, 8, 8), methods=["ulysses"]), "none can be used: ulysses"),
    ],
)
def test_errors_name_field_value_and_accepted_values(call, says):
    with pytest.raises(PlanError, match=says):
        call()
