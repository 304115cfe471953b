"""Random graphs of modules, and mappings of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import strategies as st

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement

STEPS = 12


class Use(NamedTuple):
    """Producer, and True if all of its samples are read."""

    producer: str
    every: bool = False


class Node(NamedTuple):
    """Module of one layer, with its inputs."""

    name: str
    uses: tuple[Use, ...] = ()
    trainable: bool = True
    loss: bool = False


def graph_of(nodes: Iterable[Node]) -> ModuleGraph:
    """Return the graph of some nodes."""
    nodes = tuple(nodes)
    uses = [(use.producer, node.name, use.every) for node in nodes for use in node.uses]
    return ModuleGraph(
        tuple(ModuleNode(node.name, (node.trainable,), loss=node.loss) for node in nodes),
        tuple((producer, reader) for producer, reader, _ in uses),
        tuple((producer, reader) for producer, reader, every in uses if every),
    )


def mapping_of(gpus: int, *stages: dict[str, tuple[int, ...]]) -> Mapping:
    """Return stages of modules on GPUs, each with the same small quota."""
    return Mapping(gpus, STEPS, tuple(
        MultiplexStage(tuple(Placement(m, g, 1) for m, g in one.items()), 1.0)
        for one in stages
    ))


def clip() -> ModuleGraph:
    return graph_of((
        Node("image"), Node("text"),
        Node("loss", (Use("image", True), Use("text", True)), loss=True),
    ))


@st.composite
def cases(draw):
    """Draw a layered graph, a mapping of it in ordered stages, and a batch."""
    modules = draw(st.integers(1, 6))
    nodes, names = [], []
    for m in range(modules):
        before = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
        uses = tuple(Use(p, draw(st.booleans())) for p in before)
        names.append(f"m{m}")
        nodes.append(Node(f"m{m}", uses, draw(st.booleans())))
    read = {use.producer for node in nodes for use in node.uses}
    sinks = [name for name in names if name not in read]
    losses = draw(st.integers(1, 3))
    for i in range(losses):
        extra = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
        chosen = dict.fromkeys([*(sinks if i == 0 else ()), *extra] or [names[0]])
        uses = tuple(Use(p, draw(st.booleans())) for p in chosen)
        nodes.append(Node(f"loss{i}", uses, draw(st.booleans()), loss=True))
    graph = graph_of(draw(st.permutations(nodes)))
    gpus = draw(st.integers(1, 6))
    stages: list[dict[str, tuple[int, ...]]] = []
    stage_of: dict[str, int] = {}
    placed = [n for n in graph.topological if n not in graph.losses or draw(st.booleans())]
    for name in placed:
        before = (stage_of[producer] for producer in graph.producers(name))
        at = max(before, default=-1) + 1 + draw(st.integers(0, 1))
        degree = 1 << draw(st.integers(0, gpus.bit_length() - 1))
        chosen = draw(st.permutations(range(gpus)))[:degree]
        while len(stages) <= at:
            stages.append({})
        stages[at][name] = tuple(sorted(chosen))
        stage_of[name] = at
    mapping = mapping_of(gpus, *(stage for stage in stages if stage))
    return graph, mapping, draw(st.integers(1, 9))
