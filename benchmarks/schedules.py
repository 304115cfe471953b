"""Claim: raymm's schedules are faster than DAG 1F1B within the same memory.

Run with `python -m benchmarks.schedules --json`.

The 27 vision-audio-language models of Cornstarch v1 (Tables 1 and 6) with analytic costs on A40s,
24 microbatches, recomputation on, messages free. Schedules per configuration and kind of training
(``align``: only projectors are trainable; ``sft``: the language model too; ``full``: everything):

- *baseline*: DAG 1F1B, every stage recomputes;
- *zero bubble*: the same stages, B_d split from B_w, recomputation ahead of the gradient;
- *loss kept*: in addition, the loss's stage, which needs its activations at once, does not
  recompute;
- *rebalanced*: in addition, layers are cut so that the loss's stage, which has less to do, gets
  more of them;
- *chunks*: in addition, 2 to 4 chunks of the language model per rank.

All of them hold at most as many activations per rank as the baseline's fullest rank (and at most as
much memory in total, with weights, as the baseline's largest). ``best`` is the fastest, and 1.0 if
none is faster. ``bound`` is a lower bound for every schedule of the best plan.

Stages per module are searched for 1F1B and each kind of training, on as many ranks as the paper's
Table 6 has; ``table6_`` keys are for the table's own stages, which were made for alignment.

``tight_`` keys are for random plans (``tight_plans.py``: 1 to 4 encoders, 2 to 24 ranks, odd
numbers of microbatches): zero bubble over its bound, within 1F1B's memory (``tight_over_bound_``)
and, tighter, with at most as much on each rank as 1F1B has on that rank
(``tight_own_over_bound_``). ``tight_1f1b_over_bound_`` is 1F1B itself.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.tight_plans import tight_plans
from benchmarks.valm_configs import MICROBATCHES, TRAINABLE, VALM_CONFIGS, ValmConfig, valm_profile
from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program, iteration_time, one_f_one_b_limits, refine
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.search.layouts import chunked
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import StageSpace

CHUNKS = (2, 3, 4)
# The policies were selected on plans of seed 7.
TIGHT_SEED = 17


def ratios(space: StageSpace, counts: dict[str, int]) -> dict[str, float]:
    """Return iteration times relative to DAG 1F1B, all within its memory."""
    baseline = replace(space, recompute_loss=True).plan(counts)
    sizes = stage_costs(baseline)
    program = full_program(baseline)
    limits = one_f_one_b_limits(baseline, program, sizes)
    seconds = iteration_time(baseline)

    plans = {
        "zero_bubble": baseline,
        "loss_kept": _loss_kept(baseline),
        "rebalanced": space.plan(counts),
    }
    for chunks in CHUNKS:
        try:
            plans[f"chunks_{chunks}"] = chunked(space, counts, chunks)
        except NoPlanError:
            continue
    result = {"gpipe": iteration_time(replace(baseline, schedule="gpipe")) / seconds}
    best, bound = 1.0, lower_bound(baseline, None, dict(enumerate(limits))) / seconds
    for name, plan in plans.items():
        plan = replace(plan, schedule="zero_bubble", activation_limits=limits)
        try:
            plan, one = refine(plan)
            program = full_program(plan)
        except ValueError:  # does not fit in the baseline's memory at all
            continue
        sizes = stage_costs(plan)
        for rank, peak in enumerate(activation_peaks(program, sizes)):
            # Limits do not count the temporary memory of a backward, which no schedule changes.
            temporary = max(sizes[stage.id].remade_bytes for stage in plan.rank_stages(rank))
            assert peak - temporary <= limits[rank], (name, rank, peak, temporary, limits[rank])
        result[name] = one / seconds
        if result[name] < best:
            best = result[name]
            bound = lower_bound(plan, None, dict(enumerate(limits))) / seconds
    return {**result, "best": best, "bound": bound, "baseline_s": seconds}


def _loss_kept(plan: Plan) -> Plan:
    last = plan.module_stages(plan.graph.backbone)[-1]
    stages = (replace(s, recompute=False) if s == last else s for s in plan.stages)
    return replace(plan, stages=tuple(stages))


def measure(task: tuple[ValmConfig, str]) -> dict[str, dict]:
    """Measure one configuration and kind of training, with searched and with the table's stages."""
    config, trainable = task
    graph, profile = valm_profile(config.llm, config.vision, config.audio, trainable)
    ranks = sum(config.cornstarch)
    space = StageSpace(graph, profile, ranks, MICROBATCHES, recompute=True)
    searched = joint_search(
        replace(space, recompute_loss=True), iteration_time, lower_bound, alternatives=0
    ).best.counts
    llm, vision, audio = config.cornstarch
    table = {"vision": vision, "audio": audio, "llm": llm}
    found = {"stages": searched, **ratios(space, searched)}
    same = searched == table
    return {"searched": found, "table6": found if same else {"stages": table,
                                                             **ratios(space, table)}}


