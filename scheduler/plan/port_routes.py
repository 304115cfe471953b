"""Routes of ports: the edges that carry tensors that layers read in addition to the hidden state.

Every stage with a layer that reads a port gets the port once, from the nearest source: its producer
or an earlier stage that reads it too. This minimises traffic. Among equally near sources the last
is chosen, usually the previous stage, which sends a message anyway. Gradients return on the same
routes and are summed where routes join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.graph.module_graph import ModuleGraph, Port
from raymm.scheduler.plan.stage import Edge, Stage, StageId
from raymm.scheduler.plan.stage_edges import joined, stage_edges

Replicas = Mapping[str, Sequence[Sequence[Stage]]]
Seconds = Callable[[Stage, Stage, Port, bool], float]
"""``seconds(sender, receiver, port, alone)``: time to send a port between ranks; ``alone`` is True
if the port needs a separate message."""


@dataclass(frozen=True)
class EdgePorts:
    """Ports in the messages of an edge, by the sender's names for them.

    Attributes:
        withheld: ports that the message would carry by default, but that no layer behind it reads;
            only their shapes are sent.
        alone: True if the message carries nothing else, and is sent only if the microbatch has data
            for one of ``producers``.
    """

    names: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    alone: bool = False
    producers: tuple[str, ...] = ()

    def __or__(self, other: EdgePorts) -> EdgePorts:
        """Return the ports of one message that serves both edges."""
        alone = self.alone and other.alone
        names = tuple(dict.fromkeys(self.names + other.names))
        withheld_sets = [set(ports.withheld) for ports in (self, other) if not ports.alone]
        withheld = set.intersection(*withheld_sets) - set(names) if withheld_sets else ()
        return EdgePorts(
            names, tuple(sorted(withheld)), alone,
            tuple(dict.fromkeys(self.producers + other.producers)) if alone else (),
        )


PLAIN = EdgePorts()


def edge_ports(
    graph: ModuleGraph, replicas: Replicas, profile: CostProfile | None = None,
    processes: Callable[[int], Iterable[int]] = lambda rank: (rank,),
) -> dict[Edge, EdgePorts]:
    """Return all data edges between stages, with the ports that they carry. ``profile`` has the
    sizes of ports and the links; without it all links are equal."""
    seconds = _seconds(profile, processes)
    edges = dict.fromkeys(stage_edges(graph, replicas), PLAIN)
    for consumer, ports in _by_consumer(graph.ports):
        ways: dict[Edge, list[Port]] = {}
        for port in ports:
            for replica in range(len(replicas[consumer])):
                for edge in _ways(port, replicas, replica, seconds, edges):
                    ways.setdefault(edge, []).append(port)
        for edge in [e for e in edges if e[1].module == consumer]:
            carried_names = {_name(port, edge) for port in ways.get(edge, ())}
            skipped = {_name(p, edge) for p in ports if _would_carry(p, edge)} - carried_names
            edges[edge] = EdgePorts(tuple(sorted(carried_names)), tuple(sorted(skipped)))
        for edge, carried in ways.items():
            if edge not in edges:
                names = sorted({_name(port, edge) for port in carried})
                producers = dict.fromkeys(name for port in carried for name in port.producers)
                edges[edge] = EdgePorts(tuple(names), (), True, tuple(producers))
    return edges


def sent_ports(
    edges: Mapping[Edge, EdgePorts], rank_of: Callable[[StageId], int]
) -> dict[Edge, EdgePorts]:
    """Return the ports of each message, for edges that carry or withhold ports. A rank receives the
    output of a stage once for all of its stages."""
    by_receiver: dict[tuple[StageId, int], EdgePorts] = {}
    for (src, dst), ports in edges.items():
        key = src, rank_of(dst)
        by_receiver[key] = by_receiver[key] | ports if key in by_receiver else ports
    sent = {
        (src, dst): by_receiver[src, rank_of(dst)] if rank_of(src) != rank_of(dst) else ports
        for (src, dst), ports in edges.items()
    }
    return {edge: ports for edge, ports in sent.items() if ports != PLAIN}


def message_bytes(
    graph: ModuleGraph, edge: Edge, ports: EdgePorts, output_bytes: int, profile: CostProfile | None
) -> int:
    """Return the bytes of a message of an edge with these ports. ``output_bytes`` is the size of
    the sender's output: the hidden state, or all outputs of a module."""
    if profile is None or ports == PLAIN:
        return output_bytes
    sizes = {
        _name(port, edge): _port_bytes(port, profile)
        for port in graph.ports_of(edge[1].module) if _would_carry(port, edge)
    }
    carried = sum(sizes[name] for name in ports.names)
    if ports.alone:
        return carried
    if edge[0].module == edge[1].module:
        return output_bytes + carried
    return output_bytes - sum(sizes[name] for name in ports.withheld)


def _port_bytes(port: Port, profile: CostProfile) -> int:
    """Return the profile's size of a port. If a merge computes the port, fall back to the sizes of
    its inputs."""
    nbytes = profile.port_bytes(port.consumer, port.name)
    if nbytes is not None:
        return nbytes
    sources = port.producers if port.output is None else ()
    return sum(profile.modules[producer][-1].output_bytes for producer in sources)


def _by_consumer(ports: Iterable[Port]) -> list[tuple[str, list[Port]]]:
    by_consumer: dict[str, list[Port]] = {}
    for port in ports:
        by_consumer.setdefault(port.consumer, []).append(port)
    return list(by_consumer.items())


def _seconds(profile: CostProfile | None, processes: Callable[[int], Iterable[int]]) -> Seconds:
    links = None if profile is None else profile.links

    def seconds(sender: Stage, receiver: Stage, port: Port, alone: bool) -> float:
        if sender.rank == receiver.rank:
            return 0.0
        if profile is None or links is None:
            return 1.0
        link = links.between([*processes(sender.rank), *processes(receiver.rank)])
        nbytes = _port_bytes(port, profile)
        return nbytes / link.bandwidth + link.latency * alone

    return seconds


def _name(port: Port, edge: Edge) -> str:
    """Return the sender's name of a port."""
    keeps_name = edge[0].module == port.consumer or port.output is None
    return port.name if keeps_name else str(port.output)


def _would_carry(port: Port, edge: Edge) -> bool:
    """Return True if the sender has the port and its messages to this stage would include it."""
    if edge[0].module == port.consumer:
        return True
    return port.output is not None and edge[0].module in port.producers


def _ways(
    port: Port, replicas: Replicas, replica: int, seconds: Seconds, edges: Mapping[Edge, EdgePorts]
) -> list[Edge]:
    """Return the edges that bring a port to the stages of a replica that read it."""
    stages = replicas[port.consumer][replica]
    readers = [s for s in stages if any(s.layers[0] <= n < s.layers[1] for n in port.layers)]
    sources: list[list[Stage]] = []
    if port.output is None:
        sources.append([stages[0]])
    else:
        lasts = [chain[-1] for chain in replicas[port.producers[0]]]
        firsts = [chain[0] for chain in replicas[port.consumer]]
        sources.append([a for a, b in joined(lasts, firsts) if b.replica == replica])
    ways: list[Edge] = []
    for reader in readers:
        if [reader] == sources[0]:
            continue

        def cost(source: list[Stage], reader: Stage = reader) -> float:
            return max(
                seconds(stage, reader, port, (stage.id, reader.id) not in edges)
                for stage in source
            )

        nearest = min(reversed(sources), key=cost)
        ways += [(stage.id, reader.id) for stage in nearest]
        sources.append([reader])
    return ways
