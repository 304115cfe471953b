"""Options of a search for pipelined plans, and the problem for a planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.field_checks import check_choices, check_number
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedules.one_f_one_b import OneFOneB
from raymm.scheduler.schedules.registry import SCHEDULES, pipeline_schedules, schedule_name
from raymm.scheduler.schedules.zero_bubble import ZeroBubble
from raymm.scheduler.search.module_degrees import DegreeChoices

LAYOUTS = ("modality_parallel", "colocated", "replicated")
SEARCHED_SCHEDULES = (OneFOneB.name, ZeroBubble.name)
CHUNKS = (2, 3, 4)
LAYERS = "layers"
RECOMPUTE = (False, LAYERS, True)
"""Ways to fit in memory: keep all activations; let layers keep as much as fits; or keep only the
inputs of stages."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search for pipelined plans; raises ``PlanError`` naming an invalid field.

    Attributes:
        schedules: schedules to try, of ``"1f1b"``, ``"zero_bubble"`` and ``"gpipe"``, or custom
            :class:`raymm.Schedule` objects, which become their names.
        recompute: True if stages recompute; ``"layers"`` if layers keep as much as fits; None to
            try these only for layouts that do not fit otherwise.
    """

    schedules: Sequence[str] = field(
        default=SEARCHED_SCHEDULES,
        metadata={"help": f"any of {', '.join(SCHEDULES)}, or module:Class", "metavar": "A,B"},
    )
    layouts: Sequence[str] = field(
        default=LAYOUTS, metadata={"help": f"any of {', '.join(LAYOUTS)}", "metavar": "A,B"}
    )
    recompute: bool | str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in (None, *RECOMPUTE):
            raise PlanError(
                f"recompute is {self.recompute!r}; accepted: true, false, {LAYERS!r} or nothing"
            )
        names = [s if isinstance(s, str) else schedule_name(s) for s in self.schedules]
        object.__setattr__(self, "schedules", tuple(names))
        check_choices("schedules", names, pipeline_schedules())
        check_choices("layouts", self.layouts, LAYOUTS)


@dataclass(frozen=True)
class PlanProblem(SearchOptions):
    """Problem for a planner of pipelines; raises ``PlanError`` naming an invalid field.

    Attributes:
        ranks: number of devices; a plan may use fewer.
        memory_limit: bytes per device; None for no limit.
        chunks: numbers of stages per rank and module to try in addition to one.
        degrees: accepted degrees by module; for other modules, each rank is one process.
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
