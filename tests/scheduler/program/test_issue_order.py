"""Programs end for every execution order of NCCL, by an oracle without times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.issue_order import Issue, SharedGradients, shared_gradients
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.nccl_oracle import COMPUTE, operations, stuck
from tests.support.random_plans import alignment, chain, plans, profiled_plans, steps


def one_queue(process: int, communicator: object) -> None:
    """Put all operations of a process into one queue, the worst case."""


def own_queues(process: int, communicator: object) -> object:
    return communicator


def shared_of(plan: Plan, tied: tuple[str, ...] = ()) -> tuple[SharedGradients, ...]:
    """Return gradients shared by replicas of a stage, and by the ends of ``tied`` modules."""
    ranks = {stage.id: stage.rank for stage in plan.stages}
    held = [((stage.first_replica,), [rank]) for stage, rank in ranks.items()]
    for module in tied:
        indices = [stage.index for stage in plan.stages if stage.module == module]
        ends = tuple(StageId(module, index) for index in sorted({0, max(indices)}))
        held += [(ends, [rank]) for stage, rank in ranks.items() if stage.first_replica in ends]
    return shared_gradients(held)


def as_awaited(program: Program, ahead: int = 0) -> list[list[Issue]]:
    """Post receives when they are waited for, or up to ``ahead`` messages of their edge earlier."""
    issues = []
    for instructions in program:
        at: dict = {}
        for number, i in enumerate(instructions):
            if i.op is Op.RECV:
                at.setdefault(i.edge, []).append(number)
        listed = [
            Issue(numbers[max(0, n - ahead)], edge)
            for edge, numbers in at.items() for n in range(len(numbers))
        ]
        issues.append(sorted(listed, key=lambda issue: issue.before))
    return issues


@given(st.data(), st.sampled_from(SCHEDULES), st.booleans(), st.booleans())
def test_any_program_ends_on_any_queues(data, schedule, host_waits, host_blocks) -> None:
    """Use any layout, modalities, gradient sharing, and random queues for communicators.

    The queues include the process's own work.
    """
    plan, present = data.draw(steps(st.one_of(plans(), profiled_plans())))
    plan = replace(plan, schedule=schedule)
    program = lower(plan, present).with_optimizer_ops(OPTIMIZER_OPS)
    names = [node.name for node in plan.graph.nodes]
    shared = shared_of(plan, tuple(data.draw(st.sets(st.sampled_from(names)))))
    seconds = op_seconds(plan) if plan.profile is not None and data.draw(st.booleans()) else None
    issues = check_program(program, shared, seconds).issues
    processes = operations(program, issues, shared)
    sent = Counter(o.name for listed in processes for o in listed if o.kind == "message")
    assert set(sent.values()) <= {2}  # by its sender and by its receiver
    num_queues = data.draw(st.integers(1, 4))
    numbers = st.integers(0, num_queues - 1)
    of_communicator: dict = {}

    def queue(process: int, communicator: object) -> int:
        place = process, communicator
        if place not in of_communicator:
            of_communicator[place] = data.draw(numbers)
        return of_communicator[place]

    assert not stuck(processes, queue, host_waits, host_blocks)


@given(st.data(), st.sampled_from(SCHEDULES))
def test_any_program_ends_one_operation_at_a_time(data, schedule) -> None:
    plan, present = data.draw(steps(profiled_plans()))
    program = lower(replace(plan, schedule=schedule), present)
    shared = shared_of(plan, (plan.graph.backbone,))
    issues = check_program(program, shared).issues
    assert not stuck(operations(program, issues, shared), one_queue, True, True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_oracle_detects_reordered_receives(schedule, ahead) -> None:
    """Use the papers' standard job with a single queue.

    Receives that are posted when they are awaited, or some messages earlier, block the messages
    that others need.
    """
    program = full_program(replace(alignment(8), schedule=schedule))
    assert stuck(operations(program, as_awaited(program, ahead)), one_queue)
    assert not stuck(operations(program, check_program(program).issues), one_queue)
    assert not stuck(operations(program, as_awaited(program)), own_queues)


def test_a_tied_embedding_is_summed_after_its_send() -> None:
    """Let the sum in the last stage's last backward wait for the first stage.

    The first stage waits for the gradient that is sent after it.
    """
    plan = chain(3, 4)
    program = full_program(plan).with_optimizer_ops(OPTIMIZER_OPS)
    (tied,) = (s for s in shared_of(plan, ("llm",)) if len(s.stages) == 2)
    issues = check_program(program, (tied,)).issues
    assert not stuck(operations(program, issues, (tied,)), one_queue)
    early = [
        [i._replace(before=max(n for n, j in enumerate(rank) if j.op is Op.BACKWARD))
         if i.stages else i for i in listed]
        for rank, listed in zip(program, issues, strict=True)
    ]
    assert stuck(operations(program, early, (tied,)), one_queue)
    (begins,) = (issue for issue in issues[2] if issue.stages)
    sends = [n for n, i in enumerate(program.ranks[2]) if i.op is Op.SEND]
    assert begins.before > max(sends)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_of_replicas_begin_within_their_last_backward(schedule) -> None:
    plan = chain(3, 8)
    copies = [replace(s, replica=1, rank=3 + s.rank) for s in plan.stages]
    plan = replace(plan, stages=(*plan.stages, *copies), schedule=schedule)
    program = full_program(plan)
    issues = check_program(program, shared_of(plan)).issues
    for rank, listed in enumerate(issues):
        (begins,) = (issue for issue in listed if issue.stages)
        backwards = [n for n, i in enumerate(program.ranks[rank]) if i.op.startswith("backward")]
        assert begins.before == max(backwards)


def test_a_replica_without_samples_begins_sums_in_the_order_of_the_others() -> None:
    """Give both stages of the second replica to one rank, and its only microbatch to the first."""
    plan = chain(2, 1)
    copies = [replace(stage, replica=1, rank=2) for stage in plan.stages]
    plan = replace(plan, stages=(*plan.stages, *copies), shared_ranks=(2,))
    program = full_program(plan)
    shared = shared_of(plan)
    issues = check_program(program, shared).issues
    assert not stuck(operations(program, issues, shared), one_queue, host_blocks=True)
    first, second = (stage.id for stage in plan.stages[:2])
    assert issues[2] == (Issue(0, stages=(second,)), Issue(0, stages=(first,)))


def test_receives_are_posted_when_their_message_is_due() -> None:
    program = full_program(chain(4, 16))
    for instructions, issues in zip(program, check_program(program).issues, strict=True):
        posted = taken = 0
        for number, i in enumerate(instructions):
            posted += sum(issue.before == number for issue in issues)
            taken += i.op is Op.RECV
            assert posted - taken <= 4
        assert posted == taken


def test_compute_has_a_queue_in_the_oracle() -> None:
    program = full_program(chain(2, 2))
    listed = operations(program, check_program(program).issues)
    assert any(o.communicator == COMPUTE for process in listed for o in process)
