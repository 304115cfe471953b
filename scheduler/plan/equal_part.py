"""One of several equal parts of a plan: replicas of a whole pipeline that only share gradient
all-reduces. Results for one part hold for all, except for which processes share a node."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage


@dataclass(frozen=True)
class EqualPart(Plan):
    """One of ``parts`` equal parts of a plan, with the microbatches ``0, parts, 2 * parts, ...``
    and the module replicas of these numbers, renumbered ``0, 1, 2, ...``. Costs of stages and
    messages are those in the whole plan: processes have their numbers in the whole plan, where the
    replicas of a stage are adjacent, and gradient sums span all parts."""

    parts: int = 1

    @classmethod
    def of(cls, part: Plan, parts: int) -> EqualPart:
        """Return ``part`` as one of ``parts`` equal parts. It must have its share of the replicas
        and microbatches, and the replicas of a stage must be on adjacent ranks."""
        return cls(**{field.name: getattr(part, field.name) for field in fields(Plan)}, parts=parts)

    def whole(self) -> Plan:
        stages = tuple(
            replace(
                stage, replica=stage.replica * self.parts + number,
                rank=stage.rank * self.parts + number,
            )
            for stage in self.stages for number in range(self.parts)
        )
        values = {field.name: getattr(self, field.name) for field in fields(Plan)}
        values["num_microbatches"] *= self.parts
        return Plan(**values | {"stages": stages, "shared_ranks": None})

    def rank_processes(self, rank: int) -> range:
        """Return the numbers of a rank's processes in the whole plan."""
        local = super().rank_processes(rank)
        first = self.parts * local.start
        return range(first, first + len(local))

    def sharers(self, stage: Stage) -> int:
        """Return the number of processes of the whole plan that share the parameters of a process
        of the stage."""
        return self.parts * super().sharers(stage)

    def replica_processes(self, stage: Stage) -> list[int]:
        """Return the processes of all replicas of a stage in the whole plan."""
        first = self.replicas(stage.module)[0][stage.index].rank
        start = self.rank_processes(first).start
        count = self.parts * len(self.replicas(stage.module)) * self.processes(first)
        return list(range(start, start + count))
