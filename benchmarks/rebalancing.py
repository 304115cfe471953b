"""Claim: rebalancing recovers the step time that is lost when costs drift.

Run with `python -m benchmarks.rebalancing --json --data a.json b.json`.

Simulated steps on real sample sizes, from files as `benchmarks.minibatch` reads them. A plan runs
step by step in the simulator, with seconds from true costs that change at one step, and noise on
every microbatch; raymm sees only timelines, as in a run. Figures per kind of drift:

- `slowness_*`: simulated seconds of steps over the seconds of work in them (on replicas of equal
  speed), relative to those before the drift: `plain` without rebalancing, `rebalanced` at the end
  of the run, `known` for steps planned with the true costs;
- `gain`: `plain` over `rebalanced`, less one;
- `efficiency_*`: mean over largest seconds of a step's microbatches, module by module;
- `error_*`: error of predicted seconds of microbatches, before they were fitted: at the drift and
  at the end; `noise` is the part that no model can predict;
- `decisions`: steps after which the rest of the epoch was planned again;
- `fit_ms`, `look_s`, `replan_s`: CPU time of a step's fit, of an evaluation (with trial plans and
  simulated steps), of planning the rest of the epoch.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.minibatch import joined, read
from benchmarks.shared import common
from raymm.data import RebalanceConfig
from raymm.data.sampling.group_sampler import Groups, GroupSampler
from raymm.data.sampling.rebalanced_sampler import RebalancedSampler
from raymm.monitor.metrics import DECISIONS as FILE
from raymm.monitor.rebalancing import Rebalancing
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.minibatch.measured_costs import (
    MeasuredCosts,
    ModuleCost,
    efficiency,
    group_units,
)
from raymm.scheduler.minibatch.problem import SampleSizes
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.timeline import Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate

MICROBATCHES, SAMPLES = 8, 4
STEPS, DRIFT_AT, EVERY = 400, 125, 50
LAST = 50  # steps at the end over which figures are averaged
NOISE = 0.05
FORWARD = 1 / 3  # share of a microbatch's seconds


def plan() -> Plan:
    """Return a plan with an encoder on one rank and two replicas of a two-stage language model."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * 2)), (("vision", "llm"),)
    )
    stages = [Stage("vision", 0, (0, 1), 0)]
    for copy in range(2):
        stages += [Stage("llm", i, (i, i + 1), 1 + 2 * copy + i, replica=copy) for i in range(2)]
    return Plan(graph, tuple(stages), MICROBATCHES)


def truths(sizes: SampleSizes) -> dict[str, tuple[MeasuredCosts, MeasuredCosts]]:
    """Return costs before and after the drift.

    A mean microbatch takes the encoder 0.2 s and the language model 1 s, so that all ranks are
    about equally busy.
    """
    tiles, tokens = (total * SAMPLES / len(sizes) for total in sizes.totals)
    squares = float((sizes.values[:, 1].astype(np.float64) ** 2).mean()) * SAMPLES

    def costs(
        attention: float, vision: float = 0.2, copies: tuple[float, ...] = ()
    ) -> MeasuredCosts:
        modules = {
            "vision": ModuleCost(0.01, vision / tiles),
            "text": ModuleCost(0.02, (1 - attention) / tokens, attention / squares),
        }
        return MeasuredCosts(modules, {"text": copies} if copies else {})

    return {
        "no drift": (costs(0.1), costs(0.1)),
        "attention half of it": (costs(0.1), costs(0.5)),
        "a copy 1.2 times as slow": (costs(0.1), costs(0.1, copies=(1.0, 1.2))),
        "a copy 1.5 times as slow": (costs(0.1), costs(0.1, copies=(1.0, 1.5))),
        "a copy 3 times as slow": (costs(0.1), costs(0.1, copies=(1.0, 3.0))),
        "all three": (costs(0.1), costs(0.5, 0.3, (1.0, 1.5))),
    }


class Simulated:
    """Simulated steps under true costs: their timelines, and their time relative to their work."""

    def __init__(self, sizes: SampleSizes) -> None:
        self._sizes, self._plan = sizes, plan()
        self._program = full_program(self._plan)

    def seconds(self, groups: Groups, costs: MeasuredCosts) -> np.ndarray:
        """Return seconds, (microbatches, modalities)."""
        return costs.seconds(self._sizes.names, *group_units(self._sizes, groups, True))

    def timeline(self, seconds: np.ndarray) -> Timeline:
        """Return the timeline of a step whose microbatches take these seconds."""
        costs = {}
        for module, column in (("vision", 0), ("llm", 1)):
            replicas = self._plan.replicas(module)
            for m in range(len(seconds)):
                replica = replicas[m % len(replicas)]
                for stage in replica:
                    each = float(seconds[m, column]) / len(replica)
                    costs[stage.id, Op.FORWARD, m] = each * FORWARD
                    costs[stage.id, Op.BACKWARD, m] = each * (1 - FORWARD)
        posted = self._plan.posted_receives
        return simulate(self._program, {}, microbatch_costs=costs, posted=posted)

    def slowness(self, steps: list[Groups], costs: MeasuredCosts) -> float:
        """Return seconds over seconds of work, for steps with all their microbatches."""
        even = MeasuredCosts(costs.modules)
        steps = [groups for groups in steps if len(groups) == MICROBATCHES]
        whole = sum(self.timeline(self.seconds(groups, costs)).makespan for groups in steps)
        return whole / sum(float(self.seconds(groups, even).sum()) for groups in steps)

    def efficiency(self, steps: list[Groups], costs: MeasuredCosts) -> float:
        """Return the mean efficiency over steps."""
        return statistics.fmean(efficiency(self.seconds(groups, costs).T) for groups in steps)


