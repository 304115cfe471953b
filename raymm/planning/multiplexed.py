"""Planning multiplexed execution: ``raymm.plan_multiplexed`` and what it returns.

The solver's limit on memory is of one stage at a time. But a module keeps its weights on its GPUs,
and its activations until the backward, which goes through the stages in reverse. So the mapping is
checked over the whole iteration; where it does not fit, the fastest baseline that does is taken, or
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from raymm.costs.layer_count import Load
from raymm.costs.named_devices import CPU, device_called
from raymm.costs.scaling_estimates import (
    BANDWIDTH_SHARES,
    MULTIPROCESSORS,
    ModuleShape,
    batch_workload,
    check_steps,
    edges_of,
    estimated_surface,
    measured_factor,
    shapes_of,
)
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.planning.mapping_result import MappingResult, gpu_memory
from raymm.planning.mapping_view import draw_planned, explanation, mapping_table, planned_html
from raymm.planning.planned_costs import MEMORY_SHARE
from raymm.scheduler.baselines.mappings import distmm, megatron, spindle
from raymm.scheduler.costs.devices import DeviceSpec, Links, find_device
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.strict_json import (
    MOST_GPUS,
    MOST_STEPS,
    MultiplexError,
    number,
    read_file,
    whole,
)
from raymm.scheduler.multiplex.interference import Interference
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.multiplex.problem import STEPS, MappingProblem
from raymm.scheduler.multiplex.solver.leftover_quota import with_leftover_quota
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.multiplex.surface import (
    ScalingSurface,
    SurfaceConditions,
    conditions_from_json,
    surfaces_from_json,
)
from raymm.scheduler.schedule.memory import GIB

MOST_GIB = 2**30  # bytes then fit into a word
BASELINES = {"Megatron-LM": megatron, "DistMM": distmm, "Spindle": spindle}
INTERFERENCES = {"bandwidth": BANDWIDTH_SHARES, "blind": Interference()}


class DoesNotFitError(MultiplexError):
    """A module whose memory fits on no GPU, at any degree."""


@dataclass(frozen=True)
class MappingRequest:
    """What is asked of a mapping; fields as the arguments of :func:`plan_multiplexed`, the device
    looked up.

    Attributes:
        precision, tokens: what surfaces must have been measured with; None: whatever it was.
    """

    gpus: int
    device: DeviceSpec | None = None
    surfaces: Sequence[ScalingSurface] | str | Path | None = None
    interference: Interference | str | Path | None = None
    memory_gib: float | None = None
    batch: int | None = None
    dtype: str = "bf16"
    steps: int = STEPS
    strategy: str = "auto"
    seed: int = 0
    ranks_per_node: int = 8
    deadline_seconds: float | None = None
    precision: str | None = None
    tokens: Mapping[str, int] | None = None


class PlannedMultiplexed(MappingResult):
    """A mapping, what others would have made of the same modules, and pictures and tables of it.
    Notebooks show the table."""

    def table(self) -> Table:
        """Every stage: its modules, their GPUs and quotas, what they take. For a rich console."""
        return mapping_table(self)

    def explain(self) -> str:
        """How long an iteration takes, how the mapping was found, what others would take."""
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
    device: str | None = None,
    surfaces: Sequence[ScalingSurface] | str | Path | None = None,
    interference: Interference | str | Path | None = None,
    memory_gib: float | None = None,
    batch: int | None = None,
    tokens: Mapping[str, int] | None = None,
    dtype: str = "bf16",
    steps: int = STEPS,
    strategy: str = "auto",
    seed: int = 0,
    ranks_per_node: int = 8,
    deadline_seconds: float | None = None,
) -> PlannedMultiplexed:
    """Map a model's modules to stages, GPUs and shares of their multiprocessors (Mosaic §3).

    Nothing is started and no weights are read::

        planned = raymm.plan_multiplexed(dag, gpus=8, device="H100", batch=256, tokens={"text": 77})
        planned                                # in a notebook: the table
        MultiplexedModule(dag, planned.mapping, ...)

    Args:
        model: encoders and a language model, or any graph of modules.
        gpus: how many GPUs there are.
        device: estimate surfaces for this device; ``"cpu"`` if there are no ``surfaces`` either.
            CPUs have no quotas.
        surfaces: measured ones, or their file.
        interference: coefficients of eq. 8, or their file; ``"bandwidth"`` (default: modules share
            the memory bandwidth, :data:`raymm.costs.scaling_estimates.BANDWIDTH_SHARES`), or
            ``"blind"``: modules never disturb each other.
        memory_gib: GiB a GPU may use; by default 0.9 of the device's memory, none on CPUs or if no
            device is named.
        batch: samples of an iteration, for estimates. Surfaces must have been measured with it.
        tokens: per module, tokens of a sample, for estimates; by default what its config says.
            Surfaces must have been measured with them.
        dtype: compute dtype of estimates.
        steps: of a GPU's quota; 10: tenths.
        strategy, seed, deadline_seconds: of :func:`raymm.scheduler.multiplex.solver.solve.solve`.
        ranks_per_node: GPUs that share a node.

    Raises:
        MultiplexError, DeviceError, LoadError: naming the argument and what is accepted; a module
            that fits no GPU.
    """
    shapes = shapes_of(model)
    spec = None if device is None else find_device(device)
    loads = None
    if surfaces is None:
        if batch is None:
            raise MultiplexError(
                "batch is not given; estimates need the samples of an iteration, at least 1"
            )
        loads = batch_workload(shapes, tokens or {}, whole(batch, "batch", 1))
    request = MappingRequest(
        gpus, spec, surfaces, interference, memory_gib, batch, dtype, steps, strategy, seed,
        ranks_per_node, deadline_seconds, tokens=tokens or None,
    )
    edges = edges_of(model, [shape.name for shape in shapes])
    return plan_shapes(shapes, edges, request, loads=loads)


def plan_shapes(
    shapes: Sequence[ModuleShape],
    edges: Sequence[tuple[str, str]],
    request: MappingRequest,
    *,
    loads: Mapping[str, Load] | None = None,
    measured: tuple[CostProfile, Mapping[str, Load]] | None = None,
    notes: Sequence[str] = (),
) -> PlannedMultiplexed:
    """:func:`plan_multiplexed` of modules of which the loads are known.

    Args:
        shapes, edges: modules and dependencies.
        request: what is asked for.
        loads: of the whole batch, for estimates.
        measured: layers that were measured on a microbatch, and its loads: estimates are made as
            much longer or shorter.
        notes: remarks to hand on.
    """
    gpus = whole(request.gpus, "gpus", 1, MOST_GPUS)
    steps = whole(request.steps, "steps", 1, MOST_STEPS)
    device, surfaces, dtype = request.device, request.surfaces, request.dtype
    notes = list(notes)
    if device is not None:
        check_steps(device.name, steps)
    if surfaces is not None:
        found, conditions = read_surfaces(surfaces, [shape.name for shape in shapes])
        notes += _check_conditions(conditions, request, loads or {})
        request = replace(request, batch=request.batch or (conditions and conditions.batch))
        source, estimated = "scaling surfaces, measured or given", False
    else:
        assert loads is not None  # see there
        spec = device or find_device(CPU)
        if device is None:
            notes.append("no device is named: costs are those of one CPU core")
        links = Links(spec.within_node, spec.across_nodes, request.ranks_per_node)
        found = tuple(
            estimated_surface(
                shape, loads[shape.name], spec, gpus=gpus, steps=steps, dtype=dtype, links=links,
                factor=1.0 if measured is None else measured_factor(
                    shape, measured[1][shape.name], measured[0].modules[shape.name], spec, dtype
                ),
            )
            for shape in shapes
        )
        source, estimated = _source(spec, dtype, measured), True
        device = spec
    if all(surface.quotas == (surface.steps,) for surface in found):
        notes.append("no quotas below a whole device are known: modules only take turns or have "
                     "devices of their own")  # fmt: skip
    known, about = _interference(request.interference, found)
    limit = _limit(device, request.memory_gib)
    _check_fits(found, gpus, limit)
    problem = MappingProblem(found, tuple(edges), gpus, steps, limit, known)
    mapping = solve(
        problem, request.strategy, seed=request.seed, deadline_seconds=request.deadline_seconds
    )
    baselines = {name: _baseline(make, problem) for name, make in BASELINES.items()}
    mapping, unfit, why = _fitting(problem, mapping, baselines)
    if why:
        notes.append(why)
    mapping = with_leftover_quota(problem, mapping)
    return PlannedMultiplexed(
        problem, mapping, baselines, source, estimated, about, request.batch, unfit, tuple(notes)
    )


def _source(
    device: DeviceSpec, dtype: str, measured: tuple[CostProfile, Mapping[str, Load]] | None
) -> str:
    if measured is not None:
        return (
            f"estimated surfaces, scaled to layers measured on {measured[0].device}, {dtype}; "
            "how they scale with GPUs and quota is not measured"
        )
    return f"estimated surfaces of {device.name}, {dtype}, from FLOPs and traffic; not measured"


def read_surfaces(
    surfaces: Sequence[ScalingSurface] | str | Path, modules: Sequence[str]
) -> tuple[tuple[ScalingSurface, ...], SurfaceConditions | None]:
    """Surfaces of these modules, in their order, given or from a file; and what they were
    measured with, if the file says so.

    Raises:
        MultiplexError: no such file, something in it is wrong, or other modules.
    """
    conditions = None
    if isinstance(surfaces, str | Path):
        file = Path(surfaces)
        if not file.is_file():
            raise MultiplexError(f"surfaces is {str(surfaces)!r}; there is no such file")
        try:
            source = read_file(file)
            surfaces, conditions = surfaces_from_json(source), conditions_from_json(source)
        except MultiplexError as error:
            raise MultiplexError(f"{file}: {error}") from None
    named = {surface.name: surface for surface in surfaces}
    if set(named) != set(modules):
        raise MultiplexError(
            f"surfaces are of {sorted(named)}; the model's modules are {sorted(modules)}"
        )
    return tuple(named[name] for name in modules), conditions


def _check_conditions(
    conditions: SurfaceConditions | None, request: MappingRequest, loads: Mapping[str, Load]
) -> list[str]:
    """Remarks on what the surfaces are of.

    Raises:
        MultiplexError: they are of something else than what is planned.
    """
    if conditions is None:
        if request.tokens:
            raise MultiplexError(
                f"tokens are {dict(request.tokens)}, but surfaces are given, which have the "
                "lengths that they were measured with, and do not say which; accepted: none"
            )
        return ["which batch, device, precision and lengths the surfaces are of is not known: "
                "they are taken to be those planned here"]  # fmt: skip
    conditions.check(request.batch, request.precision, request.tokens)
    device, measured = request.device, device_called(conditions.device)
    if device is not None and measured is not None and measured.name != device.name:
        raise MultiplexError(
            f"device is {device.name!r}, but the surfaces were measured on {conditions.device!r}; "
            f"accepted: {measured.name!r}, or none"
        )
    notes = []
    if device is not None and measured is None:
        notes.append(f"the surfaces were measured on {conditions.device}; only limits are those "
                     f"of {device.name}")  # fmt: skip
    for name, load in loads.items():
        if load.tokens != conditions.tokens.get(name, load.tokens):
            notes.append(
                f"{name} was measured with {conditions.tokens[name]} tokens per sample; this run's "
                f"have {load.tokens}, of which the surfaces say nothing"
            )
    return notes


def _interference(
    given: Interference | str | Path | None, surfaces: Sequence[ScalingSurface]
) -> tuple[Interference, str]:
    if isinstance(given, Interference):
        return given, f"as given: {_coefficients(given)}"
    name = "bandwidth" if given is None else str(given)
    if name in INTERFERENCES:
        known = INTERFERENCES[name]
        if name == "bandwidth" and not any(any(surface.bandwidth) for surface in surfaces):
            return Interference(), (
                "blind: the surfaces say nothing of bandwidth, so modules side by side are taken "
                "not to disturb each other"
            )
        if name == "blind":
            return known, "blind: modules side by side are taken not to disturb each other"
        return known, (
            "estimated from shares of the memory bandwidth (a module is delayed by its use times "
            "that of the others); not measured"
        )
    file = Path(name)
    if not file.is_file():
        raise MultiplexError(
            f"interference is {name!r}, and there is no such file; accepted: "
            f"{', '.join(INTERFERENCES)}, or a file"
        )
    try:
        known = Interference.from_json(read_file(file))
    except MultiplexError as error:
        raise MultiplexError(f"{file}: {error}") from None
    return known, f"of {file}: {_coefficients(known)}"


def _coefficients(known: Interference) -> str:
    return (
        f"e1 {known.constant:.3g}, e2 {known.additive:.3g}, e3 {known.product:.3g} "
        f"({known.unit}, {known.coupling})"
    )


def _limit(device: DeviceSpec | None, gib: float | None) -> int | None:
    if gib is not None:
        return max(1, int(number(gib, "memory_gib", 0.0, MOST_GIB, above=True) * GIB))
    if device is None or device.name not in MULTIPROCESSORS:
        return None
    return int(MEMORY_SHARE * device.memory_bytes)


def _check_fits(surfaces: Sequence[ScalingSurface], gpus: int, limit: int | None) -> None:
    if limit is None:
        return
    for surface in surfaces:
        sizes = {
            degree: size
            for degree, size in zip(surface.degrees, surface.memory_bytes, strict=True)
            if degree <= gpus
        }
        if sizes and min(sizes.values()) > limit:
            degree = min(sizes, key=lambda d: (sizes[d], d))
            raise DoesNotFitError(
                f"module {surface.name!r} fits nowhere: a replica needs at least "
                f"{sizes[degree] / GIB:.2f} GiB (with {degree} of {gpus} GPUs), and a GPU may use "
                f"{limit / GIB:.2f} GiB; a module is not cut here (`--style pipelined` does), so "
                "take more GPUs, a smaller batch, or devices with more memory"
            )


def _baseline(make, problem: MappingProblem) -> StageMapping | str:
    try:
        return make(problem)
    except MultiplexError as error:
        return str(error)


def _fitting(
    problem: MappingProblem, mapping: StageMapping, baselines: Mapping[str, StageMapping | str]
) -> tuple[StageMapping, str | None, str]:
    """The mapping if it fits over the whole iteration, else the fastest baseline that does: what
    runs, why it does not fit, and a remark."""
    too_much = _too_much(problem, mapping)
    if too_much is None:
        return mapping, None, ""
    others = [
        one for one in baselines.values()
        if isinstance(one, StageMapping) and _too_much(problem, one) is None
    ]
    if not others:
        return mapping, too_much, ""
    best = min(others, key=lambda one: one.seconds)
    # The bound is of whole modules: with slices, less is possible.
    bound = mapping.bound if best.slices == 1 else 0.0
    return (
        replace(best, bound=bound, method=f"{best.method}, as it fits"), None,
        f"the fastest mapping does not fit ({too_much}); taken is the fastest of the baselines "
        "that does",
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
