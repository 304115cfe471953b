"""Everything that a mapping follows from: surfaces, limits and interference of a model's modules.

The solver's limit on memory is of one stage at a time, and so is what is refused here.
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
    check_steps,
    estimated_surface,
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

MOST_GIB = 2**30  # bytes then fit into a word
COUNTED_SHARE = 0.9
"""Of what a GPU has for plans, for what mappings count: weights, their state and activations. The
rest is for communicators, workspaces and fragments, which pipelines count one by one."""
INTERFERENCES = {"bandwidth": BANDWIDTH_SHARES, "blind": Interference()}


@dataclass(frozen=True)
class MappedBatch:
    """The work that modules are mapped for: what runs at once.

    Attributes:
        samples: of the whole batch; None: surfaces say, or nobody.
        dtype: compute dtype of estimates.
        precision: that surfaces must have been measured with; None: whatever it was.
        loads: of the whole batch by module, for estimates.
        measured: layers that were measured on a microbatch, and its loads: estimates are made as
            much longer or shorter.
        microbatches: of a step, of which this is one.
    """

    samples: int | None = None
    dtype: str = "bf16"
    precision: str | None = None
    loads: Mapping[str, Load] | None = None
    measured: tuple[CostProfile, Mapping[str, Load]] | None = None
    microbatches: int = 1


@dataclass(frozen=True)
class MappingInputs:
    """What a search for a mapping is told, and what a person should know of it.

    Attributes:
        problem: surfaces, dependencies, GPUs, memory, interference.
        request: solver, seed and deadline.
        source: where the times come from, in words.
        estimated: whether they are estimates, not measurements.
        interference: what is known of modules disturbing each other, in words.
        batch: samples of an iteration; None if nobody said.
        notes: remarks a person should see.
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
    """The inputs of a request.

    Args:
        shapes, edges: modules and dependencies.
        request: what is asked for; its ``ranks`` are GPUs, and must be known.
        batch: what runs at once.
        device: that estimates and limits are of; without surfaces, one CPU core by default.
        notes: remarks to hand on.

    Raises:
        PlanError: naming the field and what is accepted.
        NoPlanError: a module that fits no GPU.
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
    interference, about = _interference(request.interference, surfaces)
    limit = _limit(device, request.memory_gib)
    _check_fits(surfaces, gpus, limit)
    problem = MappingProblem(surfaces, tuple(edges), gpus, steps, limit, interference)
    return MappingInputs(problem, request, source, estimated, about, samples, tuple(remarks))


def _estimates(
    shapes: Sequence[ModuleShape], batch: MappedBatch, device: DeviceSpec, gpus: int, steps: int,
    ranks_per_node: int,
) -> tuple[ScalingSurface, ...]:
    assert batch.loads is not None  # see there
    links = Links(device.within_node, device.across_nodes, ranks_per_node)
    measured, dtype = batch.measured, batch.dtype
    return tuple(
        estimated_surface(
            shape, batch.loads[shape.name], device, gpus=gpus, steps=steps, dtype=dtype,
            links=links, sums=1 / batch.microbatches,
            factor=1.0 if measured is None else measured_factor(
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
    """Surfaces of these modules, in their order, given or from a file; and what they were
    measured with, if the file says so.

    Raises:
        PlanError: no such file, something in it is wrong, or other modules.
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
    """Remarks on what the surfaces are of.

    Raises:
        PlanError: they are of something else than what is planned.
    """
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
