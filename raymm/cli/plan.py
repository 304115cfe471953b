"""``raymm plan``: plan a configured run, or judge the plan it has; show, draw and save it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from raymm.cli.plan_styles import (
    add_style_arguments,
    check_style,
    files_of,
    refuse_mapping,
    run_style,
    save_pipelined,
    with_given,
)
from raymm.files.output import Output

FILE_WIDTH = 120


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Options of ``raymm plan`` besides the configuration; they go before its ``planning``
    section."""
    add = command.add_argument
    add("--ranks", type=int, help="how many devices (GPUs) to plan for; default: the cluster's")
    add("--profile", metavar="FILE", help="measured costs, from `raymm profile`")
    add("--device", metavar="NAME", help="compute costs for this device, e.g. H100")
    add("--memory-gib", type=float, metavar="X",
        help="GiB a rank may use (default: 0.9 of the device's memory; on CPUs no limit)")
    add("--ranks-per-node", type=int, metavar="N", help="default 8")
    add("--microbatches", type=int, metavar="N", help="per step, instead of data.microbatches")
    add("--tokens", action="append", default=[], metavar="MODULE=N",
        help="tokens per sample of a module, e.g. llm=4096 (repeatable; default: the data's)")
    add("--layouts", metavar="A,B", help="of modality_parallel, colocated, replicated")
    add("--schedules", metavar="A,B", help="of 1f1b, zero_bubble, gpipe")
    add("--degrees", metavar="A,B",
        help="of parallelism within modules: auto (default), none (pipelines only), or of tp, cp, "
        "dp; tp=4 up to a degree, llm.tp=4 with this one")
    add("--strategy", metavar="NAME",
        help="joint (default), loosely_coupled, unaware, layers, parameters, omnibal")
    add("--radius", type=int, metavar="N", help="layers omnibal may move a cut (default 1)")
    add("--measure", type=int, metavar="K", help="run the best K plans and pick by measurement")
    add("--out", help="folder for plan.json and pictures (default: run.storage_path)")
    add_style_arguments(command)
    add("--svg", action="store_true", help="pictures as SVG instead of PNG")


