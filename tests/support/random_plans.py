"""Plans, inputs of steps, and costs: random, or simple named ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import COMPUTE, Op

Costs = dict[tuple[str, Op], int]
SMALL = st.integers(0, 9)


def chain(ranks: int, microbatches: int, frozen: int = 0) -> Plan:
    """Return one module with a stage per rank, the first ``frozen`` of them frozen."""
    graph = ModuleGraph((ModuleNode("llm", tuple(i >= frozen for i in range(ranks))),), ())
    stages = tuple(Stage("llm", i, (i, i + 1), i) for i in range(ranks))
    return Plan(graph, stages, microbatches)


def alignment(microbatches: int) -> Plan:
    """Return the papers' standard job.

    Frozen vision (2 stages, projector in the second) and frozen audio with a projector on the first
    vision rank, into a frozen LLM of 3 stages.
    """
    graph = ModuleGraph(
        (
            ModuleNode("vision", (False, False, True), projector=True),
            ModuleNode("audio", (False, True), projector=True),
            ModuleNode("llm", (False,) * 3),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = (
        Stage("vision", 0, (0, 1), 0),
        Stage("vision", 1, (1, 3), 1),
        Stage("audio", 0, (0, 2), 0),
        *(Stage("llm", i, (i, i + 1), 2 + i) for i in range(3)),
    )
    return Plan(graph, stages, microbatches)


def uniform(plan: Plan, forward: int, backward: int) -> Costs:
    """Return equal costs for every stage, in whole seconds, so that sums are exact."""
    weight = {op: backward if op is Op.BACKWARD else forward for op in COMPUTE}
    return {(s.id, op): w for s in plan.stages for op, w in weight.items()}


Named = tuple[list[str], list[tuple[str, str]], set[str]]
"""Names of modules, edges between them, and modules with a loss."""


@st.composite
def encoders_into_llm(draw: st.DrawFn) -> Named:
    """Draw 0 to 3 encoders into an LLM, perhaps through a module that joins them."""
    encoders = [f"encoder{i}" for i in range(draw(st.integers(0, 3)))]
    join = encoders and draw(st.booleans())
    edges = []
    for name in encoders:
        target = draw(st.sampled_from(["join", "llm", "both"])) if join else "llm"
        edges += [(name, "join")] if target != "llm" else []
        edges += [(name, "llm")] if target != "join" else []
    names = [*encoders, *(["join"] if join else []), "llm"]
    edges += [("join", "llm")] if join else []
    return names, edges, set()


@st.composite
def any_graphs(draw: st.DrawFn) -> Named:
    """Draw any modules that feed each other; unread ones and some others have losses."""
    names = [f"m{i}" for i in range(draw(st.integers(1, 5)))]
    edges = [
        (producer, names[i]) for i in range(len(names)) for producer in names[:i]
        if draw(st.booleans())
    ]
    read = {producer for producer, _ in edges}
    losses = {name for name in names if name not in read or draw(st.integers(0, 4)) == 0}
    return draw(st.permutations(names)), edges, losses


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw modules with random frozen layers, and any sharing of ranks.

    A rank may have several stages.
    """
    names, edges, losses = draw(st.one_of(encoders_into_llm(), any_graphs()))
    nodes, cuts = [], []
    for name in names:
        layers = draw(st.integers(1, 4))
        trainable = tuple(draw(st.booleans()) for _ in range(layers))
        nodes.append(ModuleNode(name, trainable, loss=name in losses))
        inner = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
        bounds = [0, *inner, layers]
        cuts += [(name, i, pair) for i, pair in
                 enumerate(zip(bounds, bounds[1:], strict=False))]
    num_ranks = draw(st.integers(1, len(cuts)))
    more = [draw(st.integers(0, num_ranks - 1)) for _ in range(len(cuts) - num_ranks)]
    ranks = draw(st.permutations([*range(num_ranks), *more]))
    stages = tuple(
        Stage(name, index, layers, rank)
        for (name, index, layers), rank in zip(cuts, ranks, strict=True)
    )
    return Plan(ModuleGraph(tuple(nodes), tuple(edges)), stages, draw(st.integers(1, 7)))


@st.composite
def layer_costs(draw: st.DrawFn) -> LayerCost:
    """Draw whole seconds and bytes, including zeros, so that sums are exact."""
    return LayerCost(
        draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL), 4 * draw(st.integers(0, 3)),
        draw(SMALL), working_bytes=draw(SMALL), forward_bytes=draw(SMALL), data_bytes=draw(SMALL),
    )


@st.composite
def profiled_plans(draw: st.DrawFn, costs: st.SearchStrategy[LayerCost] | None = None) -> Plan:
    """Draw :func:`plans` with costs of their layers, recomputation, and up to three replicas."""
    plan = draw(plans())
    costs = layer_costs() if costs is None else costs
    profile = CostProfile({
        node.name: tuple(draw(costs) for _ in range(node.num_layers))
        for node in plan.graph.nodes
    })
    stages = [replace(stage, recompute=draw(st.booleans())) for stage in plan.stages]
    for node in plan.graph.nodes:
        own = [s for s in stages if s.module == node.name]
        ranks = st.integers(0, plan.num_ranks - 1)
        for copy in range(1, 1 + draw(st.integers(0, 2))):
            stages += [replace(s, replica=copy, rank=draw(ranks)) for s in own]
    return replace(plan, stages=tuple(stages), profile=profile, shared_ranks=None)


@st.composite
def contents(draw: st.DrawFn, plan: Plan) -> list[set[str]]:
    """Draw the modules with input per microbatch; a text-only one has none."""
    sources = [n.name for n in plan.graph.nodes if not plan.graph.producers(n.name)]
    return [draw(st.sets(st.sampled_from(sources))) for _ in range(plan.num_microbatches)]


@st.composite
def steps(
    draw: st.DrawFn, any_plans: st.SearchStrategy[Plan] | None = None
) -> tuple[Plan, list[set[str]]]:
    """Draw a plan and, per microbatch, the modules with input."""
    plan = draw(plans() if any_plans is None else any_plans)
    return plan, draw(contents(plan))


@st.composite
def costs_of(draw: st.DrawFn, plan: Plan) -> Costs:
    """Draw whole seconds per stage and op; forwards take the same with and without grad."""
    costs: Costs = {}
    for stage in plan.stages:
        forward = draw(st.integers(1, 20))
        costs[stage.id, Op.FORWARD] = costs[stage.id, Op.FORWARD_NO_GRAD] = forward
        costs[stage.id, Op.BACKWARD] = draw(st.integers(1, 40))
    return costs
