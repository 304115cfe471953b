"""From a schedule to its program: the messages around every task."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import Instruction, Op, Program, group_end
from raymm.scheduler.schedule.schedule_rules import Schedule, Task
from raymm.scheduler.schedule.step_graph import ActiveStages


def to_program(plan: Plan, active: Sequence[ActiveStages], schedule: Schedule) -> Program:
    """The schedule's tasks with their messages: those of a group before and after all of it.

    Args:
        plan: whose stages run.
        active: which stages each microbatch has.
        schedule: of the plan.
    """
    ranks = []
    for tasks in schedule.tasks:
        instructions: list[Instruction] = []
        index = 0
        while index < len(tasks):
            after = group_end(tasks, index)
            sends: list[Instruction] = []
            computes = []
            for stage, microbatch, op, group, quota in tasks[index:after]:
                receives, behind = _messages_around(plan, active, tasks[index], schedule.early)
                instructions += receives
                computes.append(Instruction(op, stage, microbatch, NO_STAGE, group, quota))
                sends += behind
                index += 1
            instructions += computes
            instructions += sends
        ranks.append(tuple(instructions))
    return Program(tuple(ranks))


def _messages_around(
    plan: Plan, active: Sequence[ActiveStages], task: Task, early: bool
) -> tuple[list[Instruction], list[Instruction]]:
    """:func:`messages` of a task, where a recomputation and its backward are next to each other:
    the gradient is received before both."""
    receives, sends = messages(plan, active[task.microbatch], task)
    if task.op is Op.RECOMPUTE and not early:
        backward = task._replace(op=Op.BACKWARD)
        receives, _ = messages(plan, active[task.microbatch], backward)
    elif task.op is Op.BACKWARD and plan.by_id[task.stage].recompute and not early:
        receives = []  # they came before the recomputation
    return receives, sends


def messages(
    plan: Plan, active: ActiveStages, task: Task
) -> tuple[list[Instruction], list[Instruction]]:
    """The receives before a task and the sends after it. Stages on one rank hand tensors
    over directly and need no message.

    Args:
        plan: whose stages run.
        active: which stages each microbatch has.
        task: of the schedule.
    """
    name, microbatch, op, *_ = task
    rank = plan.by_id[name].rank
    producers = [s for s in plan.stage_producers[name] if s in active.stages]
    consumers = [s for s in plan.stage_consumers[name] if s in active.stages]
    sources: list[StageId] = []
    targets: list[StageId] = []
    direction = Direction.FORWARD
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        direction, sources = Direction.BACKWARD, consumers
        targets = [p for p in producers if p in active.needs_backward]
    elif op not in (Op.RECOMPUTE, Op.BACKWARD_WEIGHT):
        sources, targets = producers, consumers

    def remote(what: Op, stages: list[StageId]) -> list[Instruction]:
        return [
            Instruction(what, name, microbatch, other, direction=direction)
            for other in stages
            if plan.by_id[other].rank != rank
        ]

    return remote(Op.RECV, sources), remote(Op.SEND, targets)
