"""Every element is sent once, and every process gets all its elements."""

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.plan.resharding import Resharding

degrees = st.integers(1, 12)


@given(degrees, degrees, st.integers(0, 300))
def test_every_element_is_sent_once(senders, receivers, length):
    plan = Resharding(senders, receivers)
    parts = list(plan.parts(length))
    travelled = sorted(i for part in parts for i in range(part.start, part.stop))
    assert travelled == list(range(length))
    assert {(part.sender, part.receiver) for part in parts} <= set(plan.links())
    for part in parts:
        low, high = plan.sent(part.sender, length)
        assert low <= part.start < part.stop <= high
        low, high = plan.received(part.receiver, length)
        assert low <= part.start < part.stop <= high


@given(degrees, degrees, st.integers(0, 300))
def test_shares_are_consecutive_and_equal(senders, receivers, length):
    plan = Resharding(senders, receivers)
    share = plan.units // receivers * plan.unit(length)
    assert share * receivers >= length
    end = 0
    for receiver in range(receivers):
        start, stop = plan.received(receiver, length)
        assert start == end and start == min(share * receiver, length)
        end = stop
    assert end == length


@given(degrees, degrees)
def test_links(senders, receivers):
    """Use few links in one order; every process has one, and a receiver's include a metadata
    sender.
    """
    plan = Resharding(senders, receivers)
    links = list(plan.links())
    assert links == sorted(set(links)) and len(links) < senders + receivers
    assert {s for s, _ in links} == set(range(senders))
    assert {r for _, r in links} == set(range(receivers))
    for receiver in range(receivers):
        assert plan.metadata_sender(receiver) == min(s for s, r in links if r == receiver)


@given(degrees, degrees, st.integers(2, 4), st.integers(0, 300))
def test_a_subgroups_shares_are_contiguous(tokens, tensors, receivers, length):
    """Check processes that sum a gradient over tokens and send a share of the sum each."""
    plan = Resharding(tokens * tensors, receivers)
    chunk = plan.units // tokens * plan.unit(length)
    for sender in range(tokens * tensors):
        start, stop = plan.sent(sender, length)
        first = sender // tensors * chunk
        assert start == stop or first <= start < stop <= first + chunk
