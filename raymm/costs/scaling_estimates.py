"""Estimated scaling surfaces from a model's FLOPs and traffic, before any measurement.

For each data-parallel degree d a module's layers are counted on the samples of one GPU
(:mod:`raymm.costs.analytic`), so weights are read as often as in a run. For each quota a:

- A module whose products fill the device takes exactly the time of :mod:`raymm.costs.analytic` on
  all multiprocessors. The split into arithmetic and traffic comes from the same counts
  (:class:`raymm.scheduler.multiplex.roofline.ModuleWork` combines the two).
- Arithmetic takes longer with fewer multiprocessors. A module uses at most as many of them as its
  average product has tiles of :data:`TILE` x :data:`TILE` outputs, even on a full device, so small
  encoders gain little from one. :func:`filled_profile` applies the same rule to the layer costs of
  pipelines.
- A share of :attr:`ModuleWork.saturation` of the multiprocessors reaches the full memory bandwidth.
- Gradients are all-reduced over the d replicas by a ring over the device's links, and are not
  hidden behind the backward.

Not counted: kernel launches, the optimizer, messages between modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from raymm.actors.quota import Multiprocessors
from raymm.costs.analytic import analytic_layers, projector_layers
from raymm.costs.layer_count import count_layers
from raymm.costs.load import Load, default_tokens
from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.scheduler.costs.devices import DeviceSpec, Links
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.roofline import RIDGE, ModuleWork
from raymm.scheduler.schedule.process_costs import all_reduce_seconds, stage_layers

# Side of the output tile of a matrix product that one multiprocessor computes at a time, as usual
# for cuBLAS's kernels on large products.
TILE = 128
# A rate that is infinite in practice and leaves only the other side of a roofline.
_NO_TIME = 1e30
# Time of a module without counted work, since a surface needs one.
_LEAST_SECONDS = 1e-9

# Multiprocessors, and the granularity of their partition: NVIDIA's data sheets, and the CUDA
# programming guide on green contexts (compute capability 8: at least 4; 9: groups of 8).
MULTIPROCESSORS: Mapping[str, Multiprocessors] = {
    "A40": Multiprocessors(84, 4),
    "A100-40GB": Multiprocessors(108, 4),
    "A100-80GB": Multiprocessors(108, 4),
    "H100": Multiprocessors(132, 8),
    "H200": Multiprocessors(132, 8),
    "L4": Multiprocessors(58, 4),
    "RTX4090": Multiprocessors(128, 4),
}

# Module m uses the bus for a share B(m) of its time, and the other modules for a share R, the sum
# of theirs. Where both use it, m's transfers take 1 + R as long, which delays m by B(m) * R of its
# time. This is eq. 8 of Mosaic with e3 = 1, for two modules. It is not measured.
BANDWIDTH_SHARES = Interference(product=1.0, unit="relative", coupling="own")


@dataclass(frozen=True)
class ModuleShape:
    """Properties of a module that estimates need; no weights.

    Attributes:
        projector: skeleton of an encoder's projector, its last layer.
        causal: True for a causal language model with head and loss.
        trainable: by layer.
        before: by layer, True if an earlier layer is trained, so that there is a B_d.
    """

    name: str
    module: nn.Module
    projector: nn.Module | None
    causal: bool
    trainable: tuple[bool, ...]
    before: tuple[bool, ...]

    def layers(self, load: Load, device: DeviceSpec, dtype: str) -> tuple[LayerCost, ...]:
        """Return the costs of the module's layers; see
        :func:`raymm.costs.analytic.analytic_profile`."""
        layers = analytic_layers(self.module, load, device, dtype, causal=self.causal)
        if self.projector is not None:
            layers += projector_layers(self.projector, load, device, dtype)
        return stage_layers(layers, 0, len(layers))

    def seconds(self, layers: Sequence[LayerCost]) -> float:
        """Return the seconds of forward and backward, where frozen layers have no B_w."""
        return math.fsum(
            cost.forward + cost.backward_input * earlier + cost.backward_weight * trained
            for cost, trained, earlier in zip(layers, self.trainable, self.before, strict=True)
        )

    def tiles(self, load: Load) -> float:
        """Return the output tiles of the average product of the module's layers."""
        elements = math.fsum(count.product_elements for count in count_layers(
            self.module, load, self.causal
        ))
        products = [
            p for m in self.module.modules() if not isinstance(m, nn.Embedding)
            for p in m._parameters.values() if p is not None and p.dim() > 1
        ]
        return max(1.0, elements / max(1, len(products)) / TILE**2)


