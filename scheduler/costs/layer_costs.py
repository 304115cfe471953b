"""What a layer costs, and what of it a training step really pays: the frozen rules."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from raymm.errors import PlanError
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
# AdamW keeps a gradient and two moments beside each trainable weight, all in fp32.
TRAINED_COPIES = 4
MOMENTS = 2
QUANTISED_SHARE = 0.25  # of an element's fp32 bytes


@dataclass(frozen=True)
class LayerCost:
    """One layer on one microbatch, as if everything in it were trainable, but weights under
    adapters.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of B_d, the gradient of the layer's input.
        backward_weight: seconds of B_w, the gradient of its parameters.
        activation_bytes: what autograd keeps from forward to backward.
        parameter_bytes: its parameters in fp32.
        output_bytes: what it hands to the next layer.
        replicated_bytes: of ``parameter_bytes``, what tensor parallelism does not share out
            (norms, convolutions, positions).
        key_value_bytes: keys and values of its attention in the compute dtype; 0 if not known
            (a profile of before it was counted), or if it has none.
        working_bytes: the most that it has for a time in a forward or a backward beyond what it and
            the layers before it keep, and its output; gradients that are under way, mostly.
        forward_bytes: the most that a forward which keeps nothing has at a time, with its input.
        data_bytes: what it reads of a microbatch's data, which is on the device for the whole step.
        base_bytes: of ``parameter_bytes``, what is frozen where the layer is trained: weights under
            adapters.
        quantised: share of ``base_bytes`` that is kept in a byte per element, in any compute dtype.
        moments: fp32 numbers that the optimizer keeps of each trained parameter: AdamW two.
        expert_bytes: of ``parameter_bytes``, those of experts, which expert parallelism shares out.
        exchange_bytes: of tokens on their way to experts of other processes and back in a forward,
            if all went there.
        few_bytes, few_heads: of ``parameter_bytes``, those that at most so many processes share:
            of keys and values with fewer heads than queries.
        tied_bytes: of the last layer's ``parameter_bytes``, those of parameters that the first
            layer has, too: a stage with both layers holds them once.
        in_bf16: share of the trained parameters that are kept in bf16, with their gradients.
        copied: share of them that have a copy in the compute dtype, where that is not fp32.
        options: what else it may do with its activations, if known: seconds that this adds to a
            forward and backward, and bytes that it keeps instead of ``activation_bytes``, and has
            for a time instead of ``working_bytes``.
        halved: what each of two processes has of it that share its parameters; None if that is not
            known.

    The last three sizes are 0 where they are not known.
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
        """Of ``parameter_bytes``, what has gradients where the layer is trained."""
        return self.parameter_bytes - self.base_bytes

    @property
    def choices(self) -> tuple[LayerOption, ...]:
        """All it may do with its activations; to keep them is the first."""
        keep = LayerOption(KEEP, 0.0, self.activation_bytes, self.working_bytes)
        return (keep, *self.options)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerCost:
        """Inverse of ``asdict``, also from JSON.

        Raises:
            TypeError: on an unknown key, or a value of the wrong kind.
        """
        options = tuple(LayerOption(*option) for option in data.get("options", ()))
        halved = data.get("halved")
        halved = None if halved is None else LayerBytes.from_list(halved)
        return cls(**{**data, "options": options, "halved": halved})


def working_bytes(layer: LayerCost | LayerBytes, option: LayerOption) -> int:
    """Bytes that a layer has for a time with an option, beyond what it keeps then. If that was not
    measured: all that it would keep otherwise, and all that it then works with, though a layer need
    not have both at the same time.

    Args:
        layer: whose option it is.
        option: one of its options, or to keep all.
    """
    if option.working_bytes is not None:
        return option.working_bytes
    return remade_bytes(option, layer.activation_bytes) + layer.working_bytes


NUMBERS = tuple(e.name for e in fields(LayerCost) if e.name not in ("options", "halved"))
"""Fields of a :class:`LayerCost` that are numbers."""


