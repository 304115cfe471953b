"""The house is in order: rooms import only what the table allows, without cycles."""

from hypothesis import given
from hypothesis import strategies as st

from tests import house


def test_the_house_is_in_order() -> None:
    assert house.problems() == []


def test_the_import_table_is_acyclic() -> None:
    rooms = list(house.TABLE)
    upward = [
        f"{room} -> {other}" for room in rooms for other in house.may_import(room)
        if rooms.index(other) > rooms.index(room)
    ]
    assert not upward


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_cycles_are_found(pairs: list[tuple[int, int]]) -> None:
    """Compare with all walks: two nodes are in a cycle if each reaches the other."""
    edges = [(str(a), str(b)) for a, b in pairs]
    after = {node: {b for a, b in edges if a == node} for edge in edges for node in edge}
    for _ in after:
        for node in after:
            after[node] = after[node].union(*(after[other] for other in after[node]))
    expected = {
        (a, b) for a in after for b in after if a != b and b in after[a] and a in after[b]
    }
    found = house.circles(edges)
    assert {(a, b) for circle in found for a in circle for b in circle if a != b} == expected
