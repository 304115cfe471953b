"""How long messages take: from a plan's edges and the links between its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raymm.scheduler.devices import Link
from raymm.scheduler.plan import Plan
from raymm.scheduler.stage_costs import StageCost, stage_costs

Edge = tuple[str, str]


class Transfer(NamedTuple):
    """One message of a directed edge: ``seconds`` it occupies the link, then ``latency``
    until it is there. Messages of one edge follow one another."""

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
    sizes: Mapping[str, StageCost] | None = None,
) -> dict[Edge, Transfer]:
    """Per directed edge between two ranks, what one message takes. A gradient is as large as
    the output it belongs to. Ranks fill nodes in order.

    Args:
        plan: the plan.
        within_node, across_nodes: the links.
        ranks_per_node: how many ranks share a node.
        sizes: bytes per stage; the plan's own by default.

    Raises:
        ValueError: if no sizes are known, or ``ranks_per_node`` is below 1.
    """
    if ranks_per_node < 1:
        raise ValueError(f"ranks_per_node is {ranks_per_node}; it must be at least 1")
    sizes = stage_costs(plan) if sizes is None else sizes
    transfers = {}
    for src, dst in plan.stage_edges:
        ranks = plan.by_name[src].rank, plan.by_name[dst].rank
        if ranks[0] == ranks[1]:
            continue
        same = ranks[0] // ranks_per_node == ranks[1] // ranks_per_node
        link = within_node if same else across_nodes
        one = Transfer(sizes[src].output_bytes / link.bandwidth, link.latency)
        transfers[src, dst] = transfers[dst, src] = one
    return transfers


@dataclass(frozen=True)
class Network:
    """The links between ranks; ranks fill nodes in order. Messages take no time by default."""

    within_node: Link = Link(0.0, float("inf"))
    across_nodes: Link = Link(0.0, float("inf"))
    ranks_per_node: int = 1_000_000

    def transfers(self, plan: Plan) -> dict[Edge, Transfer]:
        """What a message takes, per directed edge."""
        return edge_transfers(plan, self.within_node, self.across_nodes, self.ranks_per_node)

    def delays(self, plan: Plan) -> dict[Edge, float]:
        """Seconds of a message per directed edge, if its link is free."""
        return delays(self.transfers(plan))


def delays(transfers: Mapping[Edge, Transfer]) -> dict[Edge, float]:
    """Seconds from a send to its arrival, on a free link: what lowerings take."""
    return {edge: transfer.total for edge, transfer in transfers.items()}