@dataclass(frozen=True)
class CostProfile:
    """Costs of every layer of a model on one kind of microbatch.

    Attributes:
        modules: per module, one :class:`LayerCost` per layer (as the module graph counts).
        device: what it was measured on, or planned for.
        dtype: compute dtype, ``"fp32"`` or ``"bf16"``; frozen weights are kept in it.
        source: ``"measured"`` or ``"analytic"``.
        tokens: per module, tokens of the microbatch.
        versions: versions of the packages it was measured with.
        links: what the processes of a rank and the replicas of a module talk over; if None,
            that takes no time.
        ports: by consumer and name, bytes of the ports that layers of a module read.
        sharing: what fewer samples, quotas and modules side by side do to the seconds; if None,
            samples and quotas are used without loss.
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

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise PlanError(f"dtype is {self.dtype!r}; accepted: fp32, bf16")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the compute dtype."""
        return 2 if self.dtype == "bf16" else 4

    def port_bytes(self, consumer: str, name: str) -> int | None:
        """Bytes of a port; None if they are not known."""
        return self.ports.get(consumer, {}).get(name)

    def state_share(
        self, trainable: bool, moments_shared_by: int = 1, moments: float = MOMENTS
    ) -> float:
        """Bytes that a layer's state takes per one of its ``parameter_bytes``: a trained
        weight in fp32 with its gradient and the optimizer's moments, and its copy in the compute
        dtype where there is one, a frozen one in the compute dtype.

        Args:
            trainable: whether it is trained.
            moments_shared_by: processes among which the moments are split (ZeRO-1).
            moments: of a parameter, in fp32 numbers.
        """
        if trainable:
            copy = compute_copy_share(self.dtype)
            return TRAINED_COPIES - MOMENTS + moments / moments_shared_by + copy
        return 0.5 if self.dtype == "bf16" else 1

    def state_bytes(self, cost: LayerCost, trainable: bool, moments_shared_by: int = 1) -> int:
        """What a layer keeps whatever runs, in bytes; see :meth:`state_share`.

        Args:
            cost: the layer's.
            trainable: whether it is trained.
            moments_shared_by: processes that share the optimizer's moments (ZeRO-1).
        """
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
        """What :mod:`raymm.scheduler.schedule.process_costs` has worked out already."""
        return {}

    def check(self, graph: ModuleGraph) -> None:
        """Raise PlanError if modules or layer counts are not the graph's."""
        for node in graph.nodes:
            if node.name not in self.modules:
                raise PlanError(
                    f"the profile lacks module {node.name!r}; it has {sorted(self.modules)}"
                )
            if len(self.modules[node.name]) != node.num_layers:
                raise PlanError(
                    f"the profile of {node.name!r} has {len(self.modules[node.name])} layers, "
                    f"the module {node.num_layers}"
                )

    def to_dict(self) -> dict[str, Any]:
        return {"format": PROFILE_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostProfile:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanError: on a missing or unknown key or a value of the wrong kind.
        """
        try:
            if data["format"] != PROFILE_FORMAT:
                raise PlanError(f"format is {data['format']!r}; accepted: {PROFILE_FORMAT}")
            apart = "format", "modules", "links", "sharing"
            rest = {k: v for k, v in data.items() if k not in apart}
            if data.get("sharing") is not None:
                rest["sharing"] = DeviceSharing.from_dict(data["sharing"])
            links = data.get("links")
            try:
                rest["links"] = None if links is None else Links.from_dict(links)
            except PlanError as error:
                raise PlanError(f"links: {error}") from None
            modules = {
                str(name): tuple(LayerCost.from_dict(layer) for layer in layers)
                for name, layers in data["modules"].items()
            }
            return cls(modules, **rest)
        except KeyError as error:
            raise PlanError(f"the profile lacks the key {error}") from None
        except (TypeError, AttributeError) as error:
            raise PlanError(f"the profile has a wrong key or value: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        return cls.from_dict(json_value(text, "the profile"))


@dataclass(frozen=True)
class LayerWork:
    """What a training step runs of a layer, in seconds; zero is what it does not run."""

    forward: float
    recompute: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """1F + 1B, what partitions balance (Cornstarch v2 §3.1)."""
        return self.forward + self.recompute + self.backward_input + self.backward_weight

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


def trainable_before(
    graph: ModuleGraph, present: Collection[str] | None = None
) -> dict[str, tuple[bool, ...]]:
    """Per module and layer: is anything trainable strictly before the layer, in its module
    or in a module that feeds it, however far back (Cornstarch v2 eq. 3 across modalities)?

    Eq. 3 taken literally also marks the first trainable layer itself, whose input needs no
    gradient; it is not marked here.

    Args:
        graph: the module graph.
        present: modules a microbatch uses; all by default.
    """
    result: dict[str, tuple[bool, ...]] = {}
    after: dict[str, bool] = {}
    for name in graph.topological:
        if present is not None and name not in present:
            result[name] = (False,) * graph.node(name).num_layers
            after[name] = False
            continue
        flag = any(after[producer] for producer in graph.producers(name))
        flags = []
        for trainable in graph.node(name).trainable:
            flags.append(flag)
            flag = flag or trainable
        result[name] = tuple(flags)
        after[name] = flag
    return result


def has_backward(graph: ModuleGraph) -> dict[str, tuple[bool, ...]]:
    """Per module and layer: does a training step run a backward of it at all?"""
    before = trainable_before(graph)
    return {
        node.name: tuple(
            trainable or earlier
            for trainable, earlier in zip(node.trainable, before[node.name], strict=True)
        )
        for node in graph.nodes
    }


def layer_work(
    graph: ModuleGraph, profile: CostProfile, recompute: bool = False
) -> dict[str, tuple[LayerWork, ...]]:
    """The frozen rules (Cornstarch v1 §4.2, v2 eq. 1-3), per module and layer.

    B_w only where the layer is trainable; B_d only where something trainable is before it;
    with recomputation, one more forward only where there is a backward at all.

    Args:
        graph: of the model's modules.
        profile: costs of its layers.
        recompute: whether activations are computed again.

    Raises:
        PlanError: if the profile is not of this graph.
    """
    profile.check(graph)
    before = trainable_before(graph)
    return {
        node.name: tuple(
            LayerWork(
                cost.forward,
                cost.forward if recompute and (trainable or earlier) else 0.0,
                cost.backward_input if earlier else 0.0,
                cost.backward_weight if trainable else 0.0,
            )
            for cost, trainable, earlier in zip(
                profile.modules[node.name], node.trainable, before[node.name], strict=True
            )
        )
        for node in graph.nodes
    }
