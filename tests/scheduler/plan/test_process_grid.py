"""Ranks of several processes: their members, and pairs with messages."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.rank_p2p_groups import p2p_groups_between_ranks
from raymm.errors import PlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.plan.stage import StageId
from tests.support.random_plans import alignment, steps

# (cp, tp, fsdp); sharded parameters are not split further.
degrees = st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(1)) | st.tuples(
    st.integers(1, 3), st.just(1), st.integers(2, 3)
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan whose modules have separate degrees, equal for modules on the same rank."""
    plan, _ = draw(steps())
    together: list[set[str]] = []
    for rank in range(plan.num_ranks):
        modules = {stage.module for stage in plan.rank_stages(rank)}
        apart = [one for one in together if not one & modules]
        together = [*apart, modules.union(*(one for one in together if one & modules))]
    chosen = {m: draw(degrees) for one in together for m in [min(one)]}
    of_module = {m: chosen[min(one)] for one in together for m in one}
    fully = {m: chosen[2] > 1 for m, chosen in of_module.items()}
    stages = tuple(
        replace(
            s, cp=of_module[s.module][0], tp=of_module[s.module][1], fsdp=of_module[s.module][2],
            sharding="fsdp" if fully[s.module] else "none",
        )
        for s in plan.stages
    )
    return replace(plan, stages=stages, schedule="1f1b" if any(fully.values()) else plan.schedule)


@given(plans())
def test_processes_and_their_groups(plan: Plan) -> None:
    processes = Processes(plan)
    assert len(processes.all) == plan.num_processes
    assert [p.rank for p in processes.all] == sorted(p.rank for p in processes.all)
    for number, process in enumerate(processes.all):
        of_rank = processes.of_rank(process.rank)
        tokens, tensors = processes.token_group(process), processes.tensor_group(process)
        samples, data = processes.sample_group(process), processes.data_group(process)
        assert number in of_rank
        for one, other in combinations((tokens, tensors, samples), 2):
            assert set(one) & set(other) == {number}
        assert (len(tokens), len(tensors), len(samples)) == plan.degrees(process.rank)
        assert len(of_rank) == len(tokens) * len(tensors) * len(samples)
        assert {processes.all[n].tp for n in tokens} == {process.tp}
        assert {processes.all[n].fsdp for n in tokens} == {process.fsdp}
        assert {processes.all[n].cp for n in tensors} == {process.cp}
        assert {processes.all[n].fsdp for n in tensors} == {process.fsdp}
        assert {processes.all[n][2:] for n in samples} == {(process.cp, process.tp)}
        assert set(data) == {n for n in of_rank if processes.all[n].tp == process.tp}
        assert data[processes.data_place(process)] == number
        for group in (tuple(of_rank), data, samples, tokens, tensors):
            assert len(group) == 1 or group in processes.groups
    assert Plan.from_json(plan.to_json()) == plan


@given(plans())
def test_p2p_groups_join_processes_of_both_ends_once(plan: Plan) -> None:
    processes = Processes(plan)
    for edge in processes.remote_edges:
        sender, receiver = (plan.by_id[stage] for stage in edge)
        p2p_groups = processes.p2p_groups(edge)
        shares = sender.fsdp * sender.cp
        assert len(p2p_groups) == (shares if sender.module == receiver.module else 1)
        senders = [n for p2p_group in p2p_groups for n in p2p_group.senders]
        receivers = [n for p2p_group in p2p_groups for n in p2p_group.receivers]
        assert senders == list(processes.of_rank(sender.rank))
        assert receivers == list(processes.of_rank(receiver.rank))
        if sender.module == receiver.module:
            for number, p2p_group in enumerate(
                p2p_groups
            ):  # samples and tokens stay where they are
                ends = [processes.all[n] for n in (*p2p_group.senders, *p2p_group.receivers)]
                assert {processes.data_place(end) for end in ends} == {number}


@given(steps())
def test_ranks_of_one_process_have_one_group_per_edge(step) -> None:
    plan, _ = step
    processes = Processes(plan)
    ranks = {stage.id: stage.rank for stage in plan.stages}
    spelled_out = [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]
    assert tuple(spelled_out) == p2p_groups_between_ranks(plan.stage_edges, ranks)


def test_degrees_that_do_not_fit_are_refused() -> None:
    plan = alignment(microbatches=1)
    for degree in ("cp", "tp"):
        some = tuple(
            replace(s, **{degree: 2}) if s.id == StageId("llm", 0) else s for s in plan.stages
        )
        with pytest.raises(PlanError, match=f"{degree} of .* all stages of llm must have the same"):
            replace(plan, stages=some)
        with pytest.raises(PlanError, match=f"{degree} of stage"):
            replace(plan, stages=tuple(replace(s, **{degree: 0}) for s in plan.stages))
    with pytest.raises(PlanError, match="sharding of stage .* accepted: none, zero1, fsdp"):
        replace(plan, stages=tuple(replace(s, sharding="zero9") for s in plan.stages))


def test_combinations_with_fully_sharded_parameters() -> None:
    plan = alignment(microbatches=1)

    def of_llm(plan=plan, **fields) -> Plan:
        stages = [replace(s, **fields) if s.module == "llm" else s for s in plan.stages]
        return replace(plan, stages=tuple(stages))

    assert [stage.shards for stage in of_llm(cp=2, sharding="fsdp", fsdp=3).module_stages("llm")][
        :1
    ] == [6]
    assert {stage.shards for stage in of_llm(cp=2, sharding="zero1").module_stages("llm")} == {1}
    with pytest.raises(PlanError, match="fsdp of stage llm.0 is 2 .* needs sharding 'fsdp'"):
        of_llm(fsdp=2)
    with pytest.raises(PlanError, match="sharding of stage llm.0 is 'fsdp' and its tp 2"):
        of_llm(tp=2, sharding="fsdp")
    assert of_llm(cp=2, sharding="fsdp", fsdp=3, ep=6).module_stages("llm")[0].ep == 6
    with pytest.raises(PlanError, match="ep of stage llm.0 is 3 .* accepted: 1, 6;"):
        of_llm(cp=2, sharding="fsdp", fsdp=3, ep=3)
    with pytest.raises(PlanError, match="ep of stage llm.0 is 2 .* accepted: 1;"):
        of_llm(ep=2)
    zero_bubble = replace(plan, schedule="zero_bubble")
    of_llm(zero_bubble, sharding="fsdp")  # for one process
    with pytest.raises(PlanError, match="schedule is 'zero_bubble'.* sharding of 'llm' is 'fsdp'"):
        of_llm(zero_bubble, sharding="fsdp", fsdp=2)
    stages = [replace(s, sharding="fsdp") if s.id == StageId("llm", 0) else s for s in plan.stages]
    with pytest.raises(PlanError, match="all stages of llm must have the same"):
        replace(plan, stages=tuple(stages))
