"""Options of planning.

They are the section ``planning`` of a configuration, options of ``raymm plan`` (fields with a
``help``), and keyword arguments of ``raymm.plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from raymm.errors import ConfigError, ModelError, PlanError
from raymm.files.section import MOST_COUNT, Count, Text, Tuple
from raymm.packages import import_object
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.problem import STEPS
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.schedules.registry import register
from raymm.scheduler.search.options import SearchOptions

PIPELINED, MULTIPLEXED, AUTO = "pipelined", "multiplexed", "auto"
STYLES = (PIPELINED, MULTIPLEXED, AUTO)
Gib = Annotated[float, Field(gt=0, le=MOST_COUNT)]
Dollars = Annotated[float, Field(ge=0, le=MOST_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=MOST_COUNT)]


def _field(default: Any, text: str, shown: str = "N") -> Any:
    return field(default=default, metadata={"help": text, "metavar": shown})


def named_schedule(field: str, name: str) -> str:
    """Return a schedule's name. Import and register the custom schedule that ``module:name`` names,
    a class or an object.

    Raises:
        ConfigError: there is no such object.
        PlanError: the object is no schedule.
    """
    if ":" not in name:
        return name
    try:
        return register(import_object(name), name)
    except ModelError as error:
        raise ConfigError(f"{field}: {error}") from None
    except PlanError as error:
        raise PlanError(f"{field} is {name!r}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Devices, costs and limits; the ``help`` of each field describes it.

    Attributes:
        passes: functions that change the plan, as ``module:function``; see
            :class:`raymm.planning.passes.PlanPass`.
        per_batch: let training choose the order of the microbatches and the schedule of each step
            from the sizes of its samples (:mod:`raymm.training.step_orders`).
    """

    ranks: Count | None = _field(
        None, "number of devices (GPUs) to plan for (default: the cluster's)"
    )
    device: Text | None = _field(
        None, "compute costs for this device, e.g. H100 (default: the cluster's)", "NAME"
    )
    profile: Text | None = _field(None, "measured costs, from `raymm profile`", "FILE")
    tokens: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "tokens per sample of a module, e.g. llm=4096: of the merged sequence for the "
                    "language model, of one item for an encoder (repeatable; default: from the "
                    "data)",
            "metavar": "MODULE=N",
        },
    )
    memory_gib: Gib | None = _field(
        None, "GiB a rank may use (default: all but the driver's context; on CPUs no limit)", "X"
    )
    ranks_per_node: Count = _field(
        8, "devices per node, which determines the fast links (default 8; on a cluster at most the "
           "devices of its nodes)"
    )
    time_limit: Seconds | None = _field(
        None, "stop a search for pipelines after S seconds and use the best plan so far (default: "
              "no limit)", "S",
    )
    degrees: Text | list[Text] = _field(
        "auto",
        "parallelism within modules: auto (default), none (pipelines only), or a list of tp, cp, "
        "dp; tp=4 limits the degree, llm.tp=4 fixes it for one module",
        "A,B",
    )
    dollars_per_gpu_hour: Dollars | None = _field(
        None, "price of one device, for the cost per million tokens", "X"
    )
    passes: Tuple[Text] = ()
    per_batch: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiplexOptions:
    """Options of multiplexed planning.

    Attributes:
        surfaces: measured surfaces or their file; None for estimates.
        interference: coefficients of Mosaic's eq. 8 or their file; ``"bandwidth"`` (default) for
            shared memory bandwidth (:data:`raymm.costs.scaling_estimates.BANDWIDTH_SHARES`);
            ``"blind"`` for no interference.
        quota_steps: resolution of quotas; 10 stands for tenths of a GPU.
        solver, seed, deadline_seconds: see :func:`raymm.scheduler.multiplex.solver.solve.solve`.
    """

    surfaces: Sequence[ScalingSurface] | str | Path | None = None
    interference: Interference | str | Path | None = _field(
        None,
        "multiplexed: how modules slow each other down: a file, bandwidth (default: estimated from "
        "shares of the memory bandwidth), or blind",
        "FILE",
    )
    quota_steps: int = _field(
        STEPS, f"multiplexed: quotas are multiples of 1/N of a device (default {STEPS})"
    )
    solver: str = _field(
        "auto", "multiplexed: auto (default), greedy, exact, local_search", "NAME"
    )
    seed: int = 0
    deadline_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanningOptions, SearchOptions, MultiplexOptions):
    """All options of planning.

    Attributes:
        style: ``"pipelined"``, ``"multiplexed"``, or ``"auto"`` for the one that is predicted to be
            faster.

    Raises:
        PlanError: names the field, its value and what is accepted.
    """

    style: str = field(default=PIPELINED, metadata={
        "help": "pipelined (default): each stage has its own devices; multiplexed: modules share "
                "devices by quota, stages take turns; auto: the faster of both",
        "choices": STYLES,
    })

    def __post_init__(self) -> None:
        names = [
            named_schedule("schedules", s) if isinstance(s, str) else s for s in self.schedules
        ]
        object.__setattr__(self, "schedules", tuple(names))
        super().__post_init__()
        if self.style not in STYLES:
            raise PlanError(f"style is {self.style!r}; accepted: {', '.join(STYLES)}")
        check_number("ranks_per_node", self.ranks_per_node)
        if self.ranks is not None:
            check_number("ranks", self.ranks)
        price = self.dollars_per_gpu_hour
        if price is not None and not 0 <= price <= MOST_COUNT:  # NaN fails too
            raise PlanError(
                f"dollars_per_gpu_hour is {price}; accepted: at least 0, at most {MOST_COUNT}"
            )
        if self.time_limit is not None and not 0 < self.time_limit <= MOST_COUNT:  # NaN fails too
            raise PlanError(
                f"time_limit is {self.time_limit}; accepted: seconds above 0, at most {MOST_COUNT}"
            )
