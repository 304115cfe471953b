"""The module graph: which modules a model has, their layers, and where data flows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
    """

    name: str
    trainable: tuple[bool, ...]
    projector: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.trainable)

    @property
    def num_blocks(self) -> int:
        return self.num_layers - int(self.projector)


@dataclass(frozen=True)
class ModuleGraph:
    """A DAG of modules. ``edges`` are (producer, consumer) pairs of module names.

    There is exactly one sink, which computes the loss. No edge exists that the data
    does not have (no false dependency between encoders: Cornstarch v1 §4.1).

    Raises:
        ValueError: on duplicate or unknown names, a duplicate edge, a cycle, or more than one sink.
    """

    nodes: tuple[ModuleNode, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"module names must be unique, got {names}")
        for edge in self.edges:
            for end in edge:
                if end not in names:
                    raise ValueError(f"edge {edge} names module {end!r}; modules are {names}")
        if len(set(self.edges)) != len(self.edges):
            raise ValueError(f"edges must be unique, got {self.edges}")
        if len(self.topological) != len(names):
            raise ValueError(f"the module graph has a cycle: edges {self.edges}")
        sinks = [name for name in names if not self.consumers(name)]
        if len(sinks) != 1:
            raise ValueError(f"one module must compute the loss, but {sinks} have no consumer")

    def node(self, name: str) -> ModuleNode:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no module {name!r}; modules are {[n.name for n in self.nodes]}")

    def producers(self, name: str) -> tuple[str, ...]:
        return tuple(src for src, dst in self.edges if dst == name)

    def consumers(self, name: str) -> tuple[str, ...]:
        return tuple(dst for src, dst in self.edges if src == name)

    @property
    def sink(self) -> str:
        return self.topological[-1]

    @cached_property
    def topological(self) -> tuple[str, ...]:
        """Module names, producers before consumers, otherwise in declaration order."""
        done: list[str] = []
        waiting = [node.name for node in self.nodes]
        while waiting:
            ready = [n for n in waiting if all(p in done for p in self.producers(n))]
            if not ready:
                break
            done.append(ready[0])
            waiting.remove(ready[0])
        return tuple(done)
