"""One of several parts of a plan that are alike: replicas of a whole pipeline, which have nothing
to do with each other but for sums of gradients. What is true of one is true of all, but for which
of their processes share a node."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage


@dataclass(frozen=True)
class EqualPart(Plan):
    """The part of a plan that has the microbatches ``0, parts, 2 * parts, ...``, and of each module
    the replicas with these numbers; here they are numbered ``0, 1, 2, ...``. Costs of its stages
    and messages are those in the whole plan: processes have their numbers there, in which the
    copies of a stage follow one another, and sums of gradients reach over all parts.

    Attributes:
        parts: of the whole plan.
    """

    parts: int = 1

    @classmethod
    def of(cls, part: Plan, parts: int) -> EqualPart:
        """A plan as one of so many parts.

        Args:
            part: with its share of the replicas and microbatches; the copies of a stage on ranks
                that follow one another.
            parts: there are.
        """
        return cls(**{field.name: getattr(part, field.name) for field in fields(Plan)}, parts=parts)

    def whole(self) -> Plan:
        """The plan that it is a part of."""
        stages = tuple(
            replace(
                stage, replica=stage.replica * self.parts + copy,
                rank=stage.rank * self.parts + copy,
            )
            for stage in self.stages for copy in range(self.parts)
        )
        values = {field.name: getattr(self, field.name) for field in fields(Plan)}
        values["num_microbatches"] *= self.parts
        return Plan(**values | {"stages": stages, "shared_ranks": None})

    def rank_processes(self, rank: int) -> range:
        """The numbers of a rank's processes in the whole plan."""
        own = super().rank_processes(rank)
        first = self.parts * own.start
        return range(first, first + len(own))

    def sharers(self, stage: Stage) -> int:
        """Processes of the whole plan that have the same parameters as one of a stage's."""
        return self.parts * super().sharers(stage)

    def replica_processes(self, stage: Stage) -> list[int]:
        """The processes of all replicas of a stage in the whole plan."""
        first = self.replicas(stage.module)[0][stage.index].rank
        start = self.rank_processes(first).start
        count = self.parts * len(self.replicas(stage.module)) * self.processes(first)
        return list(range(start, start + count))
