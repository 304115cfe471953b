"""Claim: plans per batch are faster than the schedules of other projects within the same memory.

Run with `python -m benchmarks.field_schedules --json`.

A language model of 8B parameters with encoders of 1B (vision) and 1.4B (audio) on 8 H100, at 40% of
the data sheet's rate, and batches whose samples have the sizes of AI2D and ChartQA or are drawn
from seeded distributions. Per batch, each *peer* runs its schedule on its layout with its
assignment of samples to microbatches; *auto* is
:func:`raymm.scheduler.minibatch.step_choice.choose_step` on the layout that was fastest for other
batches of the distribution. Messages are free.

All of them have the memory of the fullest rank of DAG 1F1B over all batches of a distribution, with
weights and optimizer state (of encoder replicas, a share, as under ZeRO-1). Peers that do not fit
are left out (null in the rows). It may exceed an H100's, and nothing is recomputed. Seconds are
relative to DAG 1F1B on the same batch, ``bound`` is all work of the batch divided by the ranks,
``peak_gib`` has the largest peak of activations.

- ``auto_over_best_peer_median``, ``_worst``: auto over the fastest peer of the same batch.
- ``fixed_loss_median``: the planned schedule on samples in their given order, over auto, for those
  batches that fit without regrouping.
- ``variability``: largest over mean load of a microbatch, by assignment (Entrain's figure).
- ``emulated_error``: largest error of the simulated step against stages that sleep on actors.
- ``choice_cpu_ms``: CPU of one choice for 64 ranks and 64 microbatches.
- ``order_over_fixed_median``: seconds of DAG 1F1B's layout with order and schedule per batch
  (``planning.per_batch``), over those in the given order.
- ``order_cpu_ms``: CPU of one such order for 64 ranks and 64 microbatches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.shared import common
from raymm.errors import NoPlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.minibatch.step_choice import (
    Groups,
    OrderChooser,
    StepChoice,
    choose_step,
    given_groups,
    group_loads,
    hierarchical_groups,
    level_groups,
    planned_step,
)
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.memory import GIB
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds, stage_costs
from raymm.scheduler.search.layouts import replicated
from raymm.scheduler.search.stage_space import StageSpace

RANKS, MICROBATCHES, SAMPLES = 8, 16, 64
TILE_TOKENS = 256
SIZES = common.REPOSITORY / "tests" / "support" / "minibatch_sizes.json"
AUTO_SCHEDULES = ("1f1b", "zero_bubble", "entrain", "dip", "bigmac", "optimus")
Draw = Callable[[np.random.Generator, int], dict[str, np.ndarray]]
Work = dict[str, np.ndarray]


def _stored(name: str) -> Draw:
    """Return samples of a data set: tiles and text tokens, with those of the tiles."""
    table = np.array(json.loads(SIZES.read_text())[name])
    sizes = np.repeat(table[:, :2], table[:, 2], axis=0).astype(float)

    def draw(draws: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        rows = sizes[draws.integers(0, len(sizes), count)]
        return {"vision": rows[:, 0] * 4 * TILE_TOKENS, "llm": rows[:, 1]}

    return draw


def _native(draws: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Draw images of any resolution, whose patches have a long tail; 4 patches are one token."""
    patches = np.clip(draws.lognormal(7.0, 1.0, count), 64, 16384)
    text = np.clip(draws.lognormal(5.5, 1.0, count), 8, 8192)
    return {"vision": patches, "llm": patches / 4 + text}


