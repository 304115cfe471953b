"""Random models: graphs of modules with costs of their layers."""

from __future__ import annotations

from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_plans import layer_costs


@st.composite
def models(
    draw: st.DrawFn, most_encoders: int = 2, chains: bool = True, llm_layers: int = 5,
    most_heads: int = 0,
) -> tuple[ModuleGraph, CostProfile]:
    """Draw encoders into an LLM, and perhaps one of them into another that feeds the LLM.

    Heads with losses read the LLM and perhaps an encoder, or an encoder alone. The LLM may have a
    loss, too.
    """
    encoders = [f"encoder{i}" for i in range(draw(st.integers(0, most_encoders)))]
    edges = [(name, "llm") for name in encoders]
    if chains and len(encoders) > 1 and draw(st.booleans()):
        edges[0] = (encoders[0], encoders[1])
        if draw(st.booleans()):
            edges.append((encoders[0], "llm"))
    heads = [f"head{i}" for i in range(draw(st.integers(0, most_heads)))]
    for head in heads:
        read = draw(st.sets(st.sampled_from([*encoders, "llm"]), min_size=1, max_size=2))
        edges += [(name, head) for name in sorted(read)]
    # Otherwise it would be unused.
    llm_loss = not any(producer == "llm" for producer, _ in edges) or draw(st.booleans())
    losses = {*heads, *(["llm"] if llm_loss else [])}
    nodes = []
    for name in [*encoders, "llm", *heads]:
        size = draw(st.integers(1, llm_layers if name == "llm" else 2 if name in heads else 3))
        flags = draw(st.one_of(
            st.just((False,) * size),
            st.just((False,) * (size - 1) + (True,)),
            st.tuples(*[st.booleans()] * size),
        ))
        nodes.append(ModuleNode(name, flags, loss=bool(heads) and name in losses))
    modules = {n.name: tuple(draw(layer_costs()) for _ in n.trainable) for n in nodes}
    return (
        ModuleGraph(tuple(nodes), tuple(edges)),
        CostProfile(modules, dtype=draw(st.sampled_from(["fp32", "bf16"]))),
    )


@st.composite
def spaces(draw: st.DrawFn, most_ranks: int = 7, **options) -> StageSpace:
    graph, profile = draw(models(**options))
    return StageSpace(
        graph, profile,
        ranks=draw(st.integers(len(graph.nodes), most_ranks)),
        num_microbatches=draw(st.integers(1, 6)),
        recompute=draw(st.booleans()),
    )
