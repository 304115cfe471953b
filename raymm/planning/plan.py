"""``raymm.plan``: inputs, a search, its result, and views of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.planning.inputs import PlanInputs
from raymm.planning.plan_result import PlanResult
from raymm.planning.plan_view import draw_schedule, explanation, plan_html, plan_table
from raymm.planning.request import PlanRequest, Workload
from raymm.planning.search import search_pipelines
from raymm.scheduler.progress.search_control import SearchControl


class Planned(PlanResult):
    """A plan, what else was tried, and pictures and tables of it. Notebooks show the table."""

    @classmethod
    def of(cls, inputs: PlanInputs, control: SearchControl | None = None) -> Planned:
        """What a search finds.

        Args:
            inputs: what the plan follows from.
            control: as of :func:`~raymm.planning.search.search_pipelines`.

        Raises:
            StageSearchError: if nothing fits.
            PlanError: if a degree is asked for that a module cannot have.
        """
        result = search_pipelines(inputs, control)
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)})

    def table(self) -> Table:
        """Every stage: its layers, its place, what it costs. For a rich console."""
        return plan_table(self)

    def explain(self) -> str:
        """How long a step takes, what was tried instead, and why it lost."""
        return explanation(self)

    def draw(self, path: str | Path) -> Path:
        """Draw the simulated step; ``.png`` or ``.svg``. Returns the path written."""
        return draw_schedule(self, path)

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan(
    model: MultimodalModule | WholeModel,
    *,
    ranks: int,
    microbatches: int = 8,
    microbatch: Mapping[str, Any] | None = None,
    samples: int = 1,
    dtype: str = "bf16",
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Planned:
    """Plan a model: cut its modules, place the stages, choose a schedule.

    Nothing is started and no weights are read. Ctrl-C ends a search with the best plan so far::

        planned = raymm.plan(model, ranks=24, device="H100", tokens={"llm": 4096})
        planned                                # in a notebook: the table
        raymm.Trainer(model, planned.plan, ...)

    Args:
        model: the description.
        ranks: how many devices there are; a plan may use fewer.
        microbatches, microbatch, samples, dtype: the work of a step, as of
            :class:`raymm.planning.request.Workload`.
        say: takes a line every few seconds of a long search, e.g. ``print``.
        **options: what is planned for and how: fields of :class:`raymm.PlanRequest` (``device``,
            ``profile``, ``tokens``, ``memory_gib``, ``ranks_per_node``, ``time_limit``,
            ``degrees``, ``schedules``, ``layouts``, ``recompute``).

    Raises:
        TypeError: an option that is none; by name.
        PlanError, DeviceError, ProfileError, LoadError: naming the argument and what is accepted.
        StageSearchError: if nothing fits.
    """
    request = PlanRequest.of_options({"ranks": ranks, **options})
    request.degree_request.check(model.module_names)
    workload = Workload(microbatches, samples, microbatch=microbatch, dtype=dtype)
    inputs = PlanInputs.of(model, request, workload)
    control = SearchControl(request.time_limit, say)
    with control.interruptible():
        return Planned.of(inputs, control)
