"""The module graph: the modules of a model, their layers, and the data flow between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from raymm.errors import PlanError

MESSAGE_BOUND = 4
"""Most messages of one edge that may be in flight, sent but not yet received, in programs that end
with this bound. It keeps a frozen encoder from running ahead by all microbatches of a step."""


class Direction(StrEnum):
    """Direction of a message: outputs go forward to consumers, their gradients go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


def posted_receives(in_order: bool) -> int:
    """Return how many receive buffers of one edge a receiver holds while it computes, including the
    one that it is working on. If ``in_order``, as on a GPU, each receive is posted when its sender
    sends (:mod:`raymm.scheduler.program.issue_order`); else :data:`MESSAGE_BOUND` are posted at
    once."""
    return 1 if in_order else MESSAGE_BOUND


@dataclass(frozen=True)
class ModuleNode:
    """One module of the model, as the planner sees it.

    Attributes:
        name: unique name, e.g. ``"vision"`` or ``"llm"``.
        trainable: one flag per layer, True if the layer has a parameter with ``requires_grad``.
            Parameters before the first block (embeddings) count with the first layer, parameters
            after the last block (norm, head) with the layer of the last block.
        projector: True if the last layer is the projector (encoders only). The projector is a
            separate layer so that it can be a separate stage. A module that cannot be split has one
            block.
        loss: True if the module computes a loss. Every module without consumers must compute one.
    """

    name: str
    trainable: tuple[bool, ...]
    projector: bool = False
    loss: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.trainable)

    @property
    def num_blocks(self) -> int:
        return self.num_layers - int(self.projector)

    @property
    def frozen_blocks(self) -> int:
        """Number of leading blocks that are frozen. Their output for a data item never changes."""
        return next((n for n in range(self.num_blocks) if self.trainable[n]), self.num_blocks)


class Port(NamedTuple):
    """A differentiable tensor that layers of a module read in addition to the previous layer's
    output, such as encoder states for cross attention or features for several layers.

    Attributes:
        consumer: module whose layers read the port.
        name: keyword argument of the layers' forward.
        layers: layers that read the port, in ascending order. Code around the blocks counts with
            the block before it.
        producers: modules that the port is computed from. A microbatch without data for them has no
            such port.
        output: name of the output of the only producer. None if the consumer's first stage computes
            the port from the outputs of its producers, as a merge policy does.
    """

    consumer: str
    name: str
    layers: tuple[int, ...]
    producers: tuple[str, ...]
    output: str | None = None


