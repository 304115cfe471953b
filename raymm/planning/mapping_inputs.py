"""Inputs of a search for a multiplexed mapping: surfaces, limits and interference of modules.

The solver limits the memory of one stage at a time, and so does the check here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymm.costs.load import Load
from raymm.costs.named_devices import CPU, device_called
from raymm.costs.scaling_estimates import (
    BANDWIDTH_SHARES,
    MULTIPROCESSORS,
    ModuleShape,
    SurfaceEstimates,
    check_steps,
    measured_factor,
)
from raymm.errors import NoPlanError, PlanError
from raymm.planning.request import PlanRequest
from raymm.scheduler.costs.device_memory import usable_bytes
from raymm.scheduler.costs.devices import DeviceSpec, Links, find_device
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.surface import (
    ScalingSurface,
    SurfaceConditions,
    conditions_from_json,
    surfaces_from_json,
)
from raymm.scheduler.graph.strict_json import MOST_GPUS, MOST_STEPS, number, read_file, whole
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.schedule.memory import GIB

MOST_GIB = 2**30  # the bytes fit into 64 bits
COUNTED_SHARE = 0.9
"""Share of a GPU's usable memory that mappings count: weights, optimizer state and activations. The
rest is for communicators, workspaces and fragmentation, which pipelines count separately."""
INTERFERENCES = {"bandwidth": BANDWIDTH_SHARES, "blind": Interference()}


@dataclass(frozen=True)
class MappedBatch:
    """The work that runs at once in a mapping.

    Attributes:
        samples: None to take them from the surfaces, if those record them.
        dtype: compute dtype of estimates.
        precision: dtype that surfaces must have been measured with; None accepts any.
        loads: load of the batch by module, for estimates.
        measured: measured layers and their loads; estimates are scaled to them.
        microbatches: number of such batches in a step.
    """

    samples: int | None = None
    dtype: str = "bf16"
    precision: str | None = None
    loads: Mapping[str, Load] | None = None
    measured: tuple[CostProfile, Mapping[str, Load]] | None = None
    microbatches: int = 1


@dataclass(frozen=True)
class MappingInputs:
    """Inputs of a search for a mapping, and remarks on them.

    Attributes:
        source: description of the source of the times.
        estimated: True if the times are estimates rather than measurements.
        interference: description of the interference model.
        batch: samples of an iteration; None if unknown.
    """

    problem: MappingProblem
    request: PlanRequest
    source: str
    estimated: bool
    interference: str
    batch: int | None = None
    notes: tuple[str, ...] = ()


def mapping_inputs(
    shapes: Sequence[ModuleShape],
    edges: Sequence[tuple[str, str]],
    request: PlanRequest,
    batch: MappedBatch,
    device: DeviceSpec | None = None,
    notes: Sequence[str] = (),
) -> MappingInputs:
    """Build the inputs of a request whose ``ranks`` (GPUs) are set. ``edges`` are (producer,
    reader). Without surfaces, the device defaults to one CPU core.

    Raises:
        PlanError: names the field and what is accepted.
        NoPlanError: a module fits on no GPU.
    """
    gpus = whole(request.ranks, "gpus", 1, MOST_GPUS)
    steps = whole(request.quota_steps, "steps", 1, MOST_STEPS)
    remarks = list(notes)
    if device is not None:
        check_steps(device.name, steps)
    samples, estimated = batch.samples, request.surfaces is None
    if request.surfaces is not None:
        surfaces, conditions = read_surfaces(request.surfaces, [shape.name for shape in shapes])
        remarks += _check_conditions(conditions, request, batch, device)
        samples = samples or (conditions.batch if conditions else None)
        source = "scaling surfaces, measured or given"
    else:
        if device is None:
            device = find_device(CPU)
            remarks.append("no device is named: costs are those of one CPU core")
        surfaces = _estimates(shapes, batch, device, gpus, steps, request.ranks_per_node)
        source = _source(device, batch)
    if all(surface.quotas == (surface.steps,) for surface in surfaces):
        remarks.append("no quotas below a full device are known: modules take turns or get "
                       "separate devices")  # fmt: skip
    interference, assumption = _interference(request.interference, surfaces)
    limit = _limit(device, request.memory_gib)
    _check_fits(surfaces, gpus, limit)
    problem = MappingProblem(surfaces, tuple(edges), gpus, steps, limit, interference)
    return MappingInputs(problem, request, source, estimated, assumption, samples, tuple(remarks))


def _estimates(
    shapes: Sequence[ModuleShape], batch: MappedBatch, device: DeviceSpec, gpus: int, steps: int,
    ranks_per_node: int,
) -> tuple[ScalingSurface, ...]:
    assert batch.loads is not None  # required by estimates
    links = Links(device.within_node, device.across_nodes, ranks_per_node)
    measured, dtype = batch.measured, batch.dtype
    estimates = SurfaceEstimates(device, gpus, steps, dtype, links, sums=1 / batch.microbatches)
    return tuple(
        estimates.surface(
            shape, batch.loads[shape.name], 1.0 if measured is None else measured_factor(
                shape, measured[1][shape.name], measured[0].modules[shape.name], device, dtype
            ),
        )
        for shape in shapes
    )


def _source(device: DeviceSpec, batch: MappedBatch) -> str:
    if batch.measured is not None:
        return (
            f"estimated surfaces, scaled to layers measured on {batch.measured[0].device}, "
            f"{batch.dtype}; how they scale with GPUs and quota is not measured"
        )
    return (
        f"estimated surfaces of {device.name}, {batch.dtype}, from FLOPs and traffic; not measured"
    )


def read_surfaces(
    surfaces: Sequence[ScalingSurface] | str | Path, modules: Sequence[str]
) -> tuple[tuple[ScalingSurface, ...], SurfaceConditions | None]:
    """Return the surfaces of modules in the given order, from a file if ``surfaces`` is its path,
    and the conditions of their measurement, if the file records them.

    Raises:
        PlanError: the file does not exist or is invalid, or the surfaces are of other modules.
    """
    conditions = None
    if isinstance(surfaces, str | Path):
        file = Path(surfaces)
        if not file.is_file():
            raise PlanError(f"surfaces is {str(surfaces)!r}; there is no such file")
        try:
            source = read_file(file)
            surfaces, conditions = surfaces_from_json(source), conditions_from_json(source)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None
    named = {surface.name: surface for surface in surfaces}
    if set(named) != set(modules):
        raise PlanError(
            f"surfaces are of {sorted(named)}; the model's modules are {sorted(modules)}"
        )
    return tuple(named[name] for name in modules), conditions


def _check_conditions(
    conditions: SurfaceConditions | None, request: PlanRequest, batch: MappedBatch,
    device: DeviceSpec | None,
) -> list[str]:
    """Return remarks on the conditions of surfaces. Raises PlanError if they differ from the
    plan's."""
    if conditions is None:
        if request.tokens:
            raise PlanError(
                f"tokens is {dict(request.tokens)}, but the given surfaces do not record the "
                "lengths that they were measured with; accepted: no tokens"
            )
        return ["the surfaces do not record their batch, device, precision and lengths: those of "
                "this plan are assumed"]  # fmt: skip
    conditions.check(batch.samples, batch.precision, request.tokens or None)
    measured = device_called(conditions.device)
    if device is not None and measured is not None and measured.name != device.name:
        raise PlanError(
            f"device is {device.name!r}, but the surfaces were measured on {conditions.device!r}; "
            f"accepted: {measured.name!r}, or none"
        )
    notes = []
    if device is not None and measured is None:
        notes.append(f"the surfaces were measured on {conditions.device}; only the limits are "
                     f"taken from {device.name}")  # fmt: skip
    for name, load in (batch.loads or {}).items():
        if load.tokens != conditions.tokens.get(name, load.tokens):
            notes.append(
                f"{name} was measured with {conditions.tokens[name]} tokens per sample; this run "
                f"has {load.tokens}, which the surfaces do not cover"
            )
    return notes


