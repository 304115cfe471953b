"""Processes that a rank meets."""

from raymm.actors.rank.connection_plan import ConnectionPlan, RendezvousRound
from raymm.actors.rank.rank_spec import RankSpec
from raymm.scheduler.plan.stage import StageId


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
