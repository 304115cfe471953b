"""Measurement of scaling surfaces, and of the interference of colocated modules (Mosaic §3.3).

T(d, a) is measured on one device with the samples of one of d replicas; the time of the gradient
all-reduce over d replicas is added from data-sheet bandwidths. Bandwidth use is the traffic that
:mod:`raymm.costs.layer_count` counts over the measured time, relative to the device's peak. It is a
lower bound, because only products are counted. CPUs have no quotas: only whole devices are
measured, without bandwidth.

On GPUs (quotas, colocations) this code has not run yet; it is written against
:mod:`raymm.actors.quota`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from raymm.actors.rank.module_profiler import ProfileRequest
from raymm.actors.rank.rank_group import START_TIMEOUT_S
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.actors.rank.surface_profiler import (
    WHOLE,
    ColocationProfiler,
    SurfaceProfiler,
    SurfaceRequest,
    SurfaceTimes,
)
from raymm.costs.load import Load
from raymm.costs.named_devices import CPU, device_called
from raymm.costs.scaling_estimates import ModuleShape, shapes_of
from raymm.costs.workload import microbatch_workload
from raymm.errors import PlanError
from raymm.layout.stage_builders import stage_builders
from raymm.model.batch_rules import complete_microbatch
from raymm.model.multimodal import MultimodalModule, text_inputs
from raymm.profiling.layers import ProfilingActor
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.costs.devices import DeviceSpec, Links, find_device
from raymm.scheduler.costs.interference import Colocation, InterferenceFit, fit_interference
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.surface import ScalingSurface, SurfaceConditions
from raymm.scheduler.multiplex.problem import STEPS
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.process_costs import all_reduce_seconds

_FP32_BYTES = 4
# Shares of the device for the modules of a group, in tenths.
PAIRS = ((5, 5), (3, 7), (7, 3))
TRIPLES = ((3, 3, 4),)


@dataclass(frozen=True)
class SurfaceProfile:
    """Result of the measurement.

    Attributes:
        colocations: of pairs and triples; empty on CPUs.
        fit: fit of eq. 8 to the colocations; None if there are too few.
    """

    surfaces: tuple[ScalingSurface, ...]
    colocations: tuple[Colocation, ...]
    fit: InterferenceFit | None
    conditions: SurfaceConditions
    notes: tuple[str, ...]


def resized_microbatch(microbatch: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return a microbatch of ``samples`` rows by repeating and cutting off a complete microbatch
    (:func:`raymm.model.batch_rules.complete_microbatch`)."""
    rows = microbatch["input_ids"].shape[0]
    indices = torch.arange(samples) % rows
    result: dict[str, Any] = {}
    for name, value in microbatch.items():
        if not isinstance(value, Mapping):
            result[name] = value[indices]
            continue
        index = value["sample_index"]
        items = [
            (int(i), copy * rows + int(index[i]))
            for copy in range(-(-samples // rows)) for i in range(len(index))
            if copy * rows + int(index[i]) < samples
        ]
        # Every module of every replica must have work.
        items = items or [(0, 0)]
        chosen = torch.tensor([i for i, _ in items])
        result[name] = {k: v[chosen] for k, v in value.items() if k != "sample_index"}
        result[name]["sample_index"] = torch.tensor([row for _, row in items])
    return result


@dataclass(frozen=True)
class SurfaceMeasurement:
    """Measurement of the scaling surface of every module on the connected Ray cluster.

    Args:
        microbatch: real microbatch with items for every encoder. Its samples are repeated or left
            out for other batch sizes.
        batch: samples per iteration.
        gpus: maximum degree. Powers of two up to it, and up to ``batch``, are measured.
        steps: steps of a GPU's quota.
        repeats: runs per measurement; the median counts.
        resources: of one rank.
        ranks_per_node: GPUs that share a node.
    """

    model: MultimodalModule
    microbatch: Mapping[str, Any]
    batch: int
    gpus: int
    steps: int = STEPS
    repeats: int = 5
    precision: str = "fp32"
    device: str = "cpu"
    resources: RankResources = RankResources()
    threads: int = 1
    ranks_per_node: int = 8

    @property
    def degrees(self) -> list[int]:
        return [1 << j for j in range(min(self.gpus, self.batch).bit_length())]

    def run(self) -> SurfaceProfile:
        """Measure all modules.

        Raises:
            PlanError: an argument is out of range, or a module failed. Names it.
            ClusterError: the cluster lacks the resources of one rank.
        """
        for name in ("batch", "gpus", "steps", "repeats"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise PlanError(f"{name} is {value!r}; it must be a whole number above 0")
        missing = [name for name in self.model.encoder_names if not self.microbatch.get(name)]
        if missing:
            raise PlanError(f"the microbatch has no items for encoder {missing[0]!r}")
        check_capacity(1, self.resources)
        microbatch = complete_microbatch(self.microbatch, self.model.encoder_names)
        return replace(self, microbatch=microbatch)._measured()

    def _measured(self) -> SurfaceProfile:
        shapes = {shape.name: shape for shape in shapes_of(self.model)}
        arguments = self._arguments()
        cuda = self.device == "cuda"
        quotas = tuple(q / self.steps for q in range(1, self.steps + 1)) if cuda else (WHOLE,)
        outputs: dict[tuple[str, int], tuple[int, ...]] = {}
        requests: dict[tuple[str, int], SurfaceRequest] = {}
        times: dict[tuple[str, int], SurfaceTimes] = {}
        name = ""
        for name, shape in shapes.items():
            with ProfilingActor(SurfaceProfiler, self.resources, arguments[name], name) as ask:
                name_of_device = ask("describe", timeout=START_TIMEOUT_S)["device"]
                for degree in self.degrees:
                    request = self._request(shape, degree, outputs, quotas)
                    surface = ask("surface", request, self.repeats)
                    outputs[name, degree] = surface.output_shape
                    requests[name, degree], times[name, degree] = request, surface
        spec = device_called(name_of_device) if cuda else find_device(CPU)
        surfaces = tuple(self._surface(shape, requests, times, spec) for shape in shapes.values())
        colocations = ()
        if cuda and len(shapes) > 1:
            colocations = self._colocations(arguments, requests, times, surfaces)
        fit = fit_interference(colocations, coupling="own") if len(colocations) >= 3 else None
        loads = microbatch_workload(self.model, self.microbatch).by_module
        conditions = SurfaceConditions(
            self.batch, name_of_device, self.precision,
            {name: loads[name].tokens for name in shapes},
        )
        return SurfaceProfile(surfaces, colocations, fit, conditions, self._notes(spec))

    def _arguments(self) -> dict[str, tuple]:
        plan = MultimodalParallelSpec(num_microbatches=1).plan(self.model)
        builders = stage_builders(self.model, plan).build
        reloadable = self.model.reloadable()
        autocast = "bfloat16" if self.precision == "bf16" else None
        return {
            name: (
                builders[StageId(name, 0)], self.device, autocast, name in reloadable, self.threads,
            )
            for name in self.model.module_names
        }

    def _request(
        self, shape: ModuleShape, degree: int, outputs: Mapping[tuple[str, int], tuple[int, ...]],
        quotas: tuple[float, ...],
    ) -> SurfaceRequest:
        local = resized_microbatch(self.microbatch, -(-self.batch // degree))
        if shape.name in self.model.encoder_names:
            return SurfaceRequest(ProfileRequest(local[shape.name], {}), False, quotas)
        received = {name: outputs[name, degree] for name in self.model.encoder_names}
        return SurfaceRequest(ProfileRequest(text_inputs(local), received), shape.before[0], quotas)

    def _surface(
        self, shape: ModuleShape, requests: Mapping[tuple[str, int], SurfaceRequest],
        times: Mapping[tuple[str, int], SurfaceTimes], spec: DeviceSpec | None,
    ) -> ScalingSurface:
        parameters = shape.layers(Load(1, 1), find_device(CPU), "fp32")
        trained = math.fsum(
            c.parameter_bytes for c, t in zip(parameters, shape.trainable, strict=True) if t
        )
        profile = CostProfile({}, dtype=self.precision)
        state = sum(
            profile.state_bytes(c, t) for c, t in zip(parameters, shape.trainable, strict=True)
        )
        first = times[shape.name, 1].seconds
        quotas = tuple(q for q in range(1, self.steps + 1) if q / self.steps in first)
        links = spec and Links(spec.within_node, spec.across_nodes, self.ranks_per_node)

        def reduction(degree: int) -> float:
            link = links and links.between(range(degree))
            return all_reduce_seconds(trained, degree, link)

        return ScalingSurface(
            shape.name, tuple(self.degrees), quotas, self.steps,
            tuple(
                tuple(times[shape.name, d].seconds[q / self.steps] + reduction(d) for q in quotas)
                for d in self.degrees
            ),
            tuple(
                state + sum(
                    saved_bytes for saved_bytes, t, b in zip(
                        times[shape.name, d].activation_bytes, shape.trainable, shape.before,
                        strict=True,
                    ) if t or b
                )
                for d in self.degrees
            ),
            self._bandwidth(shape, requests[shape.name, 1], times[shape.name, 1], quotas, spec),
        )

    def _bandwidth(
        self, shape: ModuleShape, request: SurfaceRequest, times: SurfaceTimes,
        quotas: tuple[int, ...], spec: DeviceSpec | None,
    ) -> tuple[float, ...]:
        """Return counted traffic over measured time, relative to the peak; 0 for unknown peaks."""
        if spec is None or self.device != "cuda":
            return (0.0,) * len(quotas)
        traffic_only = replace(spec, flops={name: 1e30 for name in spec.flops})
        if shape.name == self.model.text_module:
            rows, tokens = request.request.inputs["input_ids"].shape
            received = sum(math.prod(s[:2]) for s in request.request.received.values())
            load = Load(rows, tokens + received // rows)
        else:
            rows, tokens = times.output_shape[:2]
            load = Load(rows, tokens)
        seconds = shape.seconds(shape.layers(load, traffic_only, self.precision))
        return tuple(min(1.0, seconds / times.seconds[q / self.steps]) for q in quotas)

    def _colocations(
        self, arguments: Mapping[str, tuple], requests: Mapping[tuple[str, int], SurfaceRequest],
        times: Mapping[tuple[str, int], SurfaceTimes], surfaces: tuple[ScalingSurface, ...],
    ) -> tuple[Colocation, ...]:
        """Measure with the fewest samples per GPU, so that the modules fit into memory together."""
        degree = self.degrees[-1]
        by_name = {surface.name: surface for surface in surfaces}
        groups, expected = [], []
        for size, shares in ((2, PAIRS), (3, TRIPLES)):
            for names in itertools.combinations(by_name, size):
                for tenths in shares:
                    steps = [round(t * self.steps / 10) for t in tenths]
                    all_measured = all(
                        q in by_name[n].quotas for n, q in zip(names, steps, strict=True)
                    )
                    if all_measured and sum(steps) <= self.steps:
                        group = dict(zip(names, (q / self.steps for q in steps), strict=True))
                        groups.append(group)
                        expected.append({n: times[n, degree].seconds[q] for n, q in group.items()})
        with ProfilingActor(ColocationProfiler, self.resources, (arguments,), "colocations") as ask:
            group_requests = {name: requests[name, degree] for name in by_name}
            measured = ask("colocated_times", group_requests, groups, expected)
        colocations = []
        for group, seconds in zip(groups, measured, strict=True):
            use = {n: by_name[n].bandwidth_at(round(q * self.steps)) for n, q in group.items()}
            for name in group:
                neighbor_uses = [use[neighbor] for neighbor in group if neighbor != name]
                module_times = seconds[name]
                uses = ((use[name], *neighbor_uses),)
                colocations.append(Colocation(module_times.alone, uses, module_times.colocated))
        return tuple(colocations)

    def _notes(self, spec: DeviceSpec | None) -> tuple[str, ...]:
        notes = []
        if len(self.degrees) > 1:
            links = spec and f"{spec.name}'s links ({spec.within_node.bandwidth / 1e9:g} GB/s)"
            notes.append(
                "one device was measured, with the samples of each replica; gradient all-reduces "
                + (f"are estimated from {links}" if links else "are left out: links are unknown")
            )
        if self.device != "cuda":
            notes.append(
                "CPUs have no quotas: only whole devices are measured, without bandwidth "
                "use and colocations, so interference is unknown"
            )
            return tuple(notes)
        notes.append("quotas are granted in whole groups of multiprocessors: each measurement "
                     "used the number of groups nearest to its quota")  # fmt: skip
        notes.append(
            "bandwidth use is unknown: the device is not in raymm's table" if spec is None else
            f"bandwidth use: counted traffic of products and attention over measured time, of the "
            f"{spec.name}'s {spec.memory_bandwidth / 1e9:g} GB/s; a lower bound"
        )
        return tuple(notes)
