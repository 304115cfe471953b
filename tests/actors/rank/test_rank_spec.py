"""Processes that a rank meets."""


from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.rank.rank_spec import (
    LINK_CTAS,
    MESSAGE_CTAS,
    ConnectionPlan,
    RankSpec,
    RendezvousRound,
    connection_plans,
    link_ctas,
)
from raymm.scheduler.plan.stage import StageId

processes = st.integers(2, 6)


@given(st.data(), processes)
def test_all_members_number_a_group_alike(data, count) -> None:
    members = st.lists(st.integers(0, count - 1), min_size=2, max_size=count, unique=True)
    groups = data.draw(st.lists(members.map(sorted).map(tuple), max_size=6, unique=True))
    plans = connection_plans(count, [], groups)
    met: dict[int, set[tuple[int, ...]]] = {}
    for process, plan in enumerate(plans):
        numbers = [meeting.number for meeting in plan.rounds]
        assert numbers == sorted(numbers)  # every process creates its groups in the common order
        assert {meeting.members for meeting in plan.rounds} == {g for g in groups if process in g}
        for meeting in plan.rounds:
            met.setdefault(meeting.number, set()).add(meeting.members)
    assert len(met) == len(groups) and all(len(found) == 1 for found in met.values())


@given(st.data(), processes)
def test_messages_leave_multiprocessors_to_computation(data, count) -> None:
    pairs = data.draw(st.lists(
        st.permutations(range(count)).map(lambda order: tuple(order[:2])), unique=True
    ))  # fmt: skip
    ctas = link_ctas(pairs)
    busiest = max((sum(n in pair for pair in pairs) for n in range(count)), default=0)
    assert 1 <= ctas <= LINK_CTAS
    assert ctas == 1 or ctas * busiest <= MESSAGE_CTAS
    assert ctas == LINK_CTAS or (ctas + 1) * busiest > MESSAGE_CTAS


def spec(rounds):
    builders = {StageId("vision", 0): list, StageId("llm", 0): list, StageId("llm", 1): list}
    return RankSpec(1, 5, builders, (), ConnectionPlan(rounds))


def test_a_process_calls_the_members_of_its_groups():
    groups = spec((RendezvousRound(1, (0, 1)), RendezvousRound(4, (1, 3), is_link=True)))
    assert groups.members == {0: range(5), 1: (0, 1), 4: (1, 3)}
    assert groups.peers <= set(range(5)) - {1} and {0, 3} <= groups.peers


def test_a_spec_without_stages_is_sent_to_spares():
    full = spec(())
    assert full.modules == {"vision", "llm"}
    assert full.unbuilt().builders == {} and full.unbuilt().world_size == 5
