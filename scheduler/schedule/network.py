"""Times of messages, from a plan's edges and the links between its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymm.scheduler.costs.devices import Link, Links
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.schedule.process_costs import gather_seconds
from raymm.scheduler.schedule.stage_costs import StageCost, edge_bytes, stage_costs


class Transfer(NamedTuple):
    """Time of one message of a directed edge: it occupies the link for ``seconds`` and arrives
    after another ``latency``. Messages of one edge are sent in sequence."""

    seconds: float = 0.0
    latency: float = 0.0

    @property
    def total(self) -> float:
        return self.seconds + self.latency


def edge_transfers(
    plan: Plan,
    within_node: Link,
    across_nodes: Link,
    ranks_per_node: int,
    sizes: Mapping[StageId, StageCost] | None = None,
) -> dict[Edge, Transfer]:
    """Return the time of one message per directed edge between two ranks. A gradient is as large as
    its output. Processes fill nodes in the order of their numbers.

    Between ranks of several processes every byte is sent once, over as many links as the end with
    fewer processes has (:mod:`raymm.scheduler.plan.resharding`). A module that sends to another
    module gathers its tokens first; one that sends back a gradient reduce-scatters it first.
    Afterwards the receivers all-gather their shares. All of this counts as latency: it delays the
    message but does not occupy a link between ranks.

    Args:
        sizes: bytes per stage; by default those of the plan.

    Raises:
        ValueError: no sizes are known, or ``ranks_per_node`` is below 1.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node is {ranks_per_node}; it must be at least 1")
    sizes = stage_costs(plan) if sizes is None else sizes
    links = Links(within_node, across_nodes, ranks_per_node)
    nodes = [
        frozenset(map(links.node, plan.rank_processes(rank))) for rank in range(plan.num_ranks)
    ]
    transfers = {}
    sent = edge_bytes(plan, sizes)
    for src, dst in plan.stage_edges:
        producer, consumer = plan.by_id[src], plan.by_id[dst]
        if producer.rank == consumer.rank:
            continue
        for edge, ends in (
            ((src, dst), (producer, consumer)), ((dst, src), (consumer, producer)),
        ):
            transfers[edge] = _transfer(plan, *ends, sent[src, dst], links, nodes)
    return transfers


def _transfer(
    plan: Plan, sender: Stage, receiver: Stage, size: int, links: Links,
    nodes: Sequence[frozenset[int]],
) -> Transfer:
    """Return the time of one message of ``size`` bytes, summed over processes; ``nodes`` has the
    nodes of each rank."""
    senders, receivers = plan.processes(sender.rank), plan.processes(receiver.rank)
    link, from_nodes, to_nodes = links.within_node, nodes[sender.rank], nodes[receiver.rank]
    if from_nodes != to_nodes:
        link = links.across_nodes
    seconds = size / min(senders, receivers) / link.bandwidth
    if sender.module == receiver.module:  # each share of the tokens is sent separately
        held = size * receiver.tp / receivers
        gathered = gather_seconds(held, receiver.tp, links.among(to_nodes))
    else:
        is_backward = receiver.module in plan.graph.producers(sender.module)
        sharing = senders if is_backward else senders // sender.tp
        gathered = gather_seconds(size, sharing, links.among(from_nodes))
        gathered += gather_seconds(size, receivers, links.among(to_nodes))
    return Transfer(seconds, link.latency + gathered)


@dataclass(frozen=True)
class Network:
    """Links between processes, which fill nodes in order. By default messages take no time."""

    within_node: Link = Link(0.0, float("inf"))
    across_nodes: Link = Link(0.0, float("inf"))
    ranks_per_node: int = 1_000_000

    @property
    def links(self) -> Links:
        """The same links, for communication within a rank."""
        return Links(self.within_node, self.across_nodes, self.ranks_per_node)

    def transfers(self, plan: Plan) -> dict[Edge, Transfer]:
        return edge_transfers(plan, self.within_node, self.across_nodes, self.ranks_per_node)

    def delays(self, plan: Plan) -> dict[Edge, float]:
        """Return the seconds of a message per directed edge, on a free link."""
        return delays(self.transfers(plan))


def delays(transfers: Mapping[Edge, Transfer]) -> dict[Edge, float]:
    """Return the seconds from a send to its arrival, on a free link, as lowerings use them."""
    return {edge: transfer.total for edge, transfer in transfers.items()}

