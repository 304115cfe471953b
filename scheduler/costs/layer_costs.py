"""Costs of a layer, and the frozen rules: the part of them that a training step incurs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from raymm.errors import PlanError
from raymm.plural import plural
from raymm.scheduler.costs.device_memory import compute_copy_share
from raymm.scheduler.costs.devices import Links
from raymm.scheduler.costs.recomputation import (
    KEEP,
    OPTIONS,
    LayerBytes,
    LayerOption,
    remade_bytes,
)
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.graph.strict_json import json_value

PROFILE_FORMAT = 1
# AdamW keeps a gradient and two moments per trainable weight, all in fp32.
TRAINED_COPIES = 4
MOMENTS = 2
QUANTISED_SHARE = 0.25  # of an element's fp32 bytes


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer for one microbatch, as if all its parameters except weights under adapters
    were trainable. Sizes are 0 if unknown.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of B_d, the gradient of the layer's input.
        backward_weight: seconds of B_w, the gradient of its parameters.
        activation_bytes: memory that autograd keeps from forward to backward.
        parameter_bytes: parameters in fp32.
        replicated_bytes: part of ``parameter_bytes`` that tensor parallelism does not shard (norms,
            convolutions, positions).
        key_value_bytes: keys and values of its attention in the compute dtype.
        working_bytes: peak of temporary memory of a forward or backward, beyond the output and the
            activations that this and earlier layers keep; mostly intermediate gradients.
        forward_bytes: peak of a forward that keeps nothing, including its input.
        data_bytes: data of a microbatch that the layer reads; on the device for the whole step.
        base_bytes: part of ``parameter_bytes`` that is frozen even if the layer is trained: weights
            under adapters.
        quantised: fraction of ``base_bytes`` that has one byte per element in any compute dtype.
        moments: optimizer state per trained parameter, in fp32 numbers: 2 for AdamW.
        expert_bytes: part of ``parameter_bytes`` that expert parallelism shards.
        exchange_bytes: tokens sent to experts of other processes and back in a forward, if all
            tokens went to other processes.
        few_bytes, few_heads: part of ``parameter_bytes`` that at most ``few_heads`` processes can
            shard: keys and values with fewer heads than queries.
        tied_bytes: part of the last layer's ``parameter_bytes`` that is tied to the first layer; a
            stage with both layers holds it once.
        in_bf16: fraction of the trained parameters kept in bf16, with their gradients.
        copied: fraction of them with a copy in the compute dtype, if that is not fp32.
        options: other activation handling: seconds added to a forward and backward, and the bytes
            that replace ``activation_bytes`` and ``working_bytes``.
        halved: memory per process if two processes split the layer's parameters; None if unknown.
    """

    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    replicated_bytes: int = 0
    key_value_bytes: int = 0
    working_bytes: int = 0
    forward_bytes: int = 0
    data_bytes: int = 0
    base_bytes: int = 0
    moments: float = MOMENTS
    in_bf16: float = 0.0
    copied: float = 1.0
    quantised: float = 0.0
    expert_bytes: int = 0
    exchange_bytes: int = 0
    few_bytes: int = 0
    few_heads: int = 0
    tied_bytes: int = 0
    options: tuple[LayerOption, ...] = ()
    halved: LayerBytes | None = None

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in NUMBERS}
        for name, seconds, nbytes, working in self.options:
            if name not in OPTIONS or name == KEEP:
                raise PlanError(
                    f"options have {name!r}; accepted: {', '.join(OPTIONS[1:])}"
                )
            numbers |= {f"seconds of {name!r}": seconds, f"bytes of {name!r}": nbytes}
            numbers[f"working bytes of {name!r}"] = working or 0
        for name, value in numbers.items():
            if not 0 <= value < math.inf:  # NaN fails too
                raise PlanError(f"{name} is {value}; it must be at least 0 and finite")
        for name in ("replicated_bytes", "base_bytes", "expert_bytes", "few_bytes", "tied_bytes"):
            if getattr(self, name) > self.parameter_bytes:
                raise PlanError(
                    f"{name} is {getattr(self, name)}; it must be at most "
                    f"parameter_bytes={self.parameter_bytes}"
                )

    @property
    def trained_bytes(self) -> int:
        """Part of ``parameter_bytes`` that has gradients if the layer is trained."""
        return self.parameter_bytes - self.base_bytes

    @property
    def choices(self) -> tuple[LayerOption, ...]:
        """All ways to handle the activations; keeping them is the first."""
        keep = LayerOption(KEEP, 0.0, self.activation_bytes, self.working_bytes)
        return (keep, *self.options)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerCost:
        """Return the cost of a dict made by ``asdict``, also from JSON; raise ``TypeError`` for an
        unknown key or a value of the wrong type."""
        options = tuple(LayerOption(*option) for option in data.get("options", ()))
        halved = data.get("halved")
        halved = None if halved is None else LayerBytes.from_list(halved)
        return cls(**{**data, "options": options, "halved": halved})


