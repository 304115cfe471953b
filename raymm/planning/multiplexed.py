"""Planning multiplexed execution: ``raymm.plan_multiplexed`` and what it returns.

A module keeps its weights on its GPUs, and its activations until the backward, which goes through
the stages in reverse. So a mapping is checked over the whole iteration.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.costs.scaling_estimates import batch_workload, edges_of, shapes_of
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.planning.mapping_inputs import MappedBatch, MappingInputs, mapping_inputs
from raymm.planning.mapping_result import MappingResult, gpu_memory
from raymm.planning.mapping_view import draw_planned, explanation, mapping_table, planned_html
from raymm.planning.request import PlanRequest
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.graph.strict_json import MOST_GPUS, MultiplexError, whole
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.multiplex.problem import STEPS, MappingProblem
from raymm.scheduler.multiplex.solver.leftover_quota import with_leftover_quota
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.schedule.memory import GIB


class PlannedMultiplexed(MappingResult):
    """A mapping, and pictures and tables of it. Notebooks show the table."""

    @classmethod
    def of(cls, inputs: MappingInputs) -> PlannedMultiplexed:
        """What a search finds."""
        result = search_mapping(inputs)
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)})

    def table(self) -> Table:
        """Every stage: its modules, their GPUs and quotas, what they take. For a rich console."""
        return mapping_table(self)

    def explain(self) -> str:
        """How long an iteration takes, and how the mapping was found."""
        return explanation(self)

    def draw(self, path: str | Path, title: str | None = None) -> Path:
        """Draw the mapping, a lane per GPU; ``.png`` or ``.svg``. Returns the path written."""
        return draw_planned(self, path, title)

    def _repr_html_(self) -> str:
        return planned_html(self)


def plan_multiplexed(
    model: MultimodalModule | ModuleDag,
    *,
    gpus: int,
    batch: int | None = None,
    dtype: str = "bf16",
    steps: int = STEPS,
    strategy: str = "auto",
    **options: Any,
) -> PlannedMultiplexed:
    """Map a model's modules to stages, GPUs and shares of their multiprocessors (Mosaic §3).

    Nothing is started and no weights are read::

        planned = raymm.plan_multiplexed(dag, gpus=8, device="H100", batch=256, tokens={"text": 77})
        planned                                # in a notebook: the table
        DagParallelModule(dag, plan_of_mapping(dag, planned.mapping), ...)

    Args:
        model: encoders and a language model, or any graph of modules.
        gpus: how many GPUs there are.
        batch: samples of an iteration, for estimates. Surfaces must have been measured with it.
        dtype: compute dtype of estimates.
        steps: of a GPU's quota; 10: tenths.
        strategy: of :func:`raymm.scheduler.multiplex.solver.solve.solve`.
        **options: fields of :class:`raymm.PlanRequest`: ``device`` (``"cpu"`` if there are no
            ``surfaces`` either; CPUs have no quotas), ``tokens`` (of a sample; by default what
            configs say), ``memory_gib``, ``ranks_per_node``, and those of
            :class:`raymm.config.planning_options.MultiplexOptions`.

    Raises:
        TypeError: an option that is none; by name.
        MultiplexError, DeviceError, LoadError: naming the argument and what is accepted; a module
            that fits no GPU.
    """
    whole(gpus, "gpus", 1, MOST_GPUS)
    asked = {"ranks": gpus, "quota_steps": steps, "solver": strategy, **options}
    asked["tokens"] = asked.get("tokens") or {}
    request = PlanRequest.of_options(asked)
    shapes, loads = shapes_of(model), None
    device = None if request.device is None else find_device(request.device)
    if request.surfaces is None:
        if batch is None:
            raise MultiplexError(
                "batch is not given; estimates need the samples of an iteration, at least 1"
            )
        loads = batch_workload(shapes, request.tokens, whole(batch, "batch", 1))
    return PlannedMultiplexed.of(mapping_inputs(
        shapes, edges_of(model, [shape.name for shape in shapes]), request,
        MappedBatch(batch, dtype, loads=loads), device,
    ))


def search_mapping(inputs: MappingInputs) -> MappingResult:
    """Search for a mapping."""
    problem, request = inputs.problem, inputs.request
    mapping = solve(
        problem, request.solver, seed=request.seed, deadline_seconds=request.deadline_seconds
    )
    return MappingResult(
        problem, with_leftover_quota(problem, mapping), inputs.source, inputs.estimated,
        inputs.interference, inputs.batch, _too_much(problem, mapping), inputs.notes,
    )


def _too_much(problem: MappingProblem, mapping: StageMapping) -> str | None:
    if problem.memory_bytes is None:
        return None
    used = gpu_memory(problem, mapping)
    gpu = max(range(len(used)), key=lambda g: used[g])
    if used[gpu] <= problem.memory_bytes:
        return None
    return (
        f"all modules of GPU {gpu} together need {used[gpu] / GIB:.2f} GiB over an iteration, and "
        f"a GPU may use {problem.memory_bytes / GIB:.2f} GiB"
    )
