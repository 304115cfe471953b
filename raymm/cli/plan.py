"""``raymm plan``: plan a configured run, or evaluate its plan; show, draw and save the plan."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rich import box
from rich.console import Console
from rich.table import Table

from raymm.actors.storage.location import is_bucket
from raymm.cli.option_arguments import (
    add_option_arguments,
    given_options,
    options_in_errors,
    read_options,
)
from raymm.config.planning_options import (
    AUTO,
    MULTIPLEXED,
    PIPELINED,
    MultiplexOptions,
    PlanOptions,
)
from raymm.errors import ConfigError
from raymm.files.output import Output
from raymm.files.section import MOST_COUNT
from raymm.plural import plural
from raymm.scheduler.search.options import SearchOptions
from raymm.training.under_way import UnderWay

if TYPE_CHECKING:
    from raymm.config.sections import TrainConfig
    from raymm.model.model import Model
    from raymm.model.multimodal import MultimodalModule
    from raymm.planning.inputs import Costs
    from raymm.planning.multiplexed import PlannedMultiplexed
    from raymm.planning.plan import Planned
    from raymm.planning.request import PlanRequest
    from raymm.scheduler.plan.plan import Plan

FILE_WIDTH = 120


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``raymm plan``. Those of :class:`PlanOptions` override the ``planning``
    section."""
    add = command.add_argument
    add_option_arguments(command, PlanOptions)
    add("--microbatches", type=int, metavar="N", help="microbatches per step (default: the data's)")
    add("--host-memory-gib", type=float, metavar="X",
        help="GiB of host memory per node (default: of a connected cluster's nodes, else not "
             "checked)")  # fmt: skip
    add("--measure", type=int, metavar="K", help="run the best K plans and pick by measurement")
    add("--out", help="folder for plan.json and pictures (default: run.storage_path)")
    add("--svg", action="store_true", help="pictures as SVG instead of PNG")


def run_plan(args: argparse.Namespace) -> None:
    """Make or evaluate a plan; print, draw and save it. Raises ConfigError, PlanError or
    ClusterError, which name what is wrong."""
    with options_in_errors(args, PlanOptions):
        _run_plan(args)