@dataclass(frozen=True)
class ModuleGraph:
    """A DAG of modules. Edges exist only where data flows, so encoders do not depend on each other
    (Cornstarch v1 §4.1).

    Attributes:
        nodes: the modules, including losses, in any order.
        edges: (producer, consumer) pairs of module names.
        every: edges whose consumer reads the samples of the whole microbatch, as contrastive losses
            do, and not only its own share of the samples.
        ports: tensors that later layers read over an edge, for modules that may be split there. The
            first stage of a module reads all other inputs.

    Raises:
        PlanError: duplicate or unknown names, a duplicate edge, a port without an edge, a cycle, or
            a module that has no consumer and computes no loss. If no module is flagged as a loss,
            the only module without consumers is the loss.
    """

    nodes: tuple[ModuleNode, ...]
    edges: tuple[tuple[str, str], ...]
    every: tuple[tuple[str, str], ...] = ()
    ports: tuple[Port, ...] = ()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise PlanError(f"module names must be unique, got {names}")
        for edge in self.edges:
            for end in edge:
                if end not in names:
                    raise PlanError(f"edge {edge} names module {end!r}; modules are {names}")
        if len(set(self.edges)) != len(self.edges):
            raise PlanError(f"edges must be unique, got {self.edges}")
        for edge in self.every:
            if edge not in self.edges:
                raise PlanError(f"every has {edge}, which is not an edge; edges are {self.edges}")
        for port in self.ports:
            self._check_port(port)
        if len(self.topological) != len(names):
            circle = sorted(set(names) - set(self.topological))
            raise PlanError(f"the module graph has a cycle: modules {circle}")
        sinks = [name for name in names if not self.consumers(name)]
        if not self.losses:
            raise PlanError(
                f"one module must compute the loss, but {sinks} have no consumer; set loss=True on "
                "each module that computes a loss"
            )
        for name in sinks:
            if name not in self.losses:
                raise PlanError(
                    f"nothing reads module {name!r}; every module must compute a loss or feed one"
                )

    def _check_port(self, port: Port) -> None:
        edges = {(producer, port.consumer) for producer in port.producers}
        several = port.output is not None and len(edges) > 1
        if not edges or several or not edges <= set(self.edges):
            raise PlanError(f"port {port} matches no edge; edges are {self.edges}")
        layers = self.node(port.consumer).num_layers
        ascending = tuple(sorted({n for n in port.layers if 0 <= n < layers}))
        if not ascending or port.layers != ascending:
            raise PlanError(
                f"layers of port {port.name!r} are {port.layers}; accepted: layers of "
                f"{port.consumer!r} in ascending order, 0 to {layers - 1}"
            )

    def node(self, name: str) -> ModuleNode:
        """Return the module with this name; raise ``KeyError`` if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no module {name!r}; modules are {list(self._by_name)}") from None

    def producers(self, name: str) -> tuple[str, ...]:
        return self._producers[name]

    def consumers(self, name: str) -> tuple[str, ...]:
        return self._consumers[name]

    def ports_of(self, consumer: str) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.consumer == consumer)

    @cached_property
    def backbone(self) -> str:
        """The module that layouts are built around, usually the language model: before or after all
        other modules, if possible with inputs, and of several the last one with most layers.
        Without such a module (towers of contrastive losses), the module with most layers."""
        ordered = self.topological
        ancestors: dict[str, set[str]] = {}
        for name in ordered:
            ancestors[name] = {p for q in self.producers(name) for p in {q, *ancestors[q]}}
        joining = [
            name for name in ordered
            if all(o == name or o in ancestors[name] or name in ancestors[o] for o in ordered)
        ]
        reading = [name for name in joining if self.producers(name)]
        candidates = reading or joining or ordered
        return max(reversed(candidates), key=lambda name: self.node(name).num_layers)

    @cached_property
    def followers(self) -> frozenset[str]:
        """Modules that come after the backbone: heads, decoders, losses."""
        downstream = {self.backbone}
        for name in self.topological:
            if downstream.intersection(self.producers(name)):
                downstream.add(name)
        return frozenset(downstream - {self.backbone})

    @cached_property
    def losses(self) -> frozenset[str]:
        """Modules that compute a loss; empty if none is flagged and several have no consumer."""
        flagged = frozenset(node.name for node in self.nodes if node.loss)
        sinks = frozenset(node.name for node in self.nodes if not self.consumers(node.name))
        return flagged or (sinks if len(sinks) == 1 else frozenset())

    @cached_property
    def backward(self) -> frozenset[str]:
        """Modules with a backward pass: they, or modules before them, have trainable layers."""
        with_backward: set[str] = set()
        for name in self.topological:
            if any(self.node(name).trainable) or with_backward.intersection(self.producers(name)):
                with_backward.add(name)
        return frozenset(with_backward)

    @cached_property
    def topological(self) -> tuple[str, ...]:
        """Module names, producers before consumers, otherwise in declaration order. Modules in or
        behind a cycle are left out."""
        done: list[str] = []
        waiting = [node.name for node in self.nodes]
        while waiting:
            ready = [n for n in waiting if all(p in done for p in self.producers(n))]
            if not ready:
                break
            done.append(ready[0])
            waiting.remove(ready[0])
        return tuple(done)

    @cached_property
    def _by_name(self) -> dict[str, ModuleNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _producers(self) -> dict[str, tuple[str, ...]]:
        return {n.name: tuple(p for p, c in self.edges if c == n.name) for n in self.nodes}

    @cached_property
    def _consumers(self) -> dict[str, tuple[str, ...]]:
        return {n.name: tuple(c for p, c in self.edges if p == n.name) for n in self.nodes}
