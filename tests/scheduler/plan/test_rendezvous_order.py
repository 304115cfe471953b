"""Groups are created by their members only, in order: number of rounds."""

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.plan.rendezvous_order import longest_chain, rendezvous_order

PROCESSES = 8
members = st.sets(st.integers(0, PROCESSES - 1), min_size=2).map(tuple)
all_groups = st.lists(members, max_size=24)


def rounds_until_all_are_made(groups: list[tuple[int, ...]]) -> int:
    """Simulate the rounds.

    In every round, processes wait in the first of their groups that is not created, and groups in
    which all members wait are created.
    """
    left = {p: [n for n, g in enumerate(groups) if p in g] for p in range(PROCESSES)}
    rounds = 0
    while any(left.values()):
        standing = {p: numbers[0] for p, numbers in left.items() if numbers}
        made = {n for n in standing.values() if all(standing[p] == n for p in groups[n])}
        assert made, "nobody can go on"
        left = {p: [n for n in numbers if n not in made] for p, numbers in left.items()}
        rounds += 1
    return rounds


@given(all_groups)
def test_any_order_ends_after_its_longest_chain(groups) -> None:
    assert rounds_until_all_are_made(groups) == longest_chain(groups)


@given(all_groups)
def test_no_round_is_left_empty(groups) -> None:
    order = rendezvous_order(groups)
    assert sorted(order) == list(range(len(groups)))
    chain = longest_chain([groups[place] for place in order])
    assert chain >= max((sum(p in g for g in groups) for p in range(PROCESSES)), default=0)
    # A group waits only for its members' other groups.
    others = [sum(not set(g).isdisjoint(h) for h in groups) for g in groups]
    assert chain <= max(others, default=0)


@given(st.lists(st.sets(st.integers(0, PROCESSES - 1), min_size=2, max_size=2).map(tuple)))
def test_pairs_take_fewer_than_twice_the_rounds(pairs) -> None:
    most = max((sum(p in pair for pair in pairs) for p in range(PROCESSES)), default=0)
    assert longest_chain([pairs[n] for n in rendezvous_order(pairs)]) <= max(0, 2 * most - 1)


def test_a_pipeline_connects_two_ranks_at_a_time_everywhere() -> None:
    chain = [(n, n + 1) for n in range(1000)]
    # in the order of its edges, each waits for the previous one
    assert longest_chain(chain) == 1000
    assert longest_chain([chain[n] for n in rendezvous_order(chain)]) == 2