def tight(plan: Plan) -> dict[str, float]:
    """Return the times of one plan over the bounds of its memory."""
    baseline, sizes = full_program(replace(plan, schedule="1f1b")), stage_costs(plan)
    found = {}
    for name, limits in (
        ("", one_f_one_b_limits(plan, baseline, sizes)), ("own_", activation_peaks(baseline, sizes))
    ):
        own = replace(plan, activation_limits=limits) if name else plan
        _, seconds = refine(own)
        bound = lower_bound(plan, None, dict(enumerate(limits)))
        found[f"tight_{name}over_bound"] = seconds / bound
    bound = lower_bound(plan, None, dict(enumerate(limits)))
    found["tight_1f1b_over_bound"] = iteration_time(replace(plan, schedule="1f1b")) / bound
    return found


def tight_figures(count: int) -> dict[str, float]:
    """Return median, 95th percentile and worst ratio of ``count`` plans."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(tight, tight_plans(count, TIGHT_SEED)))
    result = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        result[f"{key}_median"] = round(float(np.median(values)), 4)
        result[f"{key}_p95"] = round(float(np.percentile(values, 95)), 4)
        result[f"{key}_max"] = round(max(values), 4)
    return result


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("--limit", type=int, default=len(VALM_CONFIGS), help="configurations")
    options.add_argument("--tight", type=int, default=300, help="random plans; 0 for none")
    args = options.parse_args()
    console = common.console()
    for size in "SML":  # count layers once, before the processes fork
        valm_profile(size, size, size)
    tasks = [(c, t) for t in TRAINABLE for c in VALM_CONFIGS[: args.limit]]
    rows = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (config, trainable), found in zip(tasks, pool.map(measure, tasks), strict=True):
            rows.append({"config": config.name, "trainable": trainable, **found})
            best, table = found["searched"], found["table6"]
            console.print(
                f"{trainable:5} {config.name:14} best {best['best']:.3f} "
                f"(bound {best['bound']:.3f}); on Table 6's stages {table['best']:.3f}",
                highlight=False,
            )
    result = {"machine": common.machine(), "rows": rows}
    if args.tight:
        result |= tight_figures(args.tight)
    if rows:
        console.print(_table(rows))
    for trainable in TRAINABLE if rows else ():
        for stages, prefix in (("searched", ""), ("table6", "table6_")):
            mine = [row[stages] for row in rows if row["trainable"] == trainable]
            for name in ("best", "bound"):
                values = [one[name] for one in mine]
                result[f"{prefix}{name}_{trainable}_median"] = round(statistics.median(values), 4)
            result[f"{prefix}best_{trainable}_max"] = round(max(one["best"] for one in mine), 4)
            names = ("zero_bubble", "loss_kept", "rebalanced")
            one_chunk = [min(1.0, *(one.get(n, 1.0) for n in names)) for one in mine]
            result[f"{prefix}one_chunk_{trainable}_median"] = round(statistics.median(one_chunk), 4)
            same = [min(1.0, one["zero_bubble"]) for one in mine]
            result[f"{prefix}same_plan_{trainable}_median"] = round(statistics.median(same), 4)
    for key, value in result.items():
        if key not in ("rows", "machine"):
            console.print(f"{key:34} {value}", highlight=False)
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")


def _table(rows: list[dict]) -> Table:
    table = Table(title="iteration time relative to DAG 1F1B (medians, searched stages)")
    names = ("gpipe", "zero_bubble", "loss_kept", "rebalanced", *(f"chunks_{n}" for n in CHUNKS))
    names += ("best", "bound")
    for name in ("trainable", *names):
        table.add_column(name)
    for trainable in TRAINABLE:
        mine = [row["searched"] for row in rows if row["trainable"] == trainable]
        cells = []
        for name in names:
            values = [one[name] for one in mine if name in one]
            cells.append(f"{statistics.median(values):.3f}" if values else "-")
        table.add_row(trainable, *cells)
    return table


if __name__ == "__main__":
    main()
