"""P2P groups for ranks that are one process each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.plan.process_grid import P2PGroup
from raymm.scheduler.plan.stage import Edge, StageId


def p2p_groups_between_ranks(
    edges: Sequence[Edge], ranks: Mapping[StageId, int]
) -> tuple[tuple[Edge, tuple[P2PGroup, ...]], ...]:
    """Return the P2P groups of data edges, in both directions, if every rank is one process.

    Args:
        ranks: stage -> rank.
    """
    return tuple(
        (edge, (P2PGroup((ranks[edge[0]],), (ranks[edge[1]],), direction),))
        for src, dst in edges
        if ranks[src] != ranks[dst]
        for edge, direction in (
            ((src, dst), Direction.FORWARD), ((dst, src), Direction.BACKWARD),
        )
    )
