"""Batches after recoveries are those of an undisturbed run."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from raymm.training.run_batches import KEPT_BATCHES, Batch, ReplayedBatches

STEPS = 60


def source(keep=True, loads=None):
    def load(position, step):
        if loads is not None:
            loads.append(step)
        assert (position or 0) == step  # position in these data
        return iter([Batch([], [], n + 1, [], None) for n in range(step, STEPS)])

    return ReplayedBatches(load, 0, None, keep)


@given(st.lists(st.tuples(
    st.sampled_from(["take", "back", "forget", "lost", "node"]), st.integers(0, KEPT_BATCHES + 8)
), max_size=30))
def test_any_order_of_failures_gives_the_same_batches(events) -> None:
    """Use snapshots that are not newer than the last step, nor older than the previous snapshot."""
    batches, taken, snapshot = source(), 0, 0
    for what, count in events:
        if what == "take":
            numbers = [batch.state_after - 1 for batch in islice(batches, count)]
            assert numbers == list(range(taken, min(taken + count, STEPS)))
            taken += len(numbers)
        elif what == "forget":
            snapshot = max(snapshot, taken - count)
            batches.forget(snapshot)
        elif what == "lost":
            batches.load_anew()
        else:
            batches.rewind(snapshot, snapshot, anew=what == "node")
            taken = snapshot
    assert [batch.state_after - 1 for batch in batches] == list(range(taken, STEPS))


def test_cached_batches_are_not_loaded_again() -> None:
    loads = []
    batches = source(loads=loads)
    assert len(list(islice(batches, 5))) == 5
    batches.forget(2)
    batches.rewind(2, 2)
    assert [batch.state_after for batch in islice(batches, 5)] == [3, 4, 5, 6, 7] and loads == [0]
    list(islice(batches, KEPT_BATCHES))
    batches.rewind(3, 3)  # too long ago
    assert next(iter(batches)).state_after == 4 and loads == [0, 3]