def _run_plan(args: argparse.Namespace) -> None:
    from raymm.config.check_files import check_files
    from raymm.config.sections import load_config

    for name in ("microbatches", "measure"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.host_memory_gib is not None and not 0 < args.host_memory_gib <= MOST_COUNT:
        raise ConfigError(
            f"--host-memory-gib is {args.host_memory_gib}; it must be above 0 and at most "
            f"{MOST_COUNT}"
        )
    config = load_config(args.config, args.overrides)
    check_files(config)
    style = check_style(args, config.parallel.style)
    suffix = _picture_suffix(args)
    where = ("run.storage_path", config.run.storage_path)
    if args.out is None and is_bucket(config.run.storage_path):
        raise ConfigError(
            f"--out is not given, and run.storage_path is {config.run.storage_path!r}; plans are "
            "saved in a local folder: give --out FOLDER"
        )
    output = Output.folder(
        *(where if args.out is None else ("--out", args.out)), *plan_files(suffix)
    )
    output.check()
    if args.microbatches is not None:
        config = _with_microbatches(config, args.microbatches)
    console = Console()
    if not console.is_terminal:  # a file has no limited width
        console = Console(width=max(console.width, FILE_WIDTH))
    with UnderWay(console, "loading torch and transformers") as work:
        from raymm.config.build import build_model
        from raymm.model.trainable_layers import counts_text
        from raymm.training.run_start import with_vocabulary

        work.update("reading the model")
        model = build_model(config)
        config = config.model_copy(update={"data": with_vocabulary(config.data, model)})
        plan = given_plan(config, model)
        _check_runs(config, model, plan)
    console.print(counts_text(model.parameter_counts()), highlight=False, soft_wrap=True)
    request = _request(args, config)
    if style != PIPELINED:
        request, note = _known_ranks(with_given(args, style, plan, request), config)
        if note is not None:
            console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
        run_style(args, config, model, plan, request, output, console)
        return
    with _cluster_if(args.measure is not None):
        planned = _planned(config, model, plan, request, console)
        show(planned, console)
        if planned.unfit:
            from raymm.errors import PlanError

            raise PlanError(planned.unfit)
        if args.measure is not None:
            planned = _measured(args.measure, config, model, planned, console)
        show_hosts(args, config, model, planned.plan, planned.costs, console)
    save_pipelined(planned, output, suffix, console)


def _check_runs(
    config: TrainConfig, model: Model, plan: Plan | None
) -> None:
    """Run the checks of ``raymm train`` before it starts processes, and for a given plan also the
    check that the model can run under it. A search omits plans that cannot run."""
    from raymm.runtime.options import RuntimeOptions
    from raymm.runtime.parallel_model import ParallelModel
    from raymm.training.phases import Phases
    from raymm.training.run_start import check_updates

    run, optimizer = config.run, config.optimizer.build(config.run.steps)
    Phases(model, config.at, run.steps)
    check_updates(optimizer, run, model, plan)
    if plan is not None:
        is_cpu = "cpu" in (run.device, config.planning.model_dump()["device"])
        ParallelModel.check_plan(model, plan, RuntimeOptions.of({
            "optimizer": optimizer, "precision": run.precision, "kernels": run.kernels,
            "exact_autocast": run.exact_autocast, "compile": run.compile,
            "device": "cpu" if is_cpu else "cuda",
        }))


def _with_microbatches(config: TrainConfig, microbatches: int) -> TrainConfig:
    samples = config.data.batch_size // config.data.microbatches
    data = config.data.model_copy(
        update={"microbatches": microbatches, "batch_size": samples * microbatches}
    )
    return config.model_copy(update={"data": data})


def _cluster_if(needed: bool):
    if not needed:
        return nullcontext()
    from raymm.runtime.cluster import connected

    return connected()


def _request(args: argparse.Namespace, config: TrainConfig) -> PlanRequest:
    from raymm.planning.request import PlanRequest

    request = PlanRequest.of_config(config)
    return replace(request, **read_options(args, PlanOptions, {"tokens": request.tokens}))


def _planned(
    config: TrainConfig, model: Model, plan: Plan | None,
    request: PlanRequest, console: Console,
) -> Planned:
    """Return a plan that raymm makes, or the evaluated given one."""
    from raymm.costs.named_devices import device_called
    from raymm.planning.inputs import Costs, PlanInputs, costs_of
    from raymm.planning.plan import Planned
    from raymm.planning.request import Workload
    from raymm.planning.search import search_pipelines
    from raymm.scheduler.costs.devices import find_device
    from raymm.scheduler.progress.search_control import SearchControl

    request.check(model)
    note = None
    if plan is None:
        request, note = _known_ranks(request, config)
    precision = planned_precision(config, request)
    workload = Workload.of_config(config.data, model.encoder_names, precision)
    workload = replace(workload, optimizer=config.optimizer.build(config.run.steps))
    if plan is not None:
        if plan.profile is not None:
            device = find_device(request.device) if request.device else None
            costs = Costs(
                plan.profile, device or device_called(plan.profile.device), request.ranks_per_node,
                dollars_per_gpu_hour=request.dollars_per_gpu_hour,
            )
        else:
            costs = costs_of(model, request, workload)
        return Planned.evaluated(plan, costs, costs.memory_limit(request.memory_gib))
    modules = plural(len(model.encoder_names) + 1, "module")
    text = f"planning {modules} for {plural(request.ranks or 0, 'device')}"
    if not console.is_terminal:
        console.print(f"{text} ...")
    notes = () if note is None else (note,)
    with UnderWay(console, text) as work:
        control = SearchControl(request.time_limit, work.line)
        inputs = PlanInputs.of(model, request, workload, notes=notes)
        with control.interruptible():
            planned = search_pipelines(inputs, control)
    return planned.finished(request)


def _known_ranks(request: PlanRequest, config: TrainConfig) -> tuple[PlanRequest, str | None]:
    """Return the request with ranks and, if these come from the cluster, its device and a note."""
    if request.ranks is not None:
        return request, None
    import ray

    from raymm.planning.planned_run import request_for_cluster
    from raymm.runtime.cluster import connected, pick_device

    if not ray.is_initialized() and os.environ.get("RAY_ADDRESS") in (None, "", "local"):
        raise ConfigError(
            "the number of ranks is not known: give --ranks N (or planning.ranks), layouts "
            "(parallel), or the RAY_ADDRESS of a cluster"
        )
    with connected():
        device = pick_device(config.run.device, config.resources.for_device)
        workers = config.data.num_workers * config.data.worker_cpus
        return request_for_cluster(request, device, config.resources.for_device(device), workers)


def _measured(
    count: int, config: TrainConfig, model: Model, planned: Planned,
    console: Console,
) -> Planned:
    """Run the best plans, and return the planned object with the fastest as its plan."""
    from raymm.costs.workload import full_microbatch
    from raymm.model.features import MEASURED_COSTS
    from raymm.profiling.measure_plans import distinct_options, measure_options
    from raymm.runtime.cluster import pick_device
    from raymm.runtime.options import resolve_precision

    model.require(MEASURED_COSTS, "--measure is given")
    options = distinct_options(planned.proposal.options, count)
    device = pick_device(config.run.device, config.resources.for_device)
    console.print(f"running {plural(len(options), 'plan')} on {device} ...")
    results = measure_options(
        cast("MultimodalModule", model), options,
        full_microbatch(config.data, model.encoder_names), device=device,
        precision=resolve_precision(config.run.precision, device),
        resources=config.resources.for_device(device),
        threads=config.resources.threads,
        say=lambda result: console.print(
            f"{result.seconds * 1e3:.4g} ms  {result.option.label}", highlight=False, soft_wrap=True
        ),
    )
    best = min(results, key=lambda result: result.seconds)
    table = Table(title="predicted and measured step", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "plan", "predicted ms", "measured ms", "off by"):
        table.add_column(name, justify="left" if name in ("", "plan") else "right")
    for result in results:
        table.add_row(
            "*" if result is best else "", result.option.label,
            f"{result.option.seconds * 1e3:.4g}",
            f"{result.seconds * 1e3:.4g}", f"{result.error:+.1%}",
        )
    console.print(table)
    alternatives = tuple(o for o in planned.proposal.options if o is not best.option)
    proposal = replace(planned.proposal, options=(best.option, *alternatives))
    return replace(planned, plan=best.option.plan, proposal=proposal)


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
    plan: Plan | None, request: PlanRequest, output: Output, console: Console,
) -> None:
    """Plan multiplexed, or in both styles; print, draw and save the plans. Raises PlanError, which
    names what is wrong."""
    from raymm.errors import PlanError
    from raymm.planning.inputs import PlanInputs
    from raymm.planning.plan import Planned
    from raymm.planning.request import Workload
    from raymm.planning.styles import compare_styles, plan_step_multiplexed, step_plan
    from raymm.scheduler.progress.search_control import SearchControl

    request, suffix = _with_surfaces(args, request), _picture_suffix(args)
    request.check(model)
    precision = planned_precision(config, request)
    workload = Workload.of_config(config.data, model.encoder_names, precision)
    _say_what_is_mapped(workload, request, model, console)
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
    workload, request: PlanRequest, model: Model, console: Console
) -> None:
    if not console.is_terminal:
        modules = plural(len(model.encoder_names) + 1, "module")
        console.print(f"mapping {modules} to {plural(request.ranks or 0, 'device')} ...")
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


def _picture_suffix(args: argparse.Namespace) -> str:
    return ".svg" if args.svg else ".png"


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
