"""Claim: mappings to shared GPUs are near-optimal and faster than those of other systems.

Run with `python -m benchmarks.mapping_solver --json`.

Random seeded problems of three kinds (a star of encoders, backbone and decoders; layered graphs;
independent modules) with roofline-shaped surfaces and interference, on 8 and 32 GPUs in steps of a
tenth. Keys of the result, n being the number of modules:

- `optimality_<n>_min`, `_median`: seconds of the best known mapping over those of `auto`'s; the
  best is its own if proven optimal, else the better of it and a long run of `exact`;
- `proven_<n>_min`, `_median`: the same with the highest proven lower bound instead;
  `proven_optimal_<n>`: share of problems in which the ratio is 1;
- `seconds_<n>`, `seconds_<n>_median`: CPU seconds of `auto`, one thread;
- `greedy_optimality_<n>_min`, `_median`, `greedy_seconds_<n>`: the same for Algorithm 1;
- `over_megatron`, `over_distmm`, `over_spindle`: medians of iteration time over `auto`'s, with 12
  modules;
- `memory_*`: for problems that are short of memory over a full iteration, the slowdown of mappings
  that fit, over the lower bound, and CPU seconds of finding them;
- `performance_model`: per number of modules, errors (mean of |predicted / measured - 1|) for plans
  and modules that were not fitted, with 5 % noise on fitted and measured values; `_true`: against
  the time without noise (the noise alone makes 4.0 %); R² of the delay, both ways. The ground truth
  is a closed queueing network (`benchmarks.shared.colocations`), not eq. 8. `blind`, `additive` and
  `full`, the latter with the coupling that also holds for three or more modules on a GPU;
  `full_eq8`: with eq. 8's product.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.baselines.mappings import distmm, megatron, spindle
from benchmarks.shared import common
from benchmarks.shared.colocations import random_colocations
from benchmarks.shared.mapping_instances import KINDS, random_problem
from raymm.scheduler.costs.interference import Colocation, fit_interference, report
from raymm.scheduler.multiplex.iteration_memory import balanced, fits_iteration
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve

BASELINES = {"megatron": megatron, "distmm": distmm, "spindle": spindle}
NOISE = 0.05
# Plans per number of modules: fitted (all numbers together) and tested.
MODELLED = (2, 4, 6, 8)
FITTED, TESTED = 150, 200
FORMS = {
    "blind": ("blind", "own"), "additive": ("additive", "own"), "full": ("full", "own"),
    "full_eq8": ("full", "product"),
}


def timed(problem: MappingProblem, strategy: str) -> tuple[Mapping, float]:
    """Return a mapping and the CPU seconds of the solver."""
    start = time.process_time()
    mapping = solve(problem, strategy)
    seconds = time.process_time() - start
    mapping.check(problem)
    return mapping, seconds


def one(kind: str, modules: int, gpus: int, seed: int, oracle_seconds: float) -> dict[str, Any]:
    """Return all figures of one problem."""
    problem = random_problem(seed, kind, modules, gpus)
    ours, seconds = timed(problem, "auto")
    greedy, greedy_seconds = timed(problem, "greedy")
    best, bound = ours.seconds, ours.bound
    if not ours.optimal:
        oracle = solve(problem, "exact", seed=1, deadline_seconds=oracle_seconds)
        oracle.check(problem)
        best, bound = min(best, oracle.seconds), max(bound, oracle.bound)
    row = {
        "kind": kind, "modules": modules, "gpus": gpus, "seed": seed, "method": ours.method,
        "seconds": seconds, "optimality": best / ours.seconds,
        "proven": min(1.0, bound / ours.seconds), "gap_of_auto": ours.gap,
        "greedy_optimality": best / greedy.seconds, "greedy_seconds": greedy_seconds,
        "stages": len(ours.stages),
    }
    for name, baseline in BASELINES.items():
        mapping = baseline(problem)
        mapping.check(problem)
        row[f"over_{name}"] = mapping.seconds / ours.seconds
    return row


def summary(rows: list[dict[str, Any]], modules: int) -> dict[str, float]:
    """Return the keys of the result for one number of modules."""
    rows = [row for row in rows if row["modules"] == modules]
    result: dict[str, float] = {}
    for key, worst in (
        ("optimality", min), ("proven", min), ("greedy_optimality", min), ("seconds", max),
        ("greedy_seconds", max),
    ):
        values = [row[key] for row in rows]
        name = f"{key}_{modules}" + ("_min" if worst is min else "")
        result[name] = round(worst(values), 4)
        result[f"{key}_{modules}_median"] = round(statistics.median(values), 4)
    result[f"proven_optimal_{modules}"] = round(
        sum(row["proven"] > 1 - 1e-9 for row in rows) / len(rows), 4
    )
    return result


def model_errors() -> dict[str, dict[str, float]]:
    """Return the errors of the models by number of modules."""
    fitted: list[Colocation] = []
    for modules in MODELLED:
        fitted += random_colocations(0, FITTED, modules, NOISE)[0]
    models = {
        name: fit_interference(fitted, form, "relative", coupling).model
        for name, (form, coupling) in FORMS.items()
    }
    result: dict[str, dict[str, float]] = {}
    for modules in MODELLED:
        noisy, true = random_colocations(1, TESTED, modules, NOISE)
        row = result[str(modules)] = {}
        for name, model in models.items():
            for suffix, samples in (("", noisy), ("_true", true)):
                found = report(model, samples, name)
                row[f"error_{name}{suffix}"] = round(found.error, 4)
                row[f"r2_{name}{suffix}"] = round(found.r2, 4)
    return result


def memory_rows(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the slowdown of fitting mappings, for problems short of memory over an iteration."""
    result = []
    for row in rows:
        problem = random_problem(
            row["seed"], row["kind"], row["modules"], row["gpus"], memory_over="iteration"
        )
        loose = solve(replace(problem, memory_over="stage"), "greedy")
        if fits_iteration(problem, balanced(problem, loose)):
            continue
        mapping, seconds = timed(problem, "auto")
        result.append({
            "modules": row["modules"], "kind": row["kind"], "gpus": row["gpus"],
            "seed": row["seed"], "fits": fits_iteration(problem, mapping),
            "over_bound": mapping.seconds / mapping.bound, "seconds": seconds,
        })
    return result


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table by kind, number of modules and GPUs, over seeds."""
    columns = (
        ("optimality", min), ("proven", min), ("greedy_optimality", statistics.median),
        ("seconds", max), ("over_megatron", statistics.median),
        ("over_distmm", statistics.median), ("over_spindle", statistics.median),
    )
    result = Table("modules", "kind", "GPUs", *(f"{n} ({f.__name__})" for n, f in columns))
    cases = dict.fromkeys((row["modules"], row["kind"], row["gpus"]) for row in rows)
    for case in cases:
        of_case = [row for row in rows if (row["modules"], row["kind"], row["gpus"]) == case]
        result.add_row(*map(str, case), *(
            f"{function([row[name] for row in of_case]):.4f}" for name, function in columns
        ))
    return result


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--modules", type=int, nargs="+", default=[12, 20], help="per problem")
    options.add_argument("--gpus", type=int, nargs="+", default=[8, 32], help="in the cluster")
    options.add_argument("--seeds", type=int, default=3, help="problems per case")
    options.add_argument(
        "--oracle-seconds", type=float, default=20.0,
        help="wall seconds of the exact run if auto has not proven its mapping",
    )
    args = options.parse_args()
    console = common.console()
    for strategy in ("auto", "local_search"):  # load compiled code
        solve(random_problem(0, "parallel", 13, 8), strategy)

    rows = []
    for modules in args.modules:
        for kind in KINDS:
            for gpus in args.gpus:
                for seed in range(args.seeds):
                    rows.append(one(kind, modules, gpus, seed, args.oracle_seconds))
    console.print(table(rows))
    result: dict[str, Any] = {"machine": common.machine()}
    for modules in args.modules:
        result.update(summary(rows, modules))
    fewest = min(args.modules)
    for name in BASELINES:
        values = [row[f"over_{name}"] for row in rows if row["modules"] == fewest]
        result[f"over_{name}"] = round(statistics.median(values), 4)
        result[f"over_{name}_range"] = [round(min(values), 4), round(max(values), 4)]
    short = memory_rows(rows)
    if short:
        result["memory_short"] = len(short)
        result["memory_fits"] = sum(row["fits"] for row in short)
        result["memory_over_bound"] = round(max(row["over_bound"] for row in short), 4)
        result["memory_seconds"] = round(max(row["seconds"] for row in short), 2)
        console.print(f"short of memory: {short}", highlight=False)
    result["performance_model"] = model_errors()
    for name, figures in result["performance_model"].items():
        console.print(f"{name} modules: {figures}", highlight=False)
    result.update(result["performance_model"][str(MODELLED[-1])])
    result["rows"] = [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
