"""Plans for schedules with little memory: seeded random graphs with 1 to 4 encoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.stage_space import StageSpace

MOST_RANKS = 24
ENCODERS = (1, 4)
MICROBATCHES = (3, 5, 7, 9, 13, 17, 25, 33)
LAYERS = {"encoder": (8, 33), "llm": (16, 49)}


def tight_plans(count: int, seed: int = 0) -> Iterator[Plan]:
    """Yield zero-bubble plans with one stage per rank and a profile.

    By default they may hold as many activations as 1F1B does. Every third one is limited on each
    rank to what 1F1B holds on that rank.

    Encoders feed the language model, or one of them feeds another. A module is frozen, trained, or
    has a trained last layer; either all stages recompute or none. Seconds and bytes of a module's
    layers are lognormal around those of an LLM layer, B_d and B_w within a third of F. Modules get
    stages in proportion to their work, so that the pipeline is about as balanced as its layers
    allow.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield _plan(rng)


def _plan(rng: np.random.Generator) -> Plan:
    names = [f"encoder{i}" for i in range(int(rng.integers(ENCODERS[0], ENCODERS[1] + 1)))]
    edges = [(name, "llm") for name in names]
    if len(names) > 1 and rng.random() < 0.25:
        edges[0] = (names[0], names[1])
    ranks = int(rng.integers(len(names) + 1, MOST_RANKS + 1))
    nodes, modules = [], {}
    for name in [*names, "llm"]:
        size = int(rng.integers(*LAYERS["llm" if name == "llm" else "encoder"]))
        kind = rng.choice(["frozen", "trained", "last"], p=[0.3, 0.5, 0.2])
        nodes.append(ModuleNode(name, tuple(
            kind == "trained" or (kind == "last" and i == size - 1) for i in range(size)
        )))
        forward = float(rng.lognormal(0.0, 0.5)) * (1.0 if name == "llm" else 0.4)
        halves = forward * rng.uniform(0.67, 1.33, 2)
        kept = int(1000 * rng.lognormal(0.0, 0.5))
        cost = LayerCost(
            forward, float(halves[0]), float(halves[1]), kept, output_bytes=kept // 20
        )
        modules[name] = (cost,) * size
    graph = ModuleGraph(tuple(nodes), tuple(edges))
    space = StageSpace(
        graph, CostProfile(modules), ranks, int(rng.choice(MICROBATCHES)),
        recompute=bool(rng.random() < 0.4),
    )
    plan = replace(space.plan(_counts(space)), schedule="zero_bubble")
    return plan


def _counts(space: StageSpace) -> dict[str, int]:
    """Assign remaining ranks one by one to the module with the slowest stage."""
    counts = dict.fromkeys((node.name for node in space.graph.nodes), 1)
    for _ in range(space.ranks - len(counts)):
        more = [n for n in counts if counts[n] < space.graph.node(n).num_layers]
        if not more:
            break
        counts[max(more, key=lambda name: space.bottleneck(name, counts[name]))] += 1
    return counts
