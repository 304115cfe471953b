"""Claim: the planner is fast, and its joint search beats simpler partitioning.

Run with `python -m benchmarks.planner --json`.

- seconds to cut 300 layers into 24 stages (the exact probe, and the dynamic programme that also
  takes cut costs into account), to simulate 24 ranks x 24 microbatches, and to lower them;
- the 27 models of Cornstarch v1 (analytic costs, 24 microbatches) on 8, 12 and 16 ranks: iteration
  time under 1F1B of Cornstarch's Algorithm 1, of a search that ignores frozen modules, and of equal
  numbers of layers per stage, relative to the exact joint search;
- ``shared_forwards``: the fastest iteration over that of ``microbatch_factor`` 1 on the same
  stages, for the models with size M encoders and a size S language model on 3 ranks, if a fraction
  of the encoders' seconds is spent for any number of items. Predicted.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from benchmarks.baselines.loosely_coupled import loosely_coupled
from benchmarks.baselines.parametric_partition import partition_layers
from benchmarks.baselines.pipelines import unaware_work
from benchmarks.shared import common
from benchmarks.valm_configs import MICROBATCHES, TRAINABLE, VALM_CONFIGS, ValmConfig, valm_profile
from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import iteration_time, lower, refine
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search.evaluation import evaluate
from raymm.scheduler.search.factor_search import search_factors
from raymm.scheduler.search.partition import (
    cost_matrix,
    even_layers,
    partition_matrix,
)
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import StageSpace

BUDGETS = (8, 12, 16)
ROUNDS = 15
RANKS = 3  # of plans that share forwards


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--limit", type=int, default=len(VALM_CONFIGS), help="configurations")
    args = options.parse_args()
    console = common.console()
    result = {"machine": common.machine(), **speeds(), "shared_forwards": shared_forwards()}
    for size in "SML":  # count layers once, before the processes fork
        valm_profile(size, size, size)
    tasks = [
        (config, trainable, ranks)
        for trainable in TRAINABLE for config in VALM_CONFIGS[: args.limit] for ranks in BUDGETS
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(compare, tasks, chunksize=4))
    for trainable in TRAINABLE:
        mine = [r for (_, kind, _), r in zip(tasks, found, strict=True) if kind == trainable]
        for name in ("algorithm_1", "algorithm_1_relaxed", "unaware", "even_layers"):
            values = [one[name] for one in mine if one[name] is not None]
            result[f"{name}_{trainable}_median"] = round(statistics.median(values), 4)
            result[f"{name}_{trainable}_max"] = round(max(values), 4)
            if len(values) < len(mine):
                result[f"{name}_{trainable}_without_plan"] = len(mine) - len(values)
        result[f"joint_search_{trainable}_s_max"] = round(max(r["seconds"] for r in mine), 3)
    for key, value in result.items():
        if key != "machine":
            console.print(f"{key:36} {value}", highlight=False)
    common.emit(result, args.json)


def compare(task: tuple[ValmConfig, str, int]) -> dict[str, float | None]:
    """Return iteration times relative to the joint search's; None without a plan."""
    config, trainable, ranks = task
    graph, profile = valm_profile(config.llm, config.vision, config.audio, trainable)
    space = StageSpace(graph, profile, ranks, MICROBATCHES, recompute=True)
    start = time.perf_counter()
    best = joint_search(space, iteration_time, lower_bound, alternatives=0).best.seconds
    result: dict[str, float | None] = {"seconds": time.perf_counter() - start}
    expecting = replace(space, expected=unaware_work(graph, profile))

    def unaware() -> float:
        """Return the iteration time under true costs of a plan that assumes all modules are
        trained.
        """
        everything = replace(graph, nodes=tuple(
            replace(node, trainable=(True,) * node.num_layers) for node in graph.nodes
        ))
        imagined = replace(space, graph=everything)
        counts = joint_search(imagined, iteration_time, lower_bound, alternatives=0).best.counts
        return iteration_time(expecting.plan(counts))

    def even() -> float:
        blocks = {node.name: node.num_layers for node in graph.nodes}
        total, left = sum(blocks.values()), ranks - len(blocks)
        counts = {name: 1 + round(left * n / total) for name, n in blocks.items()}
        while sum(counts.values()) > ranks:
            counts[max(counts, key=counts.__getitem__)] -= 1
        plan = space.made_of({n: even_layers(blocks[n], k) for n, k in counts.items()})
        return iteration_time(plan)

    for name, run in (
        ("algorithm_1", lambda: loosely_coupled(space, iteration_time).best.seconds),
        ("algorithm_1_relaxed",
         lambda: loosely_coupled(space, iteration_time, relax=True).best.seconds),
        ("unaware", unaware),
        ("even_layers", even),
    ):
        try:
            result[name] = run() / best
        except NoPlanError:
            result[name] = None
    return result


def shared_forwards() -> dict[str, float]:
    """Return relative iteration times by trained modules and fraction of fixed seconds."""
    result = {}
    for trainable in TRAINABLE:
        graph, profile = valm_profile("S", "M", "M", trainable)
        space = StageSpace(graph, profile, RANKS, MICROBATCHES)
        plan = joint_search(space, iteration_time, lower_bound, alternatives=0).best.plan
        for fraction in (0.25, 0.5, 0.75):
            fixed = replace(profile, fixed=dict.fromkeys(("vision", "audio"), fraction))
            option, _ = evaluate(replace(plan, profile=fixed), Network())
            best = search_factors(option, Network(), ("vision", "audio"), SearchControl())
            result[f"{trainable} {fraction}"] = round(best.seconds / option.seconds, 4)
    return result


def speeds() -> dict[str, float]:
    """Return medians in milliseconds."""
    generator = random.Random(0)
    costs = [generator.uniform(1, 10) for _ in range(300)]
    graph = ModuleGraph((ModuleNode("llm", (True,) * 24),), ())
    profile = CostProfile({"llm": (LayerCost(1.0, 1.0, 1.0, 100, 0, 1),) * 24})
    stages = tuple(Stage("llm", i, (i, i + 1), i) for i in range(24))
    plan = Plan(graph, stages, 24, "1f1b", profile)
    better, _ = refine(replace(plan, schedule="zero_bubble"))
    present, seconds = [["llm"]] * 24, op_seconds(plan)
    program = lower(plan, present)
    return {
        "partition_300_24_ms": _median_ms(lambda: partition_layers(costs, 24)),
        "partition_300_24_with_cuts_ms": _median_ms(
            lambda: partition_matrix(cost_matrix(costs, None), 24, None)
        ),
        "simulate_24x24_ms": _median_ms(lambda: simulate(program, seconds)),
        "lower_1f1b_24x24_ms": _median_ms(lambda: lower(plan, present)),
        "lower_zero_bubble_24x24_ms": _median_ms(lambda: lower(better, present)),
    }


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 3)


if __name__ == "__main__":
    main()
