"""What planning can be asked. The section ``planning`` of a configuration, the command line of
``raymm plan`` (fields that have a ``help``) and keywords of ``raymm.plan`` are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from raymm.errors import PlanError
from raymm.files.section import MOST_COUNT, Count, Text
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.problem import STEPS
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.search.options import SearchOptions

PIPELINED, MULTIPLEXED, AUTO = "pipelined", "multiplexed", "auto"
STYLES = (PIPELINED, MULTIPLEXED, AUTO)
Gib = Annotated[float, Field(gt=0, le=MOST_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=MOST_COUNT)]


def _field(default: Any, text: str, shown: str = "N") -> Any:
    return field(default=default, metadata={"help": text, "metavar": shown})


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Devices, costs and limits. What a field is, its ``help`` says."""

    ranks: Count | None = _field(
        None, "how many devices (GPUs) to plan for; default: the cluster's"
    )
    device: Text | None = _field(
        None, "compute costs for this device, e.g. H100; default: the cluster's", "NAME"
    )
    profile: Text | None = _field(None, "measured costs, from `raymm profile`", "FILE")
    tokens: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "tokens per sample of a module: the language model's with everything merged "
            "in, an encoder's of one item, e.g. llm=4096 (repeatable; default: the data's)",
            "metavar": "MODULE=N",
        },
    )
    memory_gib: Gib | None = _field(
        None, "GiB a rank may use (default: all but the driver's context; on CPUs no limit)", "X"
    )
    ranks_per_node: Count = _field(
        8, "devices that share a node, which decides which links are fast (default 8; on a cluster "
        "at most what its nodes hold)"
    )
    time_limit: Seconds | None = _field(
        None, "end a search for pipelines after S seconds, with the best plan so far (default: "
        "none)", "S",
    )
    degrees: Text | list[Text] = _field(
        "auto",
        "of parallelism within modules: auto (default), none (pipelines only), or of tp, cp, dp; "
        "tp=4 up to a degree, llm.tp=4 with this one",
        "A,B",
    )


@dataclass(frozen=True, kw_only=True)
class MultiplexOptions:
    """What only multiplexed planning is asked.

    Attributes:
        surfaces: measured ones, or their file; None: estimates.
        interference: coefficients of Mosaic's eq. 8, or their file; ``"bandwidth"`` (default:
            modules share the memory bandwidth,
            :data:`raymm.costs.scaling_estimates.BANDWIDTH_SHARES`), or ``"blind"``: modules never
            disturb each other.
        quota_steps: of a GPU's quota; 10: tenths.
        solver, seed, deadline_seconds: of :func:`raymm.scheduler.multiplex.solver.solve.solve`.
    """

    surfaces: Sequence[ScalingSurface] | str | Path | None = None
    interference: Interference | str | Path | None = _field(
        None,
        "multiplexed: what modules cost each other: a file, bandwidth (default: estimated from "
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
    """All that planning can be asked.

    Attributes:
        style: ``"pipelined"``, ``"multiplexed"``, or ``"auto"``: whichever is predicted to be
            faster.

    Raises:
        PlanError: naming the field, its value and what is accepted.
    """

    style: str = field(default=PIPELINED, metadata={
        "help": "pipelined (default): stages on devices of their own; multiplexed: modules share "
        "devices by quota, stages take turns; auto: both, and which is faster",
        "choices": STYLES,
    })

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style not in STYLES:
            raise PlanError(f"style is {self.style!r}; accepted: {', '.join(STYLES)}")
        check_number("ranks_per_node", self.ranks_per_node)
        if self.ranks is not None:
            check_number("ranks", self.ranks)
        if self.time_limit is not None and not 0 < self.time_limit <= MOST_COUNT:  # NaN fails too
            raise PlanError(
                f"time_limit is {self.time_limit}; accepted: seconds above 0, at most {MOST_COUNT}"
            )
