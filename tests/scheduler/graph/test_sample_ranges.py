"""Ranges of samples equal a loop over the samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.graph.sample_ranges import Range, overlap, rows_of, share, union

RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda t: Range(*t)))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_sample_ranges_are_even_and_in_order(lo, size, count):
    parts = (share(size, index, count) for index in range(count))
    shares = [Range(lo + part.lo, lo + part.hi) for part in parts]
    assert [s for share in shares for s in range(*share)] == list(range(lo, lo + size))
    sizes = [share.size for share in shares]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_shares_of_counts_that_divide_each_other_nest(size, count, times):
    finer = [share(size, i, count * times) for i in range(count * times)]
    for i in range(count):
        own = [s for part in finer[i * times : (i + 1) * times] for s in range(*part)]
        assert own == list(range(*share(size, i, count)))


@given(RANGES)
def test_unions_have_the_same_samples(ranges):
    found = union(ranges)
    assert [s for r in found for s in range(*r)] == sorted({s for r in ranges for s in range(*r)})
    assert all(a.hi < b.lo for a, b in zip(found, found[1:], strict=False))


@given(RANGES, RANGES)
def test_overlaps_have_the_samples_of_both(ranges, others):
    found = overlap(ranges, others)
    both = {s for r in ranges for s in range(*r)} & {s for r in others for s in range(*r)}
    assert [s for r in found for s in range(*r)] == sorted(both)
    assert found == union(found)


def test_rows_of_samples_with_any_number_of_items():
    offsets = (0, 2, 2, 3)  # two items, none, one
    assert rows_of(Range(0, 2), offsets) == (0, 2) and rows_of(Range(1, 3), offsets) == (2, 3)
    assert not rows_of(Range(1, 2), offsets)
    assert rows_of(Range(1, 2), None) == (1, 2)
