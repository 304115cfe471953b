"""The graph that a multiplexed program runs: modules and losses, and whose samples they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from raymm.scheduler.graph.strict_json import MultiplexError, text


@dataclass(frozen=True)
class Use:
    """A node's input.

    Attributes:
        producer: the node whose output it is.
        every: the samples of the whole batch (what contrastive losses compare with), not only
            those that the reading process works on.
    """

    producer: str
    every: bool = False


@dataclass(frozen=True)
class Node:
    """A module, or a loss.

    Attributes:
        name: of it.
        uses: its inputs that other nodes make.
        trainable: it has parameters that require gradients.
        loss: it returns losses; nothing reads it.
    """

    name: str
    uses: tuple[Use, ...] = ()
    trainable: bool = True
    loss: bool = False


@dataclass(frozen=True)
class NodeGraph:
    """Nodes in any order; any directed graph without cycles whose sinks are losses.

    Raises:
        MultiplexError: names that are not unique or unknown, a cycle, a loss that is read, a
            module that no loss depends on, or no loss at all.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        names = [text(node.name, "nodes[].name") for node in self.nodes]
        if len(set(names)) != len(names):
            raise MultiplexError(f"nodes[].name must differ, got {names}")
        for node in self.nodes:
            for use in node.uses:
                if use.producer not in self.by_name:
                    raise MultiplexError(
                        f"node {node.name!r} reads {use.producer!r}; accepted: {', '.join(names)}"
                    )
                if self.by_name[use.producer].loss:
                    raise MultiplexError(
                        f"node {node.name!r} reads {use.producer!r}, which is a loss; nothing "
                        "reads a loss"
                    )
        if not any(node.loss for node in self.nodes):
            raise MultiplexError(f"none of {names} is a loss; accepted: at least one")
        if len(self.order) < len(self.nodes):
            raise MultiplexError(f"nodes {sorted(set(names) - set(self.order))} have a cycle")
        read = {use.producer for node in self.nodes for use in node.uses}
        for node in self.nodes:
            if not node.loss and node.name not in read:
                raise MultiplexError(
                    f"nothing reads module {node.name!r}; accepted: modules that a loss depends on"
                )

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names, producers before their readers; without those in or behind a cycle."""
        done: list[str] = []
        left = list(self.nodes)
        while ready := [n for n in left if all(use.producer in done for use in n.uses)]:
            done += [node.name for node in ready]
            left = [node for node in left if node.name not in done]
        return tuple(done)

    @cached_property
    def backward(self) -> frozenset[str]:
        """Nodes that have a backward: something trainable is in them or before them."""
        with_backward: set[str] = set()
        for name in self.order:
            node = self.by_name[name]
            if node.trainable or any(use.producer in with_backward for use in node.uses):
                with_backward.add(name)
        return frozenset(with_backward)

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(producer, reader) pairs, each once."""
        pairs = ((use.producer, node.name) for node in self.nodes for use in node.uses)
        return tuple(dict.fromkeys(pairs))

    def readers(self, producer: str) -> Sequence[Node]:
        """Nodes that read a producer's output."""
        return [n for n in self.nodes if any(use.producer == producer for use in n.uses)]
