"""Planning of multiplexed execution: ``raymm.plan_multiplexed`` and its result.

A module keeps its weights on its GPUs, and its activations until the backward, which runs through
the stages in reverse. Memory is therefore checked over the whole iteration.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from raymm.costs.scaling_estimates import batch_workload, edges_of, shapes_of
from raymm.draw.mapping import draw_mapping
from raymm.draw.notebook import figures_html
from raymm.draw.row_table import html_table, row_table, time_text
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.planning.mapping_inputs import MappedBatch, MappingInputs, mapping_inputs
from raymm.planning.request import PlanRequest
from raymm.plural import plural
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.graph.strict_json import MOST_GPUS, whole
from raymm.scheduler.multiplex.iteration_memory import iteration_memory
from raymm.scheduler.multiplex.mapping import Mapping, module_seconds
from raymm.scheduler.multiplex.problem import STEPS, MappingProblem
from raymm.scheduler.multiplex.solver.leftover_quota import with_leftover_quota
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.schedule.memory import GIB

_LEFT = ("module", "GPUs")


@dataclass(frozen=True)
class PlannedMultiplexed:
    """A mapping with its inputs, tables and pictures. Notebooks show the table.

    Attributes:
        mapping: convert it to a plan with :func:`raymm.plan_of_mapping` to run it.
        source, estimated, interference, batch, notes: see :class:`MappingInputs`.
        unfit: reason why the mapping does not fit in memory; None if it fits.
        needs: bytes on each GPU by the memory model of all plans, with messages, system memory and
            optimizer updates; empty where only surfaces are known.
    """

    problem: MappingProblem
    mapping: Mapping
    source: str
    estimated: bool
    interference: str
    batch: int | None = None
    unfit: str | None = None
    notes: tuple[str, ...] = ()
    needs: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration's forward and backward."""
        return self.mapping.seconds

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes on each GPU over the whole iteration: ``needs``, or :func:`iteration_memory`."""
        return self.needs or iteration_memory(self.problem, self.mapping)

    @classmethod
    def of(cls, inputs: MappingInputs) -> PlannedMultiplexed:
        problem, request = inputs.problem, inputs.request
        mapping = solve(
            problem, request.solver, seed=request.seed, deadline_seconds=request.deadline_seconds
        )
        return cls(
            problem, with_leftover_quota(problem, mapping), inputs.source, inputs.estimated,
            inputs.interference, inputs.batch, _too_much(problem, mapping), inputs.notes,
        )

    def rows(self) -> list[dict[str, str]]:
        """Return one row per module of every stage: its GPUs and quota, milliseconds of forward and
        backward next to the other modules and alone, milliseconds of the stage, and GiB on each
        GPU."""
        problem, mapping = self.problem, self.mapping
        rows = []
        for index, stage in enumerate(mapping.stages):
            times = module_seconds(problem, stage.placements, mapping.slices)
            for first, (placement, seconds) in enumerate(zip(stage.placements, times, strict=True)):
                m = problem.names.index(placement.module)
                degree = len(placement.gpus).bit_length() - 1
                unshared = float(problem.seconds[m, degree, placement.quota])
                alone_seconds = unshared * placement.slices / mapping.slices
                rows.append({
                    "stage": str(index) if not first else "",
                    "module": placement.module + (
                        f" {placement.slices}/{mapping.slices}" if mapping.slices > 1 else ""
                    ),
                    "GPUs": gpus_text(placement.gpus),
                    "quota": f"{placement.quota / mapping.steps:.0%}",
                    "ms": milliseconds(seconds),
                    "alone": milliseconds(alone_seconds),
                    "GiB": f"{int(problem.memory[m, degree]) / GIB:.2f}",
                    "stage ms": milliseconds(stage.seconds) if not first else "",
                })
        return rows

    def table(self) -> Table:
        """Return a table of all stages for a rich console: modules, GPUs, quotas, times and
        memory."""
        rows = self.rows()
        stages, gpus = len(self.mapping.stages), self.mapping.gpus
        return row_table(
            rows,
            title=f"{stages} stage{'s' * (stages != 1)} on {gpus} GPU{'s' * (gpus != 1)}, "
            "multiplexed" + (" (estimates)" if self.estimated else ""),
            caption="quota: share of each GPU's multiprocessors; ms: forward and backward next to "
                    "the other modules; memory in GiB on each GPU",
            left=_LEFT,
            sections=[i for i, row in enumerate(rows) if row["stage"] and i],
        )

    def explain(self) -> str:
        """Return a text on the predicted time of an iteration and how the mapping was found."""
        mapping = self.mapping
        samples = f" of {plural(self.batch, 'sample')}" if self.batch else ""
        lines = [f"predicted {time_text(mapping.seconds)} per iteration{samples}; {self.source}"]
        if mapping.bound:
            proof = "proven optimal (of whole modules)" if mapping.optimal else (
                f"no mapping of whole modules takes less than {time_text(mapping.bound)} (gap "
                f"{mapping.gap:.1%})"
            )
            lines.append(f"found by {mapping.method}; under this model {proof}")
        else:
            lines.append(f"found by {mapping.method}; no bound is known")
        lines.append(f"interference: {self.interference}")
        if self.problem.memory_bytes is not None:
            lines.append(
                f"memory: at most {max(self.memory) / GIB:.2f} GiB on a GPU over an iteration, of "
                f"{self.problem.memory_bytes / GIB:.2f} GiB"
            )
        if self.unfit:
            lines.append(f"does not fit: {self.unfit}")
        lines.append("not counted: the optimizer, messages between modules, kernel launches"
                     if self.estimated else
                     "not counted: the optimizer, messages between modules")  # fmt: skip
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def draw(self, path: str | Path, title: str | None = None) -> Path:
        """Draw the mapping with one row per GPU into a ``.png`` or ``.svg`` file, and return its
        path."""
        return draw_mapping(
            self.problem, self.mapping, path, title=title,
            note=("estimates, not measured" if self.estimated else "")
        )

    def _repr_html_(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            picture = self.draw(Path(folder) / "mapping.png")
            return html_table(self.rows(), self.explain()) + figures_html(
                {"the mapping": picture}
            )


def plan_multiplexed(
    model: Model,
    *,
    gpus: int,
    batch: int | None = None,
    dtype: str = "bf16",
    steps: int = STEPS,
    strategy: str = "auto",
    **options: Any,
) -> PlannedMultiplexed:
    """Map a model's modules to stages, GPUs and shares of their multiprocessors (Mosaic §3).

    No process is started and no weights are read::

        planned = raymm.plan_multiplexed(dag, gpus=8, device="H100", batch=256, tokens={"text": 77})
        planned                                # in a notebook: the table
        ParallelModel(dag, plan_of_mapping(dag, planned.mapping), ...)

    Args:
        model: encoders and a language model, or any graph of modules.
        batch: samples of an iteration. Estimates require it; surfaces must have been measured with
            it.
        dtype: compute dtype of estimates.
        steps: resolution of quotas; 10 stands for tenths of a GPU.
        strategy: see :func:`raymm.scheduler.multiplex.solver.solve.solve`.
        **options: fields of :class:`raymm.PlanRequest`: ``device`` (default ``"cpu"`` if there are
            no ``surfaces`` either; CPUs have no quotas), ``tokens`` (per sample; the default is
            from the modules' configs), ``memory_gib``, ``ranks_per_node``, and those of
            :class:`raymm.config.planning_options.MultiplexOptions`.

    Raises:
        TypeError: unknown option.
        PlanError: names the argument and what is accepted, or a module that fits on no GPU.
    """
    whole(gpus, "gpus", 1, MOST_GPUS)
    request_options = {"ranks": gpus, "quota_steps": steps, "solver": strategy, **options}
    request_options["tokens"] = request_options.get("tokens") or {}
    request = PlanRequest.of_options(request_options)
    shapes, loads = shapes_of(model), None
    device = None if request.device is None else find_device(request.device)
    if request.surfaces is None:
        if batch is None:
            raise PlanError(
                "batch is not given; estimates need the samples of an iteration, at least 1"
            )
        loads = batch_workload(shapes, request.tokens, whole(batch, "batch", 1))
    return PlannedMultiplexed.of(mapping_inputs(
        shapes, edges_of(model, [shape.name for shape in shapes]), request,
        MappedBatch(batch, dtype, loads=loads), device,
    ))


def _too_much(problem: MappingProblem, mapping: Mapping) -> str | None:
    if problem.memory_bytes is None:
        return None
    used = iteration_memory(problem, mapping)
    gpu = max(range(len(used)), key=lambda g: used[g])
    if used[gpu] <= problem.memory_bytes:
        return None
    return (
        f"all modules of GPU {gpu} together need {used[gpu] / GIB:.2f} GiB over an iteration, and "
        f"a GPU may use {problem.memory_bytes / GIB:.2f} GiB"
    )


def gpus_text(gpus: tuple[int, ...]) -> str:
    """Return ``"0-3"`` for consecutive GPUs, otherwise ``"0,2"``."""
    if len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1:
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus))


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits, or as a whole number from 100
    on."""
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
