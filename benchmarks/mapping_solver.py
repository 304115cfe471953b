"""Mapping of modules to stages and shared GPUs: solver against proof, baselines, model error.

Random seeded problems of three kinds (a star of encoders, backbone and decoders; layered graphs;
all modules independent) with roofline-shaped surfaces and interference, on 8 and 32 GPUs in steps
of a tenth. Keys of the result, n being the number of modules:

- `optimality_<n>_min`, `_median`: seconds of the best mapping known over seconds of `auto`'s: its
  own where that is proven optimal, else the better of it and a long run of `exact`;
- `proven_<n>_min`, `_median`: the same with the highest proven lower bound instead;
  `proven_optimal_<n>`: share of problems in which that is 1;
- `seconds_<n>`, `seconds_<n>_median`: CPU seconds of `auto`, one thread;
- `greedy_optimality_<n>_min`, `_median`, `greedy_seconds_<n>`: the same of Algorithm 1;
- `over_megatron`, `over_distmm`, `over_spindle`: medians of iteration time over `auto`'s, with 12
  modules;
- `performance_model`: errors (mean of |predicted / measured - 1|) on colocations that were not
  fitted, with 5 % noise, of a contention law that is not eq. 8; `_true`: against the time without
  noise; R² of the delay. For groups of two, and of two and three modules.

    python -m benchmarks.mapping_solver --json
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.table import Table

from benchmarks import _common
from benchmarks._mapping_instances import KINDS, random_colocations, random_problem
from raymm.scheduler.multiplex.baselines import distmm, megatron, spindle
from raymm.scheduler.multiplex.interference import compare_models, report
from raymm.scheduler.multiplex.mapping import Mapping
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solve import solve

BASELINES = {"megatron": megatron, "distmm": distmm, "spindle": spindle}
NOISE = 0.05
COLOCATIONS = 600


def timed(problem: MappingProblem, strategy: str) -> tuple[Mapping, float]:
    """A mapping and the CPU seconds it took."""
    start = time.process_time()
    mapping = solve(problem, strategy)
    seconds = time.process_time() - start
    mapping.check(problem)
    return mapping, seconds


def one(kind: str, modules: int, gpus: int, seed: int, oracle_seconds: float) -> dict[str, Any]:
    """All figures of one problem."""
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
    """The keys of the result for one number of modules."""
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


def model_errors(most: int, coupling: str) -> dict[str, float]:
    """Errors of the three models on groups of 2 to ``most`` modules."""
    noisy, true = random_colocations(0, 2 * COLOCATIONS, most, NOISE)
    fits = compare_models(noisy[:COLOCATIONS], noisy[COLOCATIONS:], "relative", coupling)
    result = {}
    for form, fit in fits.items():
        result[f"error_{form}"] = round(fit.error, 4)
        result[f"error_{form}_true"] = round(
            report(fit.model, true[COLOCATIONS:], form).error, 4
        )
        result[f"r2_{form}"] = round(fit.r2, 4)
    return result


def table(rows: list[dict[str, Any]]) -> Table:
    """Per kind, number of modules and GPUs, over seeds."""
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
    options = _common.parser(__doc__.splitlines()[0])
    options.add_argument("--modules", type=int, nargs="+", default=[12, 20], help="per problem")
    options.add_argument("--gpus", type=int, nargs="+", default=[8, 32], help="in the pool")
    options.add_argument("--seeds", type=int, default=3, help="problems of each case")
    options.add_argument(
        "--oracle-seconds", type=float, default=20.0,
        help="wall seconds of the exact run where auto has not proven its mapping",
    )
    args = options.parse_args()
    console = _common.console()
    solve(random_problem(0, "parallel", 8, 8))  # compiles

    rows = []
    for modules in args.modules:
        for kind in KINDS:
            for gpus in args.gpus:
                for seed in range(args.seeds):
                    rows.append(one(kind, modules, gpus, seed, args.oracle_seconds))
    console.print(table(rows))
    result: dict[str, Any] = {"machine": _common.machine()}
    for modules in args.modules:
        result.update(summary(rows, modules))
    fewest = min(args.modules)
    for name in BASELINES:
        values = [row[f"over_{name}"] for row in rows if row["modules"] == fewest]
        result[f"over_{name}"] = round(statistics.median(values), 4)
        result[f"over_{name}_range"] = [round(min(values), 4), round(max(values), 4)]
    result["performance_model"] = {
        "pairs": model_errors(2, "product"), "two_and_three": model_errors(3, "product"),
        "two_and_three_own": model_errors(3, "own"),
    }
    for form in ("full", "additive", "blind"):
        result[f"error_{form}"] = result["performance_model"]["pairs"][f"error_{form}"]
        result[f"r2_{form}"] = result["performance_model"]["pairs"][f"r2_{form}"]
    for name, figures in result["performance_model"].items():
        console.print(f"{name}: {figures}", highlight=False)
    result["rows"] = [
        {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    ]
    _common.emit(result, args.json)


if __name__ == "__main__":
    main()