def run_plan(args: argparse.Namespace) -> None:
    """Plan or judge, print, draw and save.

    Raises:
        ConfigError, PlanError, DeviceError, ProfileError, LoadError, StageSearchError,
        ClusterError: naming what is wrong.
    """
    from raymm.config.build import build_model, build_plan
    from raymm.config.sections import ConfigError, load_config

    for name in ("microbatches", "measure"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    config = load_config(args.config, args.overrides)
    style = check_style(args, config.parallel.style)
    suffix = ".svg" if args.svg else ".png"
    where = ("run.storage_path", config.run.storage_path)
    output = Output.folder(
        *(where if args.out is None else ("--out", args.out)), *files_of(style, suffix)
    )
    output.check()
    if args.microbatches is not None:
        data = config.data.model_copy(update={
            "microbatches": args.microbatches,
            # as large microbatches as before
            "batch_size": config.data.batch_size // config.data.microbatches * args.microbatches,
        })
        config = config.model_copy(update={"data": data})
    model = build_model(config)
    given = build_plan(config, model)
    refuse_mapping(given, config.parallel.plan)
    console = Console()
    if not console.is_terminal:  # a file has room for every column
        console = Console(width=max(console.width, FILE_WIDTH))
    if style != "pipelined":
        request = with_given(args, style, given, _request(args, config))
        request, note = _known_ranks(request, config)
        run_style(style, args, config, model, given, request, note, output, suffix, console)
        return
    with _cluster_if(args.measure is not None):
        planned = _planned(args, config, model, given, console)
        console.print(planned.table())
        console.print(planned.explain(), highlight=False, markup=False, soft_wrap=True)
        if planned.unfit:
            from raymm.scheduler.plan.plan import PlanError

            raise PlanError(planned.unfit)
        if args.measure is not None:
            planned = _measured(args, config, model, planned, console)
    save_pipelined(planned, output, suffix, console)


def parse_tokens(entries: list[str]) -> dict[str, int]:
    """``["llm=4096"]`` -> ``{"llm": 4096}``.

    Raises:
        ConfigError: if an entry is no ``module=number``.
    """
    from raymm.config.sections import ConfigError

    tokens = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--tokens has {entry!r}; give module=number, such as llm=4096")
        tokens[name] = int(number)
    return tokens


@contextmanager
def _cluster_if(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    from raymm.runtime.cluster import connected

    with connected():
        yield


def _request(args, config):
    """The configuration's request, with the command line's options before it."""
    from raymm.planning.request import PlanRequest

    request = PlanRequest.of_config(config)
    options = {
        name: getattr(args, name)
        for name in (
            "ranks", "profile", "device", "memory_gib", "ranks_per_node", "strategy", "radius",
            "degrees",
        )
        if getattr(args, name) is not None
    }
    for name in ("layouts", "schedules"):
        if getattr(args, name) is not None:
            options[name] = tuple(p.strip() for p in getattr(args, name).split(",") if p.strip())
    tokens = {**request.tokens, **parse_tokens(args.tokens)}
    return replace(request, **options, tokens=tokens)


def _planned(args, config, model, given, console):
    from raymm.costs.named_devices import device_called
    from raymm.planning.plan_model import Planned
    from raymm.planning.planned_costs import Costs
    from raymm.planning.request import DataShape
    from raymm.scheduler.costs.devices import find_device

    request = _request(args, config)
    request.check(model)
    data = DataShape.of_config(config.data, model.encoder_names)
    dtype = config.run.precision
    if given is not None:
        if given.profile is not None:
            device = request.device and find_device(request.device)
            costs = Costs(
                given.profile, device or device_called(given.profile.device),
                request.ranks_per_node,
            )
        else:
            costs = request.costs(model, data, dtype)
        return Planned.evaluated(given, costs, costs.memory_limit(request.memory_gib))
    request, note = _known_ranks(request, config)
    text = f"planning {len(model.encoder_names) + 1} modules for {request.ranks} devices"
    if not console.is_terminal:
        console.print(f"{text} ...")
    with console.status(text):
        return request.plan(model, data, dtype, note)


def _known_ranks(request, config):
    """The request with ranks, and a remark if they and the device are the cluster's."""
    return (request, None) if request.ranks is not None else _as_cluster(request, config)


def _as_cluster(request, config):
    """Ranks and device of the cluster, if there is one to ask."""
    import ray

    from raymm.config.sections import ConfigError
    from raymm.costs.named_devices import cluster_device
    from raymm.planning.request import cluster_ranks
    from raymm.runtime.cluster import connected, pick_device

    if not ray.is_initialized() and os.environ.get("RAY_ADDRESS") in (None, "", "local"):
        raise ConfigError(
            "the number of ranks is not known: give --ranks N (or planning.ranks), layouts "
            "(parallel), or the RAY_ADDRESS of a cluster"
        )
    with connected():
        device = pick_device(config.run.device, config.resources.for_device)
        data = config.data
        workers = data.num_workers * data.worker_cpus
        request = replace(
            request, ranks=cluster_ranks(config.resources.for_device(device), workers)
        )
        if request.device is not None or request.profile is not None:
            return request, None
        name, note = cluster_device(device)
        return replace(request, device=name), note


def _measured(args, config, model, planned, console):
    """Run the best plans; the planned object with the fastest as its plan."""
    from raymm.costs.full_microbatch import full_microbatch
    from raymm.profiling.measure_plans import distinct_options, measure_options
    from raymm.runtime.cluster import pick_device

    options = distinct_options(planned.proposal.options, args.measure)
    device = pick_device(config.run.device, config.resources.for_device)
    console.print(f"running {len(options)} plans on {device} ...")
    results = measure_options(
        model, options, full_microbatch(config.data, model.encoder_names), device=device,
        precision=config.run.precision, resources=config.resources.for_device(device),
        threads=config.resources.threads,
        say=lambda one: console.print(
            f"{one.seconds * 1e3:.4g} ms  {one.option.label}", highlight=False, soft_wrap=True
        ),
    )
    best = min(results, key=lambda one: one.seconds)
    table = Table(title="predicted and measured step", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "plan", "predicted ms", "measured ms", "off by"):
        table.add_column(name, justify="left" if name in ("", "plan") else "right")
    for one in results:
        table.add_row(
            "*" if one is best else "", one.option.label, f"{one.option.seconds * 1e3:.4g}",
            f"{one.seconds * 1e3:.4g}", f"{one.error:+.1%}",
        )
    console.print(table)
    others = tuple(o for o in planned.proposal.options if o is not best.option)
    proposal = replace(planned.proposal, options=(best.option, *others))
    return replace(planned, plan=best.option.plan, proposal=proposal)
