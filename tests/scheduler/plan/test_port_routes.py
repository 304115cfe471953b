"""Ports of random graphs: every reading stage gets one once, by the cheapest edges.

Programs with them end, and sent bytes are those that are read.
"""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.scheduler.costs.devices import Link, Links
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode, Port
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.network import edge_transfers
from raymm.scheduler.schedule.stage_costs import edge_bytes, stage_costs

LAYERS, OUTPUT = 5, 1000


@st.composite
def plans(draw, replicas=True) -> Plan:
    """Draw a vision module of 2 layers and a language model of 5 that reads some of its outputs."""
    names = ["deep", "states", "merged"][: draw(st.integers(1, 3))]
    ports = tuple(
        Port(
            "llm", name,
            tuple(sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1)))),
            ("vision",), None if name == "merged" else f"out.{name}",
        )
        for name in names
    )
    nodes = ModuleNode("vision", (True,) * 2), ModuleNode("llm", (True,) * LAYERS)
    graph = ModuleGraph(nodes, (("vision", "llm"),), ports=ports)
    cost = LayerCost(1.0, 1.0, 1.0, output_bytes=OUTPUT)
    sizes = {name: 10 ** n for n, name in enumerate(names)}
    links = Links(Link(1e-6, 1e9), Link(1e-5, 1e7), draw(st.integers(1, 3)))
    profile = CostProfile(
        {"vision": (cost,) * 2, "llm": (cost,) * LAYERS}, links=links, ports={"llm": sizes}
    )
    stages, rank = [], 0
    for module, layers in (("vision", 2), ("llm", LAYERS)):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3)))
        bounds = [0, *cuts, layers]
        ranks = draw(st.integers(1, len(bounds) - 1))
        for replica in range(draw(st.integers(1, 2)) if replicas else 1):
            for index, (lo, hi) in enumerate(zip(bounds, bounds[1:], strict=False)):
                stages.append(Stage(module, index, (lo, hi), rank + index % ranks, replica))
            rank += ranks
    return Plan(graph, tuple(stages), 2, profile=profile)


def readers(plan: Plan, port: Port) -> list[Stage]:
    stages = plan.module_stages("llm")
    return [s for s in stages if any(s.layers[0] <= n < s.layers[1] for n in port.layers)]


def arrivals(plan: Plan, port: Port, reader: Stage) -> list:
    """Return the stages that send a port to a stage."""
    sources = []
    for (src, dst), ports in plan.edge_ports.items():
        if dst != reader.id:
            continue
        if src.module == "llm":
            sources += [src] * (port.name in ports.names)
        elif port.output is not None:
            sources += [src] * (
                port.output in ports.names
                or not ports.alone and port.output not in ports.withheld
            )
    return sources


@settings(max_examples=150, deadline=None)
@given(plans())
def test_only_readers_get_a_port_and_only_once(plan):
    joined = len(plan.replicas("vision")) // min(
        len(plan.replicas("vision")), len(plan.replicas("llm"))
    )
    for port in plan.graph.ports:
        reading = {stage.id for stage in readers(plan, port)}
        for stage in plan.module_stages("llm"):
            sources = arrivals(plan, port, stage)
            if stage.id not in reading or port.output is None and stage.index == 0:
                assert sources == []
            elif sources[0].module == "llm":
                (source,) = sources
                assert source.index < stage.index and source.replica == stage.replica
                assert source in reading or port.output is None and source.index == 0
            else:  # a microbatch passes through one of them
                assert len(sources) == joined and port.output is not None


@settings(max_examples=100, deadline=None)
@given(plans(replicas=False))
def test_sources_of_ports_are_the_nearest(plan):
    """Try every reader with every earlier holder."""
    links = plan.profile.links
    base = {e for e, ports in plan.edge_ports.items() if not ports.alone}

    def seconds(src: Stage, dst: Stage, port: Port) -> float:
        if src.rank == dst.rank:
            return 0.0
        link = links.between([src.rank, dst.rank])
        alone = (src.id, dst.id) not in base
        return plan.profile.port_bytes("llm", port.name) / link.bandwidth + link.latency * alone

    for port in plan.graph.ports:
        reading = readers(plan, port)
        first = plan.replicas("vision")[0][-1] if port.output else plan.replicas("llm")[0][0]
        reading = [stage for stage in reading if stage != first]
        chosen = sum(
            seconds(plan.by_id[arrivals(plan, port, stage)[0]], stage, port) for stage in reading
        )
        choices = [[first, *reading[:number]] for number in range(len(reading))]
        least = min(
            sum(seconds(src, dst, port) for src, dst in zip(sources, reading, strict=True))
            for sources in product(*choices)
        )
        assert chosen <= least * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(plans(), st.lists(st.booleans(), min_size=2, max_size=2))
def test_programs_end_and_send_ports_from_their_source(plan, present):
    program = lower(plan, [("vision",) if there else () for there in present])
    check_program(program)
    for instructions in program:
        for i in instructions:
            if i.op is not Op.SEND:
                continue
            edge = i.edge if i.edge in plan.edge_ports else i.edge[::-1]
            assert present[i.microbatch] or not plan.edge_ports[edge].alone


@settings(max_examples=100, deadline=None)
@given(plans(replicas=False))
def test_bytes_of_edges_and_their_seconds(plan):
    sizes = stage_costs(plan)
    sent = edge_bytes(plan, sizes)
    transfers = edge_transfers(plan, Link(0.0, 1.0), Link(0.0, 1.0), 1)
    for (src, dst), ports in plan.edge_ports.items():
        expected = 0 if ports.alone else OUTPUT
        for port in plan.graph.ports:
            own = port.name if src.module == "llm" or port.output is None else port.output
            nbytes = plan.profile.port_bytes("llm", port.name)
            if own in ports.names and (ports.alone or src.module == "llm"):
                expected += nbytes
            elif src.module == "vision" and own in ports.withheld:
                expected -= nbytes
        assert sent[src, dst] == expected
        if plan.by_id[src].rank != plan.by_id[dst].rank:
            assert transfers[src, dst].seconds == transfers[dst, src].seconds == expected