@contextmanager
def timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Record the CPU seconds of every call of an object's method."""
    original: Callable = getattr(owner, name)
    seconds: list[float] = []

    def call(*args: Any) -> Any:
        start = time.process_time()
        result = original(*args)
        seconds.append(time.process_time() - start)
        return result

    setattr(owner, name, call)
    yield seconds
    setattr(owner, name, original)


def run(sizes: SampleSizes, before: MeasuredCosts, after: MeasuredCosts) -> dict[str, Any]:
    """Simulate a run with rebalancing, and its alternatives."""
    simulated = Simulated(sizes)
    sampler = RebalancedSampler(sizes, MICROBATCHES, SAMPLES)
    random = np.random.default_rng(0)
    steps: list[Groups] = []
    errors: list[float | None] = []
    noise: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        live = Rebalancing(
            RebalanceConfig(every=EVERY), sampler, plan(), True, Path(folder), 0, lambda line: None
        )
        with (
            timed(live._fit, "observe") as fits, timed(live, "_look") as looks,
            timed(sampler, "replanned") as replans,
        ):
            for number, (groups, state) in enumerate(islice(sampler.batches(), STEPS), 1):
                seconds = simulated.seconds(groups, before if number <= DRIFT_AT else after)
                factors = random.lognormal(0, NOISE, seconds.shape)
                row = live.after_step(
                    number, state, len(groups), len(groups) == MICROBATCHES,
                    simulated.timeline(seconds * factors),
                )
                steps.append(groups)
                errors.append(row.get("costs", {}).get("error"))
                noise.append(float(np.abs(seconds * (factors - 1)).sum() / seconds.sum()))
        log = [json.loads(line) for line in (Path(folder) / FILE).read_text().splitlines()]
    taken = [sample for groups in steps for group in groups for sample in group]
    if len(set(taken)) != len(taken):
        raise SystemExit("a sample was repeated")  # fewer steps than an epoch has

    plain = [g for g, _ in islice(GroupSampler(sizes, MICROBATCHES, SAMPLES).batches(), STEPS)]
    known = RebalancedSampler(sizes, MICROBATCHES, SAMPLES)
    batches = known.batches()
    next(batches)
    known.adopt(after)
    known_steps = [groups for groups, _ in islice(batches, STEPS)]
    unit = simulated.slowness(plain[:DRIFT_AT], before)
    ends = {"plain": plain[-LAST:], "rebalanced": steps[-LAST:], "known": known_steps[-LAST:]}
    slowness = {name: simulated.slowness(found, after) / unit for name, found in ends.items()}
    return {
        **{f"slowness_{name}": round(value, 4) for name, value in slowness.items()},
        "gain": round(slowness["plain"] / slowness["rebalanced"] - 1, 4),
        **{
            f"efficiency_{name}": round(simulated.efficiency(found, after), 4)
            for name, found in ends.items()
        },
        "error_at_drift": round(errors[DRIFT_AT], 4),
        "error_at_end": round(statistics.fmean(e for e in errors[-LAST:] if e is not None), 4),
        "noise": round(statistics.fmean(noise), 4),
        "decisions": [row["step"] for row in log if row["decision"] is not None],
        "fit_ms": round(1e3 * statistics.median(fits), 3),
        "look_s": round(statistics.median(looks), 3),
        "replan_s": round(statistics.median(replans), 3) if replans else None,
    }


def tables(result: dict[str, Any]) -> Table:
    """Return a table with one row per kind of drift."""
    table = Table(title=f"{result['samples']} samples, drift at step {DRIFT_AT} of {STEPS}")
    kinds = result["drifts"]
    table.add_column("drift")
    for name in next(iter(kinds.values())):
        table.add_column(name, justify="right")
    for kind, row in kinds.items():
        table.add_row(kind, *(str(value) for value in row.values()))
    return table


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="files of sample sizes")
    args = parser.parse_args()
    sizes = joined([read(path) for path in args.data])
    kinds = truths(sizes)
    run(sizes, *next(iter(kinds.values())))  # compile first
    result = {
        "benchmark": "rebalancing", "machine": common.machine(), "samples": len(sizes),
        "microbatches": MICROBATCHES, "noise": NOISE,
        "drifts": {name: run(sizes, *costs) for name, costs in kinds.items()},
    }
    common.console().print(tables(result))
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
