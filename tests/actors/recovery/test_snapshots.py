"""Assignment of snapshot shards to their keepers."""

from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.recovery.snapshots import keepers


@given(st.dictionaries(st.integers(0, 20), st.sampled_from("abc"), max_size=12))
def test_every_shard_is_on_two_nodes_if_possible(nodes):
    kept = keepers(nodes)
    alone = len(set(nodes.values())) < 2
    assert set(kept) == (set() if alone else set(nodes))
    assert all(nodes[rank] != nodes[keeper] for rank, keeper in kept.items())


def test_the_keeper_is_on_the_next_node():
    assert keepers({0: "a", 1: "a", 2: "b", 3: "b"}) == {0: 2, 1: 2, 2: 0, 3: 0}
