"""Edges between replicas: exactly those that some sample or microbatch passes through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.graph.sample_ranges import share
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.plan.stage_edges import joined, stage_edges
from tests.support.random_plans import alignment, plans

REPLICAS = st.integers(1, 6)


def replicas(module: str, count: int, split: str) -> list[Stage]:
    return [Stage(module, 0, (0, 1), i, replica=i, split=split) for i in range(count)]


@given(REPLICAS, REPLICAS)
def test_replicas_that_share_a_microbatch_are_connected(p: int, c: int) -> None:
    producers, consumers = replicas("a", p, "microbatches"), replicas("b", c, "microbatches")
    expected = {(producers[m % p], consumers[m % c]) for m in range(p * c)}
    pairs = joined(producers, consumers)
    assert set(pairs) == expected and len(pairs) == len(expected)


@given(REPLICAS, REPLICAS)
def test_replicas_that_share_a_sample_are_connected(p: int, c: int) -> None:
    producers, consumers = replicas("a", p, "samples"), replicas("b", c, "samples")
    expected = {
        (producers[i], consumers[j]) for size in range(1, 2 * p * c + 1)
        for i in range(p) for j in range(c) if share(size, i, p).meet(share(size, j, c))
    }
    pairs = joined(producers, consumers)
    assert set(pairs) == expected and len(pairs) == len(expected)
    everything = joined(producers, consumers, every=True)
    assert len(set(everything)) == len(everything) == p * c


@given(REPLICAS, REPLICAS)
def test_a_split_and_a_whole_microbatch_connect_all(p: int, c: int) -> None:
    producers, consumers = replicas("a", p, "samples"), replicas("b", c, "microbatches")
    pairs = joined(producers, consumers)
    assert len(set(pairs)) == len(pairs) == p * c


@given(plans())
def test_edges_of_a_plan_without_replicas(plan) -> None:
    chains = {node.name: [stage.id for stage in plan.module_stages(node.name)]
              for node in plan.graph.nodes}  # fmt: skip
    expected = {(a, b) for ids in chains.values() for a, b in zip(ids, ids[1:], strict=False)}
    expected |= {(chains[a][-1], chains[b][0]) for a, b in plan.graph.edges}
    edges = stage_edges(plan.graph, {m: plan.replicas(m) for m in chains})
    assert set(edges) == expected and len(edges) == len(expected)
    assert len(stage_edges(alignment(1).graph, {
        m: alignment(1).replicas(m) for m in ("vision", "audio", "llm")
    })) == 5
