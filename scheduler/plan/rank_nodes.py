"""Placement of processes on nodes. The processes of a rank, and among them first those that share
parameters, are placed on one node where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Degrees


class RankNodes(NamedTuple):
    """Place and node of each process; nodes are numbered in the order of processes."""

    places: tuple[int, ...]
    nodes: tuple[int, ...]


def rank_nodes(ranks: Sequence[Degrees], place_nodes: Sequence[str]) -> RankNodes:
    """Place ranks on nodes, wide ranks first. ``place_nodes`` has the node of each place; there
    must be at least as many places as processes.

    A rank goes to the node of the previous rank, or else to the first node with room for all of it.
    If there is none, its tensor-parallel groups are placed the same way, and if necessary single
    processes. As degrees are mostly powers of two, a rank spans nodes only if that is unavoidable.
    """
    free: dict[str, list[int]] = {}
    for bundle, node in enumerate(place_nodes):
        free.setdefault(node, []).append(bundle)
    current = next(iter(free), "")
    firsts, count = [], 0
    for degrees in ranks:
        firsts.append(count)
        count += prod(degrees)
    bundles = [0] * count

    def put(processes: range, sizes: Sequence[int]) -> None:
        nonlocal current
        ready = [node for node in (current, *free) if len(free[node]) >= len(processes)]
        if ready:
            current = ready[0]
            for process in processes:
                bundles[process] = free[current].pop(0)
            return
        # Use as few nodes as possible.
        for node in sorted(free, key=lambda node: -len(free[node])):
            free[node] = free.pop(node)
        current = next(iter(free))
        for first in range(processes.start, processes.stop, sizes[0]):
            put(range(first, first + sizes[0]), sizes[1:])

    for rank in sorted(range(len(ranks)), key=lambda rank: -prod(ranks[rank])):
        first = firsts[rank]
        put(range(first, first + prod(ranks[rank])), (ranks[rank].tp, 1))
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(place_nodes[bundle], len(numbers)) for bundle in bundles]
    return RankNodes(tuple(bundles), tuple(nodes))


def on_nodes(plan: Plan, nodes: Sequence[int]) -> Plan:
    """Return the plan with the node of each process in the profile's links, if it has links."""
    if plan.profile is None or plan.profile.links is None:
        return plan
    links = replace(plan.profile.links, nodes=tuple(nodes))
    return replace(plan, profile=replace(plan.profile, links=links))


def straddling(plan: Plan, nodes: Sequence[int]) -> str | None:
    """Return a text that names the ranks whose groups span nodes, or None. ``nodes`` has the node
    of each process."""
    texts = []
    for rank in range(plan.num_ranks):
        process_nodes = [nodes[process] for process in plan.rank_processes(rank)]
        degrees = plan.degrees(rank)
        if len(set(process_nodes)) == 1:
            continue
        groups = [
            process_nodes[first : first + degrees.tp]
            for first in range(0, len(process_nodes), degrees.tp)
        ]
        kinds = [kind for kind in ("cp", "fsdp") if getattr(degrees, kind) > 1]
        if any(len(set(group)) > 1 for group in groups):
            kinds = ["tp", *kinds]
        shared = ", ".join(f"{kind} {getattr(degrees, kind)}" for kind in kinds)
        stages = ", ".join(str(stage.id) for stage in plan.rank_stages(rank))
        texts.append(
            f"rank {rank} ({stages}; {shared}) has processes on {len(set(process_nodes))} nodes"
        )
    if not texts:
        return None
    omitted = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return f"process groups span nodes and use slower links: {'; '.join(texts[:SHOWN])}{omitted}"


# Number of ranks that the text names.
SHOWN = 4
