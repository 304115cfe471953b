"""``raymm plan --style``: multiplexed plans, and the comparison of styles."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from raymm.cli.option_arguments import given_options
from raymm.config.planning_options import AUTO, MULTIPLEXED, PIPELINED, MultiplexOptions
from raymm.errors import ConfigError
from raymm.files.output import Output
from raymm.plural import plural
from raymm.scheduler.search.options import SearchOptions
from raymm.training.under_way import UnderWay

if TYPE_CHECKING:
    from raymm.config.sections import TrainConfig
    from raymm.model.model import Model
    from raymm.planning.inputs import Costs
    from raymm.planning.multiplexed import PlannedMultiplexed
    from raymm.planning.plan import Planned
    from raymm.planning.request import PlanRequest
    from raymm.scheduler.plan.plan import Plan


def _pipelined_only(args: argparse.Namespace) -> list[str]:
    names = [*given_options(args, SearchOptions), "degrees", "measure"]
    return [name for name in names if getattr(args, name) is not None]


def check_style(args: argparse.Namespace, configured: str | None = None) -> str:
    """Return the requested style: the option, or else ``parallel.style``. Raises ConfigError if
    options contradict each other."""
    style = args.style or configured or PIPELINED
    if style == PIPELINED:
        if multiplexed_options := given_options(args, MultiplexOptions):
            raise ConfigError(
                f"--{multiplexed_options[0].replace('_', '-')} requires --style multiplexed or auto"
            )
    elif refused := [
        name for name in _pipelined_only(args) if style == MULTIPLEXED or name == "measure"
    ]:
        raise ConfigError(
            f"--{refused[0]} is for pipelined plans; it cannot be used with --style {style}"
        )
    return style


def with_given(
    args: argparse.Namespace, style: str, plan: Plan | None, request: PlanRequest
) -> PlanRequest:
    """Return the request with the ranks of the configuration's pipelined plan, if styles are
    compared. Raises ConfigError or PlanError if options contradict the plan."""
    from raymm.planning.styles import with_ranks_of

    if plan is None or style != AUTO:
        return request
    if refused := _pipelined_only(args):
        raise ConfigError(
            f"--{refused[0]} is for plans that raymm makes, but the configuration gives a plan "
            "(parallel); give one of them"
        )
    return with_ranks_of(plan, request)


def planned_precision(config: TrainConfig, request: PlanRequest) -> str:
    """Return the precision of the run on the device that the plan is for."""
    from raymm.costs.named_devices import CPU
    from raymm.runtime.options import resolve_precision

    device = config.run.device
    if device == "auto":
        device = CPU if request.device in (None, CPU) else "cuda"
    return resolve_precision(config.run.precision, device)


def given_plan(config: TrainConfig, model: Model) -> Plan | None:
    """Return the plan of the configuration's layouts or file; None without. Raises ConfigError for
    a multiplexed mapping, which is complete already, and PlanError if the plan cannot run."""
    from raymm.config.build import build_plan

    plan = build_plan(config, model)
    if plan is not None and plan.uses_slots:
        raise ConfigError(
            f"parallel.plan is {config.parallel.plan!r}, a multiplexed mapping, which `raymm "
            "train` runs unchanged; accepted here: a pipelined plan, or none"
        )
    return plan


def run_style(
    args: argparse.Namespace, config: TrainConfig, model: Model,
    plan: Plan | None, request: PlanRequest, *, note: str | None, output: Output, suffix: str,
    console: Console,
) -> None:
    """Plan multiplexed, or in both styles; print ``note`` first, then print, draw and save the
    plans. Raises PlanError, which names what is wrong."""
    from raymm.errors import PlanError
    from raymm.planning.inputs import PlanInputs
    from raymm.planning.plan import Planned
    from raymm.planning.request import Workload
    from raymm.planning.styles import compare_styles, plan_step_multiplexed, step_plan
    from raymm.scheduler.progress.search_control import SearchControl

    request = _with_surfaces(args, request)
    request.check(model)
    precision = planned_precision(config, request)
    workload = Workload.of_config(config.data, model.encoder_names, precision)
    _say_what_is_mapped(workload, request, model, note, console)
    with UnderWay(console, "computing the costs of the model"):
        inputs = PlanInputs.of(model, request, workload)
    if request.style == MULTIPLEXED:
        if plan is not None:
            console.print("note: ignoring the configuration's layouts (parallel), which are for "
                          "pipelined plans", highlight=False, soft_wrap=True)  # fmt: skip
        with UnderWay(console, "planning"):
            multiplexed = plan_step_multiplexed(inputs)
        show(multiplexed, console)
        if multiplexed.unfit:
            raise PlanError(multiplexed.unfit)
        mapped = step_plan(inputs, multiplexed)
        show_hosts(args, config, model, mapped, inputs.costs, console)
        _save(mapped, multiplexed, output, suffix, console)
        return
    with UnderWay(console, "planning in both styles, pipelined and multiplexed") as work:
        control = SearchControl(request.time_limit, work.line)
        with control.interruptible():
            comparison = compare_styles(inputs, plan, control=control)
    for planned in (comparison.pipelined, comparison.multiplexed):
        if planned is not None:
            show(planned, console)
    console.print(comparison.explain(), highlight=False, markup=False, soft_wrap=True)
    chosen, multiplexed = comparison.chosen, comparison.multiplexed
    if chosen is None:
        if multiplexed is None or comparison.style is None:
            raise PlanError("neither style fits: " + "; ".join(comparison.refused.values()))
        mapped = step_plan(inputs, multiplexed)
        show_hosts(args, config, model, mapped, inputs.costs, console)
        _save(mapped, multiplexed, output, suffix, console)
        return
    show_hosts(args, config, model, chosen, inputs.costs, console)
    if chosen.num_microbatches != workload.microbatches:
        console.print(_microbatches_note(chosen.num_microbatches, workload.microbatches),
                      highlight=False, soft_wrap=True)  # fmt: skip
    if multiplexed is not None and chosen.uses_slots:
        _save(chosen, multiplexed, output, suffix, console)
    else:
        save_pipelined(Planned.evaluated(chosen, inputs.costs), output, suffix, console)


def _microbatches_note(planned: int, configured: int) -> str:
    return (
        f"note: the plan has {plural(planned, 'microbatch', 'es')} per step and "
        f"data.microbatches is {configured}: train it with data.microbatches: {planned}"
    )


def _say_what_is_mapped(
    workload, request: PlanRequest, model: Model, note: str | None,
    console: Console,
) -> None:
    if not console.is_terminal:
        modules = plural(len(model.encoder_names) + 1, "module")
        console.print(f"mapping {modules} to {plural(request.ranks or 0, 'device')} ...")
    if note is not None:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if workload.microbatches > 1:
        if request.style == MULTIPLEXED:
            console.print(_microbatches_note(1, workload.microbatches), highlight=False,
                          markup=False, soft_wrap=True)  # fmt: skip


def _with_surfaces(args: argparse.Namespace, request: PlanRequest) -> PlanRequest:
    """Return the request with surfaces if ``--profile`` is a file of surfaces."""
    from raymm.scheduler.graph.strict_json import whole

    if args.quota_steps is not None:
        whole(args.quota_steps, "--quota-steps", 1)
    if request.profile is not None and has_surfaces(request.profile):
        return replace(request, profile=None, surfaces=request.profile)
    return request


def has_surfaces(path: str) -> bool:
    """Return True if a file has scaling surfaces instead of layers; False for an invalid file,
    which its reader refuses."""
    from raymm.errors import PlanError
    from raymm.scheduler.graph.strict_json import json_value, read_file

    try:
        data = json_value(read_file(path), path)
    except PlanError:
        return False
    return isinstance(data, dict) and "surfaces" in data


def show(planned: Planned | PlannedMultiplexed, console: Console) -> None:
    """Print the table and the explanation."""
    console.print(planned.table())
    console.print(planned.explain(), highlight=False, markup=False, soft_wrap=True)


def show_hosts(
    args: argparse.Namespace, config: TrainConfig, model: Model,
    plan: Plan, costs: Costs, console: Console,
) -> None:
    """Print the host memory that the nodes of a plan need. Raises PlanError if it is known that
    they do not have it: from ``--host-memory-gib``, or from a connected cluster."""
    import ray

    from raymm.actors.host.memory import CopyOptions, HostMemory
    from raymm.costs.named_devices import CPU
    from raymm.planning.host_memory import PlannedHosts, cluster_hosts
    from raymm.scheduler.schedule.memory import GIB

    run = config.run
    device = run.device
    if device == "auto":
        device = CPU if costs.device is not None and costs.device.name == CPU else "cuda"
    copies = CopyOptions(run.asynchronous_checkpoints, run.snapshot_every is not None)
    hosts = PlannedHosts.of(
        model, plan, config.optimizer.build(run.steps), copies, device, costs.ranks_per_node
    )
    console.print(hosts.table())
    if args.host_memory_gib is not None:
        memory = int(args.host_memory_gib * GIB)
        hosts.check([HostMemory("", "each node", memory)] * len(hosts.needs))
    elif ray.is_initialized():
        hosts.check(cluster_hosts(device))


def _save(
    plan: Plan, planned: PlannedMultiplexed, output: Output, suffix: str, console: Console
) -> None:
    """Save a mapping as a plan, its picture, and that of the simulated step if times are known."""
    from raymm.config.build import write_json
    from raymm.draw import draw_timelines
    from raymm.planning.plan import rank_names
    from raymm.scheduler.schedule.network import Network
    from raymm.scheduler.search.evaluation import step_timeline

    names = plan_files(suffix)
    with UnderWay(console, "drawing the plan"), output.writing() as folder:
        files = [folder / name for name in names]
        write_json(files[0], plan.to_dict())
        planned.draw(files[1])
        if plan.profile is None:
            files.pop()
        else:
            draw_timelines(
                [("predicted", step_timeline(plan, Network()))], files[2],
                rank_names=rank_names(plan),
                title=f"a step on {plural(plan.num_ranks, 'GPU')}, multiplexed",
            )
    for written in files:
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)


def plan_files(suffix: str) -> tuple[str, str, str]:
    """Return the names of a plan's file, its picture, and the picture of its schedule."""
    return "plan.json", f"plan{suffix}", f"plan_schedule{suffix}"


def save_pipelined(planned: Planned, output: Output, suffix: str, console: Console) -> None:
    """Save a pipelined plan and its pictures (``.png`` or ``.svg``). Raises ConfigError if they
    cannot be written."""
    from raymm.config.build import write_json
    from raymm.draw import draw_plan

    with UnderWay(console, "drawing the plan"), output.writing() as folder:
        files = [folder / name for name in plan_files(suffix)]
        write_json(files[0], planned.plan.to_dict())
        draw_plan(planned.plan, files[1])
        planned.draw(files[2])
    for written in files:
        console.print(f"wrote {written}", highlight=False, soft_wrap=True)
