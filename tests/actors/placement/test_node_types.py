"""Room of a cluster's node types."""

import pytest

from raymm.actors.placement.node_types import NodeType, spell, without_room

SMALL, LARGE = NodeType("small", {"CPU": 2.0}, 3), NodeType("large", {"CPU": 8.0, "GPU": 0.3}, 1)


@pytest.mark.parametrize(("bundle", "due"), [
    ({"CPU": 1.0}, 8), ({"CPU": 3.0}, 2), ({"GPU": 0.1}, 3), ({"CPU": 1, "GPU": 0}, 8),
    ({"TPU": 1}, 0),
])  # fmt: skip
def test_bundles_of_a_node(bundle, due):
    assert LARGE.holds(bundle) == due


@pytest.mark.parametrize(("bundles", "message"), [
    ([{"CPU": 2}] * 7, None),
    ([{"CPU": 2}] * 8, "8 x 2 CPU do not fit: there is room for 7"),
    ([{"CPU": 9}], r"no node type has room for 9 CPU; node types: small \(2 CPU\)"),
])
def test_bundles_that_cannot_fit_are_named(bundles, message):
    reason = without_room(bundles, (SMALL, LARGE))
    if message is None:
        assert reason is None
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(reason)


def test_texts_leave_out_what_users_did_not_ask_for():
    assert spell({"GPU": 1.0, "CPU": 0.5, "memory": 9, "node:10.0.0.1": 1}) == "0.5 CPU, 1 GPU"
    assert spell({"object_store_memory": 9}) == "nothing"