def working_bytes(layer: LayerCost | LayerBytes, option: LayerOption) -> int:
    """Return the temporary bytes of a layer with an option, beyond what the layer keeps with it.
    Without a measurement, this is the sum of recomputed or fetched activations and the layer's
    usual temporary memory, although both need not exist at the same time."""
    if option.working_bytes is not None:
        return option.working_bytes
    return remade_bytes(option, layer.activation_bytes) + layer.working_bytes


NUMBERS = tuple(e.name for e in fields(LayerCost) if e.name not in ("options", "halved"))
"""Numeric fields of :class:`LayerCost`."""


@dataclass(frozen=True)
class CostProfile:
    """Costs of every layer of a model for one kind of microbatch.

    Attributes:
        modules: one :class:`LayerCost` per layer of the module graph, by module.
        device: device that was measured or is planned for.
        dtype: compute dtype, ``"fp32"`` or ``"bf16"``; frozen weights are kept in it.
        source: ``"measured"`` or ``"analytic"``.
        tokens: tokens of the microbatch, by module.
        versions: versions of the packages that were measured.
        links: links within ranks and between replicas; None if this communication takes no time.
        ports: bytes of the ports that layers read, by consumer and name.
        sharing: effect of fewer samples, quotas and colocated modules on seconds. If None, time is
            inversely proportional to the number of devices and the quota.
        fixed: fraction of a module's seconds for this microbatch that a forward or backward takes
            for any number of items (kernel launches), by module; 0 where missing.
    """

    modules: Mapping[str, tuple[LayerCost, ...]]
    device: str = "unknown"
    dtype: str = "fp32"
    source: str = "analytic"
    tokens: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    links: Links | None = None
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sharing: DeviceSharing | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, fraction in self.fixed.items():
            if not 0 <= fraction <= 1:  # NaN fails too
                raise PlanError(f"fixed of {name!r} is {fraction}; accepted: 0 to 1")
        if self.dtype not in ("fp32", "bf16"):
            raise PlanError(f"dtype is {self.dtype!r}; accepted: fp32, bf16")

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    def port_bytes(self, consumer: str, name: str) -> int | None:
        """Return the bytes of a port, or None if unknown."""
        return self.ports.get(consumer, {}).get(name)

    def state_share(
        self, trainable: bool, moments_shared_by: int = 1, moments: float = MOMENTS
    ) -> float:
        """Return the bytes of a layer's state per byte of its parameters: a trained weight in fp32
        with gradient, moments and a possible copy in the compute dtype, or a frozen weight in the
        compute dtype. ``moments`` counts fp32 numbers per parameter, which ``moments_shared_by``
        processes shard (ZeRO-1)."""
        if trainable:
            copy = compute_copy_share(self.dtype)
            return TRAINED_COPIES - MOMENTS + moments / moments_shared_by + copy
        return 0.5 if self.dtype == "bf16" else 1

    def state_bytes(self, cost: LayerCost, trainable: bool, moments_shared_by: int = 1) -> int:
        """Return the bytes of a layer's state, which are held all the time; see
        :meth:`state_share`."""
        trained = cost.trained_bytes if trainable else 0
        frozen = cost.parameter_bytes - trained
        return int(
            trained * self.state_share(True, moments_shared_by, cost.moments)
            - trained * (cost.in_bf16 + (1 - cost.copied) * compute_copy_share(self.dtype))
            + frozen * self.state_share(False)
            - cost.base_bytes * cost.quantised * (self.state_share(False) - QUANTISED_SHARE)
        )

    @cached_property
    def shared_layers(self) -> dict[Any, tuple[LayerCost, ...]]:
        """Cache of :mod:`raymm.scheduler.schedule.process_costs`."""
        return {}

    def check(self, graph: ModuleGraph) -> None:
        """Raise ``PlanError`` if modules or layer counts differ from the graph's."""
        for node in graph.nodes:
            if node.name not in self.modules:
                raise PlanError(
                    f"the profile lacks module {node.name!r}; it has {sorted(self.modules)}"
                )
            if len(self.modules[node.name]) != node.num_layers:
                raise PlanError(
                    f"the profile of {node.name!r} has "
                    f"{plural(len(self.modules[node.name]), 'layer')}, "
                    f"the module {node.num_layers}"
                )

    def to_dict(self) -> dict[str, Any]:
        return {"format": PROFILE_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostProfile:
        """Return the profile of a dict made by :meth:`to_dict`; raise ``PlanError`` for a missing
        or unknown key, or a value of the wrong type."""
        try:
            if data["format"] != PROFILE_FORMAT:
                raise PlanError(f"format is {data['format']!r}; accepted: {PROFILE_FORMAT}")
            converted = "format", "modules", "links", "sharing"
            remaining = {k: v for k, v in data.items() if k not in converted}
            if data.get("sharing") is not None:
                remaining["sharing"] = DeviceSharing.from_dict(data["sharing"])
            links = data.get("links")
            try:
                remaining["links"] = None if links is None else Links.from_dict(links)
            except PlanError as error:
                raise PlanError(f"links: {error}") from None
            modules = {
                str(name): tuple(LayerCost.from_dict(layer) for layer in layers)
                for name, layers in data["modules"].items()
            }
            return cls(modules, **remaining)
        except KeyError as error:
            raise PlanError(f"the profile lacks the key {error}") from None
        except (TypeError, AttributeError) as error:
            raise PlanError(f"the profile has a wrong key or value: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        return cls.from_dict(json_value(text, "the profile"))


@dataclass(frozen=True)
class LayerWork:
    """Seconds of each pass of a layer in a training step; 0 for passes that do not run."""

    forward: float
    recompute: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """1F + 1B, the quantity that partitions balance (Cornstarch v2 §3.1)."""
        return self.forward + self.recompute + self.backward_input + self.backward_weight

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


def trainable_before(
    graph: ModuleGraph, present: Collection[str] | None = None
) -> dict[str, tuple[bool, ...]]:
    """Return, per module and layer, True if any layer before it is trainable, in its module or in a
    module that feeds it directly or indirectly (Cornstarch v2 eq. 3 across modalities). Only
    modules in ``present`` count, by default all. Eq. 3 taken literally also marks the first
    trainable layer, whose input needs no gradient; it is not marked here."""
    result: dict[str, tuple[bool, ...]] = {}
    trainable_until: dict[str, bool] = {}
    for name in graph.topological:
        if present is not None and name not in present:
            result[name] = (False,) * graph.node(name).num_layers
            trainable_until[name] = False
            continue
        flag = any(trainable_until[producer] for producer in graph.producers(name))
        flags = []
        for trainable in graph.node(name).trainable:
            flags.append(flag)
            flag = flag or trainable
        result[name] = tuple(flags)
        trainable_until[name] = flag
    return result


def has_backward(graph: ModuleGraph) -> dict[str, tuple[bool, ...]]:
    """Return, per module and layer, True if a training step runs a backward of the layer."""
    trained_earlier = trainable_before(graph)
    return {
        node.name: tuple(
            trainable or earlier
            for trainable, earlier in zip(node.trainable, trained_earlier[node.name], strict=True)
        )
        for node in graph.nodes
    }


def layer_work(
    graph: ModuleGraph, profile: CostProfile, recompute: bool = False
) -> dict[str, tuple[LayerWork, ...]]:
    """Apply the frozen rules (Cornstarch v1 §4.2, v2 eq. 1-3), per module and layer. B_w runs only
    if the layer is trainable, B_d only if a layer before it is. Recomputation adds a forward only
    if there is a backward. Raise ``PlanError`` if the profile does not match the graph."""
    profile.check(graph)
    trained_earlier = trainable_before(graph)
    return {
        node.name: tuple(
            LayerWork(
                cost.forward,
                cost.forward if recompute and (trainable or earlier) else 0.0,
                cost.backward_input if earlier else 0.0,
                cost.backward_weight if trainable else 0.0,
            )
            for cost, trainable, earlier in zip(
                profile.modules[node.name], node.trainable, trained_earlier[node.name], strict=True
            )
        )
        for node in graph.nodes
    }
