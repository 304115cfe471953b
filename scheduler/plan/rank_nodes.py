"""Which process of a plan runs where, from where its places came to lie: processes that talk most,
those of a rank, and of these the ones that share parameters, have one node where that can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Degrees


class RankNodes(NamedTuple):
    """Places of processes.

    Attributes:
        places: by process, the place that it gets.
        nodes: by process, its node, numbered in the order of processes.
    """

    places: tuple[int, ...]
    nodes: tuple[int, ...]


def rank_nodes(ranks: Sequence[Degrees], place_nodes: Sequence[str]) -> RankNodes:
    """Put ranks on nodes: wide ones first, each on the node on which the last one went, or else the
    first that has room for all of it. Where none has, its tensor parallel groups are put like that,
    and where none has room for one of these, its processes. As degrees are mostly powers of two,
    a rank straddles nodes only if there is no way in which it does not.

    Args:
        ranks: how each is several processes, which have their numbers in this order.
        place_nodes: of as many places as there are processes, or more, the node.
    """
    free: dict[str, list[int]] = {}
    for place, node in enumerate(place_nodes):
        free.setdefault(node, []).append(place)
    current = next(iter(free), "")
    firsts, count = [], 0
    for degrees in ranks:
        firsts.append(count)
        count += prod(degrees)
    places = [0] * count

    def put(processes: range, sizes: Sequence[int]) -> None:
        nonlocal current
        ready = [node for node in (current, *free) if len(free[node]) >= len(processes)]
        if ready:
            current = ready[0]
            for process in processes:
                places[process] = free[current].pop(0)
            return
        # Over as few nodes as can be.
        for node in sorted(free, key=lambda node: -len(free[node])):
            free[node] = free.pop(node)
        current = next(iter(free))
        for first in range(processes.start, processes.stop, sizes[0]):
            put(range(first, first + sizes[0]), sizes[1:])

    for rank in sorted(range(len(ranks)), key=lambda rank: -prod(ranks[rank])):
        first = firsts[rank]
        put(range(first, first + prod(ranks[rank])), (ranks[rank].tp, 1))
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(place_nodes[place], len(numbers)) for place in places]
    return RankNodes(tuple(places), tuple(nodes))


def on_nodes(plan: Plan, nodes: Sequence[int]) -> Plan:
    """A plan whose profile has the links between processes on these nodes, if it has links.

    Args:
        plan: the plan.
        nodes: by process, its node.
    """
    if plan.profile is None or plan.profile.links is None:
        return plan
    links = replace(plan.profile.links, nodes=tuple(nodes))
    return replace(plan, profile=replace(plan.profile, links=links))


def straddling(plan: Plan, nodes: Sequence[int]) -> str | None:
    """Which groups of a plan straddle nodes, for a person; None if none does.

    Args:
        plan: the plan.
        nodes: by process, its node.
    """
    texts = []
    for rank in range(plan.num_ranks):
        own = [nodes[process] for process in plan.rank_processes(rank)]
        degrees = plan.degrees(rank)
        if len(set(own)) == 1:
            continue
        groups = [own[first : first + degrees.tp] for first in range(0, len(own), degrees.tp)]
        kinds = [kind for kind in ("cp", "fsdp") if getattr(degrees, kind) > 1]
        if any(len(set(group)) > 1 for group in groups):
            kinds = ["tp", *kinds]
        shared = ", ".join(f"{kind} {getattr(degrees, kind)}" for kind in kinds)
        stages = ", ".join(str(stage.id) for stage in plan.rank_stages(rank))
        texts.append(f"rank {rank} ({stages}; {shared}) has processes on {len(set(own))} nodes")
    if not texts:
        return None
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return f"process groups span nodes and use slower links: {'; '.join(texts[:SHOWN])}{more}"


# Ranks that a text names.
SHOWN = 4
