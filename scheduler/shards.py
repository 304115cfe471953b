"""From a plan's ranks to processes: a rank with context parallelism is several of them.

A rank's processes run the same instructions in the same order, each with its share of the
tokens. So a step is scheduled for ranks, and every rank's instructions are then copied for
its processes, with the messages between ranks made messages between processes. The stage of
a rank's process ``k`` is named like the stage, with ``#k`` for all but the first.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from raymm.scheduler.plan import Plan, Stage
from raymm.scheduler.program import EPILOGUE, Instruction, Op, Program


class Process(NamedTuple):
    """One process: the plan's rank, and which of the rank's processes it is."""

    rank: int
    shard: int


class Processes:
    """A plan's processes, numbered rank by rank.

    Attributes:
        plan: the plan.
        all: every process, in order of its number.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        counts = [plan.processes(rank) for rank in range(plan.num_ranks)]
        self._first = list(accumulate(counts, initial=0))
        self.all = tuple(
            Process(rank, shard) for rank, count in enumerate(counts) for shard in range(count)
        )

    def number(self, rank: int, shard: int = 0) -> int:
        """The number of a rank's process."""
        return self._first[rank] + shard

    def of_rank(self, rank: int) -> range:
        """The numbers of all of a rank's processes."""
        return range(self._first[rank], self._first[rank + 1])

    def stages(self, process: Process) -> dict[str, Stage]:
        """The stages of a process by their names there."""
        return {
            shard_name(stage.name, process.shard): stage
            for stage in self.plan.rank_stages(process.rank)
        }

    @cached_property
    def stage_processes(self) -> dict[str, int]:
        """Number of the process of every process's stage."""
        return {
            name: number for number, one in enumerate(self.all) for name in self.stages(one)
        }

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Directed data edges between stages of processes."""
        return tuple(
            (shard_name(src, k), shard_name(dst, other))
            for src, dst in self.plan.stage_edges
            for k in range(self.plan.by_name[src].cp)
            for other in self._partners(src, k, dst)
        )

    def _partners(self, stage: str, shard: int, other: str) -> tuple[int, ...]:
        """Which processes of stage ``other`` one of ``stage`` has messages with: its like where
        both are split alike, else all. Who is not split has everything, and gets the gradients
        of all, which add up."""
        mine, theirs = self.plan.by_name[stage], self.plan.by_name[other]
        if mine.cp == theirs.cp:
            return (shard,)
        if 1 not in (mine.cp, theirs.cp):
            raise ValueError(
                f"cp of stage {stage} is {mine.cp} and of {other} {theirs.cp}; modules that feed "
                "each other must have the same, or one of them 1"
            )
        return tuple(range(theirs.cp))

    def expand(self, program: Program) -> Program:
        """The program of all processes from that of the ranks."""
        return Program(
            tuple(
                tuple(
                    one
                    for instruction in program.ranks[process.rank]
                    for one in self._of_process(instruction, process.shard)
                )
                for process in self.all
            )
        )

    def _of_process(self, instruction: Instruction, shard: int) -> list[Instruction]:
        if instruction.op in EPILOGUE:
            return [instruction]
        mine = instruction._replace(stage=shard_name(instruction.stage, shard))
        if instruction.op not in (Op.SEND, Op.RECV):
            return [mine]
        return [
            mine._replace(peer=shard_name(instruction.peer, other))
            for other in self._partners(instruction.stage, shard, instruction.peer)
        ]


def shard_name(stage: str, shard: int) -> str:
    """``("llm.0", 1)`` -> ``"llm.0#1"``; the first process's stage has the stage's name."""
    return f"{stage}#{shard}" if shard else stage