def _interference(
    choice: Interference | str | Path | None, surfaces: Sequence[ScalingSurface]
) -> tuple[Interference, str]:
    if isinstance(choice, Interference):
        return choice, f"as given: {_coefficients(choice)}"
    name = "bandwidth" if choice is None else str(choice)
    if name in INTERFERENCES:
        interference = INTERFERENCES[name]
        if name == "bandwidth" and not any(any(surface.bandwidth) for surface in surfaces):
            return Interference(), (
                "blind: the surfaces have no bandwidth data, so modules side by side are assumed "
                "not to interfere"
            )
        if name == "blind":
            return interference, "blind: modules side by side are assumed not to interfere"
        return interference, (
            "estimated from shares of the memory bandwidth (a module is delayed by its use times "
            "that of the others); not measured"
        )
    file = Path(name)
    if not file.is_file():
        raise PlanError(
            f"interference is {name!r}, which is not an existing file; accepted: "
            f"{', '.join(INTERFERENCES)}, or a file"
        )
    try:
        interference = Interference.from_json(read_file(file))
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return interference, f"of {file}: {_coefficients(interference)}"


def _coefficients(interference: Interference) -> str:
    return (
        f"e1 {interference.constant:.3g}, e2 {interference.additive:.3g}, "
        f"e3 {interference.product:.3g} ({interference.unit}, {interference.coupling})"
    )


def _limit(device: DeviceSpec | None, gib: float | None) -> int | None:
    if gib is not None:
        return max(1, int(number(gib, "memory_gib", 0.0, MOST_GIB, above=True) * GIB))
    if device is None or device.name not in MULTIPROCESSORS:
        return None
    return int(COUNTED_SHARE * usable_bytes(device))


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
            raise NoPlanError(
                f"module {surface.name!r} fits on no GPU: a replica needs at least "
                f"{sizes[degree] / GIB:.2f} GiB (with {degree} of {gpus} GPUs), and a GPU may use "
                f"{limit / GIB:.2f} GiB; multiplexed plans do not cut modules: use --style "
                "pipelined, more GPUs, a smaller batch, or devices with more memory"
            )
