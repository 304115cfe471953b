"""ModuleGraph: rejected graphs, and the order and ends of accepted ones."""

from __future__ import annotations

import pytest

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode


def nodes(*names: str) -> tuple[ModuleNode, ...]:
    return tuple(ModuleNode(name, (True,)) for name in names)


@pytest.mark.parametrize(("names", "edges", "message"), [
    (("a", "a"), (), r"module names must be unique, got \['a', 'a'\]"),
    (("a", "b"), (("a", "c"),), r"edge \('a', 'c'\) names module 'c'; modules are \['a', 'b'\]"),
    (("a", "b"), (("x", "b"),), r"names module 'x'"),
    (("a", "b"), (("a", "b"), ("a", "b")), r"edges must be unique, got \(\('a', 'b'\), "),
    (("a", "b", "c"), (("a", "b"), ("b", "a"), ("b", "c")), "has a cycle"),
    (("a",), (("a", "a"),), "has a cycle"),
    (("a", "b", "c"), (("a", "b"), ("a", "c")), r"must compute the loss, but \['b', 'c'\]"),
    (("a", "b"), (), r"must compute the loss, but \['a', 'b'\] have no consumer"),
    ((), (), r"must compute the loss, but \[\]"),
], ids=["duplicate", "unknown consumer", "unknown producer", "edge twice", "cycle", "self",
        "two sinks", "unconnected", "empty"])
def test_invalid_graphs_are_refused(names, edges, message) -> None:
    with pytest.raises(ValueError, match=message):
        ModuleGraph(nodes(*names), edges)


def test_order_and_ends() -> None:
    edges = (("fuser", "llm"), ("audio", "fuser"), ("vision", "fuser"), ("vision", "llm"))
    graph = ModuleGraph(nodes("llm", "audio", "fuser", "vision"), edges)
    assert graph.topological == ("audio", "vision", "fuser", "llm")
    assert graph.backbone == "llm"
    assert graph.producers("llm") == ("fuser", "vision") and graph.producers("audio") == ()
    assert graph.consumers("vision") == ("fuser", "llm")
    assert graph.node("fuser").name == "fuser"
    with pytest.raises(KeyError, match="no module 'video'; modules are"):
        graph.node("video")


def test_a_projector_is_a_separate_layer() -> None:
    node = ModuleNode("vision", (False, False, True), projector=True)
    assert (node.num_layers, node.num_blocks) == (3, 2)
    assert ModuleNode("llm", (True, True)).num_blocks == 2
