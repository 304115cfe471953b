"""Mappings as plans: their programs move the same samples as a loop over the samples.

Errors in programs are detected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.program.program import FORWARDS, Op, Program
from raymm.scheduler.program.stage_samples import Samples
from raymm.scheduler.schedule.lower import lower
from tests.support.random_mappings import Node, Use, cases, clip, graph_of, mapping_of


def program_of(plan: Plan, sizes: list[int], forward_only: bool = False) -> Program:
    """Return the proven program of a step in which every microbatch has all modalities."""
    present = [[node.name for node in plan.graph.nodes]] * len(sizes)
    samples = [Samples(size) for size in sizes]
    program = lower(plan, present, forward_only=forward_only, samples=samples)
    check_program(program)
    check_samples(plan, program, samples)
    return program


def moves(plan: Plan, program: Program, direction: Direction) -> Counter:
    """Return (microbatch, module, from rank, to rank, sample) of all messages."""
    moved = Counter()
    for rank, instructions in enumerate(program):
        for i in instructions:
            if i.op is Op.SEND and i.direction is direction:
                made = i.stage if direction is Direction.FORWARD else i.peer
                for samples in i.samples:
                    for sample in range(*samples):
                        moved[
                            i.microbatch, made.module, rank, plan.by_id[i.peer].rank, sample
                        ] += 1
    return moved


@given(cases(), st.integers(1, 3))
def test_messages_equal_a_loop_over_the_samples(case, microbatches):
    graph, mapping, batch = case
    plan = mapped_plan(graph, mapping, microbatches)
    sizes = [max(1, batch - m) for m in range(microbatches)]
    program = program_of(plan, sizes)
    assert Plan.from_json(plan.to_json()) == plan
    outputs, gradients = Counter(), Counter()
    for m, size in enumerate(sizes):
        where = {}
        for i in (i for rank in program for i in rank if i.op in FORWARDS and i.microbatch == m):
            for samples in i.samples or (Range(0, size),):
                for sample in range(*samples):
                    assert (i.stage.module, sample) not in where
                    where[i.stage.module, sample] = plan.by_id[i.stage].rank
        assert set(where) == {(n.name, s) for n in graph.nodes for s in range(size)}
        travels = set()
        for (reader, sample), rank in where.items():
            for producer in graph.producers(reader):
                every = (producer, reader) in graph.every
                for read in range(size) if every else [sample]:
                    if where[producer, read] != rank:
                        travels.add((m, producer, where[producer, read], rank, read))
        outputs.update(travels)
        gradients.update(
            (m, producer, there, maker, sample)
            for m, producer, maker, there, sample in travels if producer in graph.backward
        )
    if plan.splits_samples:
        assert moves(plan, program, Direction.FORWARD) == outputs
        assert moves(plan, program, Direction.BACKWARD) == gradients


@given(cases())
def test_evaluation_has_no_backward(case):
    graph, mapping, batch = case
    program = program_of(mapped_plan(graph, mapping), [batch], forward_only=True)
    assert all(
        i.op in FORWARDS or i.direction is Direction.FORWARD for rank in program for i in rank
    )


@given(cases())
def test_stages_of_a_slot_run_together_each_on_its_quota(case):
    graph, mapping, batch = case
    plan = mapped_plan(graph, mapping)
    for rank, instructions in enumerate(program_of(plan, [batch])):
        groups: dict[int, set[int]] = {}
        for i in instructions:
            if i.group >= 0:
                stage = plan.by_id[i.stage]
                assert i.quota == stage.quota and stage.rank == rank
                groups.setdefault(i.group, set()).add(stage.slot)
        assert all(len(slots) == 1 for slots in groups.values())
        order = [plan.by_id[i.stage].slot for i in instructions if i.op in FORWARDS]
        assert order == sorted(order)


def test_a_program_in_words():
    plan = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
    text = str(program_of(plan, [4]))
    assert "forward image.0 #0[0:4] (group 0, quota 0.0833333)" in text
    assert "send text.0@1 -> loss.0 #0[2:4]" in text and "recv loss.0@1 <- image.0 #0[0:4]" in text


def test_idle_gpus_are_not_allocated():
    plan = mapped_plan(clip(), mapping_of(8, {"image": (2,), "text": (5, 7)}))
    assert plan.num_ranks == 3 and [s.rank for s in plan.module_stages("text")] == [1, 2]
    assert [(s.rank, s.quota) for s in plan.module_stages("loss")] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (mapping_of(2, {"image": (0,)}, {"text": (0,)}, {"image": (1,)}), "already complete"),
        (mapping_of(2, {"image": (0,)}), "stages do not have module 'text'"),
        (mapping_of(2, {"image": (0,), "video": (1,)}), "accepted: image, loss, text"),
        (replace(mapping_of(2, {"image": (0,), "text": (0,)}), slices=2), "only mappings with"),
    ],
)
def test_mappings_that_cannot_run_are_refused(mapping, message):
    with pytest.raises(PlanError, match=message):
        mapped_plan(clip(), mapping)


def test_stages_before_their_inputs_are_refused():
    mapping = mapping_of(1, {"loss": (0,)}, {"image": (0,), "text": (0,)})
    with pytest.raises(PlanError, match=r"slot of stage loss\.0 is 0 and of image\.0, which it re"):
        mapped_plan(clip(), mapping)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "rows"}, "split of stage image.0 is 'rows'.*accepted: microbatches, samples"),
        ({"slot": None, "quota": None}, "slot of stage image.0 is None; schedule 'slots' needs"),
        ({"slot": 1, "quota": None}, "slot of stage loss.0 is 1 and of image.0, which it re"),
        ({"quota": None}, "rank 0 has stages image.0, text.0 in slot 0"),
        ({"quota": 1.0}, "on rank 0 in slot 0 sum to 1.083; accepted: at most 1"),
    ],
)
def test_plans_that_are_changed_by_hand_are_checked(changes, message):
    plan = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
    stages = tuple(replace(s, **changes) if s.module == "image" else s for s in plan.stages)
    with pytest.raises(PlanError, match=message):
        replace(plan, stages=stages)


def test_slots_are_of_their_schedule_only():
    graph = clip()
    stages = [Stage(name, 0, (0, 1), i) for i, name in enumerate(("image", "text", "loss"))]
    Plan(graph, tuple(stages), 1)
    with pytest.raises(PlanError, match="slot of stage image.0 is 0 and schedule '1f1b'"):
        Plan(graph, (replace(stages[0], slot=0), *stages[1:]), 1)


def test_split_samples_must_be_declared():
    plan = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
    with pytest.raises(ValueError, match="samples are \\[\\]; there are 1 microbatches"):
        lower(plan, [["image", "text"]])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node("a"), Node("a")], "must be unique"),
        ([Node("a", (Use("b"),))], r"names module 'b'; modules are \['a'\]"),
        ([Node("a"), Node("b")], "one module must compute the loss"),
        ([Node("a"), Node("l", loss=True)], "nothing reads module 'a'"),
        ([Node("l", loss=True), Node("a", (Use("l"),))], "nothing reads module 'a'"),
        ([Node("a", (Use("b"),)), Node("b", (Use("a"),)), Node("l", (Use("a"),), loss=True)],
         "cycle"),
    ],
)
def test_invalid_mapped_graphs_are_refused(nodes, message):
    with pytest.raises(PlanError, match=message):
        graph_of(nodes)
