"""What of pipelined plans is searched, and the problem that a planner is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.field_checks import check_choices, check_number
from raymm.scheduler.plan.plan import SCHEDULES
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.module_degrees import DegreeChoices

LAYOUTS = ("modality_parallel", "colocated", "replicated")
SEARCHED_SCHEDULES = ("1f1b", "zero_bubble")
CHUNKS = (2, 3, 4)
LAYERS = "layers"
RECOMPUTE = (False, LAYERS, True)
"""What stages may do to fit: nothing; their layers keep as much as there is room for; or they keep
what they receive only."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What of pipelined plans is searched.

    Attributes:
        schedules: those that are tried, of ``"1f1b"``, ``"zero_bubble"`` and ``"gpipe"``.
        layouts: of :data:`LAYOUTS`.
        recompute: whether stages recompute; ``"layers"``: layers keep as much as there is room
            for; None: a layout does the one or the other only if it does not fit otherwise.

    Raises:
        PlanError: naming the field, its value and what is accepted.
    """

    schedules: Sequence[str] = field(
        default=SEARCHED_SCHEDULES,
        metadata={"help": f"of {', '.join(SCHEDULES)}", "metavar": "A,B"},
    )
    layouts: Sequence[str] = field(
        default=LAYOUTS, metadata={"help": f"of {', '.join(LAYOUTS)}", "metavar": "A,B"}
    )
    recompute: bool | str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in (None, *RECOMPUTE):
            raise PlanError(
                f"recompute is {self.recompute!r}; accepted: true, false, {LAYERS!r} or nothing"
            )
        check_choices("schedules", self.schedules, SCHEDULES)
        check_choices("layouts", self.layouts, LAYOUTS)


@dataclass(frozen=True)
class PlanProblem(SearchOptions):
    """What a planner of pipelines is given.

    Attributes:
        graph, profile: the model and what its layers cost.
        ranks: how many devices there are; a plan may use fewer.
        num_microbatches: microbatches per step.
        memory_limit: bytes per device; no limit if None.
        network: what messages take.
        chunks: stages of a module per rank that are tried besides one.
        degrees: per module, the degrees it may have beside its pipeline; where missing, each of
            its ranks is one process.

    Raises:
        PlanError: naming the field, its value and what is accepted.
    """

    graph: ModuleGraph
    profile: CostProfile
    ranks: int
    num_microbatches: int
    memory_limit: int | None = None
    network: Network = Network()
    chunks: Sequence[int] = CHUNKS
    degrees: Mapping[str, DegreeChoices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ranks", self.ranks)
        check_number("num_microbatches", self.num_microbatches)
        if self.memory_limit is not None:
            check_number("memory_limit", self.memory_limit)
        if any(type(many) is not int or many < 2 for many in self.chunks):
            raise PlanError(
                f"chunks is {tuple(self.chunks)}; each must be a whole number, at least 2"
            )
