"""Claim: raymm's plans have shorter predicted steps than those of other planners.

Run with `python -m benchmarks.compare_planners CONFIG.yaml --ranks 8 --device H100 --json`.

All plans of a configured run are evaluated with the same costs. Pipelines are compared with
Cornstarch's Algorithm 1, simpler balances and OmniBal (`benchmarks.baselines.pipelines`); with
`--style multiplexed`, mappings are compared with those of Megatron-LM, DistMM and Spindle
(`benchmarks.baselines.mappings`). Planning options are those of `raymm plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from rich.table import Table

from benchmarks.baselines.baseline import Baseline, solutions
from benchmarks.baselines.mappings import MAPPINGS
from benchmarks.baselines.pipelines import PIPELINES
from benchmarks.shared import common
from raymm.cli.option_arguments import add_option_arguments, read_options
from raymm.cli.plan import planned_precision
from raymm.config.build import build_model
from raymm.config.planning_options import AUTO, MULTIPLEXED, PlanOptions
from raymm.config.sections import load_config
from raymm.draw.row_table import row_table, time_text
from raymm.planning.inputs import PlanInputs
from raymm.planning.plan import Planned
from raymm.planning.request import PlanRequest, Workload
from raymm.planning.search import search_pipelines
from raymm.planning.styles import plan_step_multiplexed
from raymm.scheduler.search.evaluation import Option
from raymm.scheduler.search.uncut_modules import with_uncut_modules

# Relative differences below this are smaller than the printed digits.
SAME = 5e-4


class Timed(Protocol):
    """Plan or mapping with predicted seconds of a step."""

    @property
    def seconds(self) -> float: ...


def other_pipelines(planned: Planned) -> dict[str, Option | str]:
    """Solve the problem of a plan with every other planner.

    Returns:
        Best plan of each planner, or the reason why it has none.
    """
    problem = planned.problem
    assert problem is not None
    graph, profile = with_uncut_modules(problem.graph, problem.profile, set(planned.whole))
    solved = solutions(PIPELINES, replace(problem, graph=graph, profile=profile))
    return {name: one if isinstance(one, str) else one.best for name, one in solved.items()}


def comparison_rows(
    seconds: float, solved: Mapping[str, Timed | str], baselines: Iterable[Baseline[Any, Any]]
) -> list[dict[str, str]]:
    """Return a row for raymm's plan and one for each baseline.

    Args:
        seconds: predicted seconds of a step under raymm's plan.
        solved: solution of each baseline, or the reason why it has none.
    """
    rows = [{"planner": "raymm", "step": time_text(seconds), "longer": "", "what it is": ""}]
    for baseline in baselines:
        solution, source = solved[baseline.name], baseline.source
        step, longer = "-", "-"
        if isinstance(solution, str):
            source = f"{source}: {solution}"
        else:
            more = solution.seconds / seconds - 1
            step = time_text(solution.seconds)
            longer = "the same" if abs(more) < SAME else f"{more:+.1%}"
        rows.append(
            {"planner": baseline.name, "step": step, "longer": longer, "what it is": source}
        )
    return rows


def _table(rows: list[dict[str, str]]) -> Table:
    table = row_table(
        rows,
        title="predicted step, and those of other planners",
        caption="by the same costs",
        left=("planner", "what it is"),
    )
    table.columns[-1].no_wrap = False
    return table


def main() -> None:
    options = common.parser(__doc__.splitlines()[0])
    options.add_argument("config", help="YAML file of a run, as for `raymm plan`")
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        dest="overrides",
        help="override a value of the configuration",
    )
    add_option_arguments(options, PlanOptions)
    args = options.parse_args()
    config = load_config(args.config, args.overrides)
    request = PlanRequest.of_config(config)
    request = replace(request, **read_options(args, PlanOptions, {"tokens": request.tokens}))
    if request.ranks is None or request.style == AUTO:
        options.error("--ranks is required, and --style is pipelined (default) or multiplexed")
    model = build_model(config)
    request.check(model)
    precision = planned_precision(config, request)
    workload = Workload.of_config(config.data, model.encoder_names, precision)
    workload = replace(workload, optimizer=config.optimizer.build(config.run.steps))
    inputs = PlanInputs.of(model, request, workload)
    if request.style == MULTIPLEXED:
        mapped = plan_step_multiplexed(inputs)
        seconds, baselines = mapped.seconds, MAPPINGS
        solved: Mapping[str, Timed | str] = solutions(MAPPINGS, mapped.problem)
    else:
        planned = search_pipelines(inputs)
        seconds, baselines, solved = planned.seconds, PIPELINES, other_pipelines(planned)
    common.console().print(_table(comparison_rows(seconds, solved, baselines)))
    common.emit(
        {
            "machine": common.machine(),
            "raymm": seconds,
            **{name: one if isinstance(one, str) else one.seconds for name, one in solved.items()},
        },
        args.json,
    )


if __name__ == "__main__":
    main()