def shapes_of(model: Model) -> tuple[ModuleShape, ...]:
    """Return the modules of a model that are mapped. Losses without weight matrices (such as
    contrastive losses) are not; they run with their inputs."""
    shapes: list[ModuleShape] = []
    trained: dict[str, bool] = {}
    for name in model.graph.topological:
        node, spec = model.graph.node(name), model.spec(name)
        skeleton, projector = spec.source.skeleton(), getattr(spec, "projector", None)
        earlier = any(trained[producer] for producer in model.graph.producers(name))
        trained[name] = earlier or any(node.trainable)
        if not node.loss or any(p.dim() > 1 for p in skeleton.parameters()):
            shapes.append(ModuleShape(
                name, skeleton, projector and projector.skeleton(),
                model.module(name).causal or _is_language_model(skeleton), node.trainable,
                _before(node.trainable, earlier),
            ))
    return tuple(shapes)


def edges_of(model: Model, modules: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the (producer, consumer) pairs between these modules."""
    return tuple((a, b) for a, b in model.graph.edges if a in modules and b in modules)


def _is_language_model(module: nn.Module) -> bool:
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return head is not None and "CausalLM" in type(module).__name__


def _before(trainable: Sequence[bool], earlier: bool) -> tuple[bool, ...]:
    return tuple(earlier or any(trainable[:index]) for index in range(len(trainable)))


def batch_workload(
    shapes: Sequence[ModuleShape], tokens: Mapping[str, int], batch: int
) -> dict[str, Load]:
    """Return the loads of a batch with one item per sample. ``tokens`` are per item; the default is
    from an encoder's config. Raises PlanError for an unknown module, a number below 1, or an
    unknown length."""
    names = [shape.name for shape in shapes]
    for name in tokens:
        if name not in names:
            raise PlanError(f"tokens name {name!r}; the model's modules are {', '.join(names)}")
    workload = {}
    for shape in shapes:
        item_tokens = tokens.get(shape.name)
        if item_tokens is None:
            try:
                item_tokens = default_tokens(shape.module)
            except PlanError as error:
                raise PlanError(f"tokens of {shape.name!r} are not given: {error}") from None
        workload[shape.name] = Load(batch, item_tokens)
    return workload


def local_load(load: Load, parts: int) -> Load:
    """Return the largest of ``parts`` equal parts of a load."""
    samples = -(-load.samples // parts)
    labels = None if load.labels is None else min(-(-load.labels // parts), samples * load.tokens)
    return Load(samples, load.tokens, labels)


@dataclass(frozen=True)
class SurfaceEstimates:
    """Estimates of modules' surfaces on a device, at powers of two of the GPUs that have a sample
    each.

    Args:
        device: CPUs have no quotas: their only quota is the whole device.
        steps: resolution of quotas.
        links: links of the gradient all-reduce; None for no cost.
        sums: share of the gradient all-reduce in the seconds; below 1 for one of several
            microbatches.
    """

    device: DeviceSpec
    gpus: int
    steps: int
    dtype: str = "bf16"
    links: Links | None = None
    sums: float = 1.0

    def surface(self, shape: ModuleShape, load: Load, factor: float = 1.0) -> ScalingSurface:
        """Return a module's surface, with all times multiplied by ``factor``, such as measured over
        estimated time. Raise a ``PlanError`` if the device has no rate for the dtype, or cannot
        partition itself into such steps."""
        device, steps, links = self.device, self.steps, self.links
        check_steps(device.name, steps)
        degrees = [1 << j for j in range(min(self.gpus, load.samples).bit_length())]
        works = [_work(shape, local_load(load, d), device, self.dtype, factor) for d in degrees]
        layout = MULTIPROCESSORS.get(device.name)
        quotas = tuple(range(1, steps + 1)) if layout else (steps,)
        layers = shape.layers(local_load(load, 1), device, self.dtype)
        reduced = math.fsum(
            cost.trained_bytes
            for cost, trained in zip(layers, shape.trainable, strict=True) if trained
        )
        sums = [
            self.sums * all_reduce_seconds(reduced, d, links.between(range(d))) if links else 0.0
            for d in degrees
        ]
        return ScalingSurface(
            shape.name, tuple(degrees), quotas, steps,
            tuple(
                tuple(work.seconds(1, q / steps) + seconds for q in quotas)
                for work, seconds in zip(works, sums, strict=True)
            ),
            tuple(work.state_bytes + work.activation_bytes for work in works),
            tuple(works[0].bandwidth(q / steps) for q in quotas),
        )


def filled_profile(
    profile: CostProfile, shapes: Sequence[ModuleShape], loads: Mapping[str, Load],
    device: DeviceSpec,
) -> CostProfile:
    """Return an analytic profile in which modules too small to fill the device take longer, as in
    :class:`SurfaceEstimates`. ``profile`` and ``loads`` are of the same microbatch."""
    layers = dict(profile.modules)
    for shape in shapes:
        slower = _work(shape, loads[shape.name], device, profile.dtype, 1.0).seconds(1, 1.0)
        slower /= shape.seconds(shape.layers(loads[shape.name], device, profile.dtype))
        layers[shape.name] = slowed_layers(layers[shape.name], slower)
    return replace(profile, modules=layers)


def slowed_layers(layers: Sequence[LayerCost], factor: float) -> tuple[LayerCost, ...]:
    """Return layers that take ``factor`` times as long."""
    return tuple(
        replace(
            cost, forward=cost.forward * factor, backward_input=cost.backward_input * factor,
            backward_weight=cost.backward_weight * factor,
            options=tuple(
                option._replace(seconds=option.seconds * factor) for option in cost.options
            ),
        )
        for cost in layers
    )


def measured_factor(
    shape: ModuleShape, load: Load, measured: Sequence[LayerCost], device: DeviceSpec, dtype: str
) -> float:
    """Return the time of measured layers divided by the estimate for the same load."""
    return shape.seconds(measured) / _work(shape, load, device, dtype, 1.0).seconds(1, 1.0)


def check_steps(device: str, steps: int) -> None:
    """Raise a PlanError if a step of a quota is smaller than the device's granularity."""
    layout = MULTIPROCESSORS.get(device)
    if layout is not None and 1 / steps < layout.smallest_quota:
        raise PlanError(
            f"steps is {steps}: a step of quota would be {layout.total / steps:.1f} of the "
            f"{layout.total} multiprocessors of {device}, which sets {layout.granularity} apart at "
            f"a time; accepted: 1 to {layout.groups}"
        )


def _work(
    shape: ModuleShape, load: Load, device: DeviceSpec, dtype: str, factor: float
) -> ModuleWork:
    """Return the work of one GPU's samples."""
    layers = shape.layers(load, device, dtype)
    compute = shape.seconds(shape.layers(load, replace(device, memory_bandwidth=_NO_TIME), dtype))
    no_flops = {name: _NO_TIME for name in device.flops}
    memory = shape.seconds(shape.layers(load, replace(device, flops=no_flops), dtype))
    # Each layer takes the larger of the two; the surface's smooth ridge must not add to that.
    compute, memory = max(compute, _LEAST_SECONDS), max(memory, _LEAST_SECONDS)
    ridge = (compute**RIDGE + memory**RIDGE) ** (1 / RIDGE)
    scale = factor * max(shape.seconds(layers), _LEAST_SECONDS) / ridge
    layout = MULTIPROCESSORS.get(device.name)
    profile = CostProfile({shape.name: layers}, device.name, dtype)
    flags = list(zip(layers, shape.trainable, shape.before, strict=True))
    return ModuleWork(
        shape.name, compute * scale, memory * scale,
        parallel=1.0 if layout is None else min(1.0, shape.tiles(load) / layout.total),
        state_bytes=sum(profile.state_bytes(cost, trained) for cost, trained, _ in flags),
        activation_bytes=sum(
            cost.activation_bytes for cost, trained, earlier in flags if trained or earlier
        ),
    )