def _text_only(draws: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    sizes = _native(draws, count)
    text = draws.random(count) < 0.3
    longer = sizes["llm"] - sizes["vision"] / 4
    return {
        "vision": np.where(text, 0, sizes["vision"]),
        "llm": np.where(text, 3 * longer, sizes["llm"]),
    }


def _audio(draws: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    sizes = _native(draws, count)
    kind = draws.random(count)  # images, both, or audio alone
    vision = np.where(kind < 0.7, sizes["vision"], 0)
    audio = np.where(kind > 0.5, np.clip(draws.lognormal(6.5, 0.7, count), 50, 6000), 0)
    return {
        "vision": vision, "audio": audio,
        "llm": sizes["llm"] - (sizes["vision"] - vision) / 4 + audio / 2,
    }


DISTRIBUTIONS: dict[str, Draw] = {
    "ai2d": _stored("ai2d"), "chartqa": _stored("chartqa"), "native": _native,
    "text_only_30": _text_only, "audio": _audio,
}
# Layers, parameters and width of each module.
MODULES = {"vision": (40, 1e9, 1408), "audio": (32, 1.4e9, 1920), "llm": (32, 8e9, 4096)}
FLOPS_PER_SECOND = 0.4 * 989.4e12
# Bytes of activations per token and unit of width, of a layer with flash attention in bf16.
ACTIVATION_BYTES = 34


class Setting(NamedTuple):
    """A model for a distribution: a space of layouts at the mean load, and the mean tokens of a
    microbatch by module."""

    space: StageSpace
    mean: dict[str, float]

    def work(self, tokens: Mapping[str, np.ndarray]) -> Work:
        """Return each sample's work as a fraction of a mean microbatch's."""
        return {name: tokens[name] / self.mean[name] for name in self.mean}


def setting(draw: Draw) -> Setting:
    sample = draw(np.random.default_rng(0), 4096)
    mean = {name: float(t.mean()) * SAMPLES / MICROBATCHES for name, t in sample.items()}
    modules = {}
    for name, tokens in mean.items():
        layers, parameters, width = MODULES[name]
        seconds = 2 * parameters / layers * tokens / FLOPS_PER_SECOND
        modules[name] = (LayerCost(
            seconds, seconds, seconds, int(ACTIVATION_BYTES * width * tokens),
            int(4 * parameters / layers), int(2 * width * tokens),
        ),) * layers
    nodes = tuple(ModuleNode(name, (True,) * len(costs)) for name, costs in modules.items())
    graph = ModuleGraph(nodes, tuple((name, "llm") for name in modules if name != "llm"))
    return Setting(StageSpace(graph, CostProfile(modules), RANKS, MICROBATCHES), mean)


def separate(space: StageSpace) -> Plan:
    """Return a plan with separate ranks for each module, in proportion to its work."""
    counts = dict.fromkeys((node.name for node in space.graph.nodes), 1)
    while sum(counts.values()) < RANKS:
        counts[max(counts, key=lambda name: space.bottleneck(name, counts[name]))] += 1
    return space.plan(counts)


def tower(space: StageSpace) -> Plan:
    """Return a plan with all encoders on the first rank of the language model."""
    encoders = [node.name for node in space.graph.nodes if node.name != "llm"]
    return replicated(space, RANKS, dict.fromkeys(encoders, range(1)))


def segments(space: StageSpace) -> Plan:
    """Return a plan with a stage of every module on each rank."""
    stages = tuple(
        replace(stage, rank=stage.index) for node in space.graph.nodes
        for stage in space.plan(dict.fromkeys([n.name for n in space.graph.nodes], RANKS))
        .module_stages(node.name)
    )
    plan = space.plan(dict.fromkeys([node.name for node in space.graph.nodes], RANKS))
    return replace(plan, stages=stages, shared_ranks=None)


LAYOUTS: dict[str, Callable[[StageSpace], Plan]] = {
    "separate": separate, "tower": tower, "segments": segments,
    "replicated": lambda space: replicated(space, RANKS),
}
Assignment = Callable[[Work, Plan], Groups]


def as_given(work: Work, plan: Plan) -> Groups:
    return given_groups(len(work["llm"]), plan.num_microbatches)


PEERS: dict[str, tuple[str, Assignment]] = {
    "megatron": ("tower", as_given), "mimo": ("separate", as_given),
    "mimo_colocated": ("replicated", as_given), "entrain": ("separate", hierarchical_groups),
    "dip": ("segments", level_groups), "bigmac": ("replicated", as_given),
    "optimus": ("replicated", as_given),
}


def with_limits(plan: Plan, device: float, largest: float) -> Plan | None:
    """Return a plan whose activations fit on a device next to weights and optimizer state, and to
    temporary memory at the largest load; None if there is no room."""
    sizes, limits = stage_costs(plan), []
    for rank in range(plan.num_ranks):
        stages = plan.rank_stages(rank)
        temporary = max(sizes[s.id].remade_bytes for s in stages) * largest
        limits.append(int(device - _state(plan, rank) - temporary))
    return replace(plan, activation_limits=tuple(limits)) if min(limits) > 0 else None


def _state(plan: Plan, rank: int) -> float:
    sizes = stage_costs(plan)
    return sum(
        sizes[s.id].state_bytes * (0.25 + 0.75 / len(plan.replicas(s.module)))
        for s in plan.rank_stages(rank)
    )


def device_bytes(plan: Plan, works: list[Work]) -> tuple[float, float]:
    """Return the bytes that DAG 1F1B needs on its fullest rank, and the largest load."""
    most, largest = 0.0, 0.0
    for work in works:
        groups = as_given(work, plan)
        peaks = planned_step(plan, work, groups).peaks()
        most = max(most, *(peak + _state(plan, rank) for rank, peak in enumerate(peaks)))
        largest = max(largest, *(load.max() for load in group_loads(work, groups).values()))
    return most, largest


def peer_step(plan: Plan | None, name: str, work: Work, assign: Assignment) -> PlannedStep | None:
    if plan is None:
        return None
    plan = replace(plan, schedule=name)
    step = planned_step(plan, work, assign(work, plan))
    try:
        return step if step.seconds() else None
    except NoPlanError:
        return None


def total_seconds(plan: Plan, work: Work) -> float:
    """Return the seconds of all work of a batch."""
    costs = stage_costs(plan)
    return sum(
        work[s.module].sum() * (c.forward + c.backward_input + c.backward_weight)
        for s in plan.stages if not s.replica for c in [costs[s.id]]
    )


def auto(plans: list[Plan], work: Work) -> tuple[Plan, StepChoice] | None:
    """Return the fastest plan and choice of a batch."""
    options = []
    for plan in plans:
        try:
            options.append((plan, choose_step(plan, work, AUTO_SCHEDULES)))
        except NoPlanError:
            continue
    return min(options, key=lambda option: option[1].seconds) if options else None


class Outcome(NamedTuple):
    """Rows of a distribution, and the timelines of its last batch."""

    rows: list[dict[str, Any]]
    timelines: list[tuple[str, Timeline]]


def measure(name: str, batches: int) -> Outcome:
    draw = DISTRIBUTIONS[name]
    chosen = setting(draw)
    draws = np.random.default_rng(1)
    works = [chosen.work(draw(draws, SAMPLES)) for _ in range(batches + 1)]
    layouts = {key: make(chosen.space) for key, make in LAYOUTS.items()}
    device, largest = device_bytes(layouts["separate"], works)
    plans = {key: with_limits(plan, device, largest) for key, plan in layouts.items()}
    fitting = [plan for plan in plans.values() if plan is not None]
    first = auto(fitting, works[0])  # choose the layout on another batch
    assert first is not None
    layout = replace(first[0], schedule=first[1].schedule)
    orders = OrderChooser(layouts["separate"], ("1f1b", "zero_bubble"))
    rows, timelines = [], []
    for work in works[1:]:
        order = orders.choose(group_loads(work, as_given(work, layouts["separate"])))
        baseline = peer_step(layouts["separate"], "1f1b", work, as_given)
        assert baseline is not None
        steps = {"1f1b": baseline} | {
            peer: peer_step(plans[key], peer, work, assign) for peer, (key, assign) in PEERS.items()
        }
        choice = choose_step(layout, work, AUTO_SCHEDULES)
        best = planned_step(replace(layout, schedule=choice.schedule), work, choice.groups)
        steps["auto"] = best
        seconds = {key: step.seconds() for key, step in steps.items() if step is not None}
        fastest = min(value for key, value in seconds.items() if key != "auto")
        rows.append({
            "distribution": name, "auto_schedule": choice.schedule,
            "auto_layout": next(k for k, p in plans.items() if p and p.stages == layout.stages),
            "over_1f1b": {
                key: round(seconds[key] / seconds["1f1b"], 4) if key in seconds else None
                for key in steps
            },
            "bound": round(total_seconds(layout, work) / RANKS / seconds["1f1b"], 4),
            "peak_gib": {
                key: round(max(step.peaks()) / GIB, 2) for key, step in steps.items()
                if step is not None
            },
            "auto_over_best_peer": seconds["auto"] / fastest,
            "order_over_fixed": order.seconds / order.fixed_seconds,
            "fixed_loss": choice.fixed_seconds / choice.seconds
            if isfinite(choice.fixed_seconds) else None,
            "variability": {
                label: round(max(
                    float(load.max() / load.mean())
                    for load in group_loads(work, assign(work, layout)).values()
                ), 3)
                for label, assign in (("given", as_given), ("level", level_groups),
                                      ("hierarchical", hierarchical_groups))
            },
        })
        timelines = [(key, timeline(step)) for key, step in steps.items() if step is not None]
    return Outcome(rows, timelines)


def timeline(step: PlannedStep) -> Timeline:
    costs = {
        (stage, op, number): seconds * step.loads[stage.module][number]
        for (stage, op), seconds in op_seconds(step.plan).items()
        for number in range(step.num_microbatches)
    }
    return simulate(step.program, {}, microbatch_costs=costs, posted=step.plan.posted_receives)


def cpu_ms() -> dict[str, float]:
    """Return the CPU milliseconds of a choice, and of an order, for 64 ranks and 64 microbatches,
    once compiled."""
    layers = (LayerCost(1.0, 1.0, 1.0, 1000, 1000, 10),) * 64
    graph = ModuleGraph(
        (ModuleNode("vision", (True,) * 16), ModuleNode("llm", (True,) * 48)), (("vision", "llm"),)
    )
    space = StageSpace(
        graph, CostProfile({"vision": layers[:16], "llm": layers[:48]}), 64, 64
    )
    plan = space.plan({"vision": 16, "llm": 48})
    draws = np.random.default_rng(0)
    work = {name: draws.lognormal(0.0, 0.7, 256) / 5 for name in ("vision", "llm")}
    orders = OrderChooser(plan)
    loads = group_loads(work, as_given(work, plan))
    calls: dict[str, Callable[[], Any]] = {
        "choice_cpu_ms": lambda: choose_step(plan, work, ("1f1b",)),
        "order_cpu_ms": lambda: orders.choose(loads),
    }
    result = {}
    for name, call in calls.items():
        spent = []
        for _ in range(4):
            began = time.process_time()
            call()
            spent.append(time.process_time() - began)
        result[name] = round(1e3 * min(spent), 1)
    return result


def _rows(outcomes: list[Outcome]) -> Iterator[dict[str, Any]]:
    for outcome in outcomes:
        yield from outcome.rows


def table(outcomes: list[Outcome]) -> Table:
    result = Table(title="seconds of a step over DAG 1F1B (medians)")
    keys = ("1f1b", *PEERS, "auto")
    for heading in ("sizes", *keys, "bound"):
        result.add_column(heading, justify="right")
    for outcome in outcomes:
        cells = [outcome.rows[0]["distribution"]]
        for key in keys:
            values = [row["over_1f1b"][key] for row in outcome.rows if row["over_1f1b"][key]]
            cells.append(f"{statistics.median(values):.3f}" if values else "none")
        cells.append(f"{statistics.median(row['bound'] for row in outcome.rows):.3f}")
        result.add_row(*cells)
    return result


def main() -> int:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--batches", type=int, default=4, help="batches per distribution")
    options.add_argument("--distributions", nargs="+", default=list(DISTRIBUTIONS),
                         choices=list(DISTRIBUTIONS))
    options.add_argument("--no-actors", action="store_true", help="leave out sleeping stages")
    options.add_argument("--picture", type=Path, help="draw all schedules of one batch (.png)")
    chosen: argparse.Namespace = options.parse_args()
    out = common.console()
    outcomes = [measure(name, chosen.batches) for name in chosen.distributions]
    rows = list(_rows(outcomes))
    ratios = [row["auto_over_best_peer"] for row in rows]
    result: dict[str, Any] = {
        "benchmark": "field_schedules",
        "auto_over_best_peer_median": round(statistics.median(ratios), 4),
        "auto_over_best_peer_worst": round(max(ratios), 4),
        "fixed_loss_median": round(statistics.median(
            row["fixed_loss"] for row in rows if row["fixed_loss"] is not None
        ), 4),
        "order_over_fixed_median": round(
            statistics.median(row["order_over_fixed"] for row in rows), 4
        ),
        **cpu_ms(),
    }
    if not chosen.no_actors:
        from benchmarks.devices.sleeping_batches import emulated_errors

        errors = emulated_errors()
        result["emulated_error"] = round(max(map(abs, errors.values())), 4)
        result["emulated_errors"] = {key: round(value, 4) for key, value in errors.items()}
    out.print(table(outcomes), result)
    if chosen.picture:
        from raymm.draw import draw_timelines

        draw_timelines(
            outcomes[-1].timelines, chosen.picture, title="One batch under each schedule",
            rank_names={rank: f"rank {rank}" for rank in range(RANKS)},
        )
    common.emit({**result, "rows": rows, "machine": common.machine()}, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
