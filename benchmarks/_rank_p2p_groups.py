"""Who sends to whom where every rank is one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.plan.process_grid import P2PGroup
from raymm.scheduler.plan.stage import Edge, StageId


def p2p_groups_between_ranks(
    edges: Sequence[Edge], ranks: Mapping[StageId, int]
) -> tuple[tuple[Edge, tuple[P2PGroup, ...]], ...]:
    """Whose messages go along data edges and back, where every rank is one process.

    Args:
        edges: data edges between stages.
        ranks: of every stage.
    """
    return tuple(
        (edge, (P2PGroup((ranks[edge[0]],), (ranks[edge[1]],), direction),))
        for src, dst in edges
        if ranks[src] != ranks[dst]
        for edge, direction in (
            ((src, dst), Direction.FORWARD), ((dst, src), Direction.BACKWARD),
        )
    )
