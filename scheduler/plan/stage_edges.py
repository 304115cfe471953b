"""Data edges between the stages of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import gcd

from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.stage import Edge, Stage

SAMPLES = "samples"


def stage_edges(
    graph: ModuleGraph, replicas: Mapping[str, Sequence[Sequence[Stage]]]
) -> tuple[Edge, ...]:
    """Return the directed data edges between stages, within and between modules. Two replicas are
    connected only if some samples may pass through both."""
    edges: list[Edge] = []
    for node in graph.nodes:
        for replica in replicas[node.name]:
            edges += pairwise(stage.id for stage in replica)
    for producer, consumer in graph.edges:
        firsts = [replica[-1] for replica in replicas[producer]]
        seconds = [replica[0] for replica in replicas[consumer]]
        every = (producer, consumer) in graph.every
        edges += [(a.id, b.id) for a, b in joined(firsts, seconds, every)]
    return tuple(edges)


def joined(
    producers: Sequence[Stage], consumers: Sequence[Stage], every: bool = False
) -> list[tuple[Stage, Stage]]:
    """Return the pairs of stages of two modules that some samples may pass through, given one stage
    of each replica. ``every`` is True if each consumer reads all samples."""
    splits = producers[0].split, consumers[0].split
    if SAMPLES not in splits:
        # Microbatch m goes through replica m % p of the producer and m % c of the consumer.
        period = gcd(len(producers), len(consumers))
        return [
            (producer, consumer) for number, producer in enumerate(producers)
            for consumer in consumers[number % period :: period]
        ]
    if every or splits != (SAMPLES, SAMPLES):
        return list(product(producers, consumers))
    # Shares i of p and j of c have common samples only if [i/p, (i+1)/p) and [j/c, (j+1)/c)
    # intersect, and then they do for some sizes
    # (:func:`~raymm.scheduler.graph.sample_ranges.share`).
    p, c = len(producers), len(consumers)
    return [
        (producers[i], consumers[j]) for i in range(p)
        for j in range(i * c // p, -(-(i + 1) * c // p))
    ]
