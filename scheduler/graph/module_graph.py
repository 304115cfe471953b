"""The module graph: which modules a model has, their layers, and where data flows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from raymm.errors import PlanError


@dataclass(frozen=True)
class ModuleNode:
    """One module of the model, as the planner sees it.

    Attributes:
        name: unique name, e.g. ``"vision"`` or ``"llm"``.
        trainable: one flag per layer: does it hold a parameter with ``requires_grad``?
            What comes before the first block (embeddings) counts with the first layer,
            what comes after the last block (norm, head) with the last block's layer.
        projector: whether the last layer is the projector (encoders only). The
            projector is a layer of its own, so that it can have a stage to itself.
            A module that cannot be cut has one block.
        loss: whether it computes a loss, as every module does that nothing reads.
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
        """How many of its first blocks are frozen: what they make of an item of data is always the
        same."""
        return next((n for n in range(self.num_blocks) if self.trainable[n]), self.num_blocks)


class Port(NamedTuple):
    """A tensor with a gradient that layers of a module read beside what the layer before hands
    them: states that cross attention reads, features for several layers.

    Attributes:
        consumer: whose layers read it.
        name: keyword argument of its forward.
        layers: those that read it, in ascending order; what is around the blocks counts with the
            block before it.
        producers: modules that it is made of; a microbatch that has none of them has no such port.
        output: what its only producer calls it; None: the consumer's first stage makes it of what
            its producers hand on, as a merge policy does.
    """

    consumer: str
    name: str
    layers: tuple[int, ...]
    producers: tuple[str, ...]
    output: str | None = None


@dataclass(frozen=True)
class ModuleGraph:
    """A DAG of modules. No edge exists that the data does not have (no false dependency between
    encoders: Cornstarch v1 §4.1).

    Attributes:
        nodes: the modules, losses among them, in any order.
        edges: (producer, consumer) pairs of module names.
        every: edges whose consumer reads the samples of the whole microbatch (what contrastive
            losses compare with), not only those that it works on itself.
        ports: what layers read of an edge, where a module may be cut between them. What is no port
            is read by a module's first stage.

    Raises:
        PlanError: duplicate or unknown names, a duplicate edge, a port without an edge, a
            cycle, or a module that nothing reads and that computes no loss. Where no module is said
            to compute one, the only one that nothing reads does.
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
        """A module by its name.

        Raises:
            KeyError: there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no module {name!r}; modules are {list(self._by_name)}") from None

    def producers(self, name: str) -> tuple[str, ...]:
        """Modules that one reads."""
        return self._producers[name]

    def consumers(self, name: str) -> tuple[str, ...]:
        """Modules that read one."""
        return self._consumers[name]

    def ports_of(self, consumer: str) -> tuple[Port, ...]:
        """What layers of a module read."""
        return tuple(port for port in self.ports if port.consumer == consumer)

    @cached_property
    def backbone(self) -> str:
        """The module that layouts are made around, a language model mostly: before or after which
        all others come, and which reads some if any such does; of several that with the most
        layers, of equals the last. Where there is none (towers of contrastive losses), the one with
        the most layers."""
        ordered = self.topological
        before: dict[str, set[str]] = {}
        for name in ordered:
            before[name] = {p for q in self.producers(name) for p in {q, *before[q]}}
        joining = [
            name for name in ordered
            if all(o == name or o in before[name] or name in before[o] for o in ordered)
        ]
        reading = [name for name in joining if self.producers(name)]
        some = reading or joining or ordered
        return max(reversed(some), key=lambda name: self.node(name).num_layers)

    @cached_property
    def followers(self) -> frozenset[str]:
        """Modules that come after the backbone: heads, decoders, losses."""
        after = {self.backbone}
        for name in self.topological:
            if after.intersection(self.producers(name)):
                after.add(name)
        return frozenset(after - {self.backbone})

    @cached_property
    def losses(self) -> frozenset[str]:
        """Modules that compute a loss; empty if it is not clear which."""
        flagged = frozenset(node.name for node in self.nodes if node.loss)
        sinks = frozenset(node.name for node in self.nodes if not self.consumers(node.name))
        return flagged or (sinks if len(sinks) == 1 else frozenset())

    @cached_property
    def backward(self) -> frozenset[str]:
        """Modules that have a backward: something trainable is in them or before them."""
        with_backward: set[str] = set()
        for name in self.topological:
            if any(self.node(name).trainable) or with_backward.intersection(self.producers(name)):
                with_backward.add(name)
        return frozenset(with_backward)

    @cached_property
    def topological(self) -> tuple[str, ...]:
        """Module names, producers before consumers, otherwise in declaration order; without those
        in or behind a cycle."""
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
