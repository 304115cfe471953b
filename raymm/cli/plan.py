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
from raymm.cli.option_arguments import add_option_arguments, options_in_errors, read_options
from raymm.cli.plan_styles import (
    check_style,
    given_plan,
    plan_files,
    planned_precision,
    run_style,
    save_pipelined,
    show,
    show_hosts,
    with_given,
)
from raymm.config.planning_options import PIPELINED, PlanOptions
from raymm.errors import ConfigError
from raymm.files.output import Output
from raymm.files.section import MOST_COUNT
from raymm.plural import plural
from raymm.training.under_way import UnderWay

if TYPE_CHECKING:
    from raymm.config.sections import TrainConfig
    from raymm.model.model import Model
    from raymm.model.multimodal import MultimodalModule
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
    suffix = ".svg" if args.svg else ".png"
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
        run_style(
            args, config, model, plan, request, note=note, output=output, suffix=suffix,
            console=console,
        )
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
    from raymm.training.execution import Execution
    from raymm.training.phases import Phases
    from raymm.training.run_start import check_updates

    run, optimizer = config.run, config.optimizer.build(config.run.steps)
    Phases(model, config.at, run.steps)
    check_updates(optimizer, run, model, plan)
    if plan is not None:
        is_cpu = "cpu" in (run.device, config.planning.model_dump()["device"])
        Execution(plan).check(
            model, optimizer=optimizer, precision=run.precision, kernels=run.kernels,
            exact_autocast=run.exact_autocast, compile=run.compile,
            device="cpu" if is_cpu else "cuda",
        )


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
                plan.profile, device or device_called(plan.profile.device), request.ranks_per_node
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
    return planned.after_passes(request.passes)


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
    from raymm.costs.full_microbatch import full_microbatch
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
