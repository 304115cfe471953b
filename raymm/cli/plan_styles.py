"""``raymm plan --style``: multiplexed plans, and which style is faster, from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from raymm.files.output import Output
from raymm.files.run_files import write_whole

MAPPING = "mapping.json"
# Options that only a search for pipelines has.
_PIPELINED_ONLY = ("layouts", "schedules", "degrees", "strategy", "radius", "measure")


def add_style_arguments(command: argparse.ArgumentParser) -> None:
    """Options of ``raymm plan`` for execution styles."""
    add = command.add_argument
    add("--style", choices=("pipelined", "multiplexed", "auto"),
        help="pipelined (default): stages on devices of their own; multiplexed: modules share "
        "devices by quota, stages take turns; auto: both, and which is faster")
    add("--multiplex", action="store_true", help="the same as --style multiplexed")
    add("--quota-steps", type=int, metavar="N",
        help="multiplexed: quotas are multiples of 1/N of a device (default 10)")
    add("--interference", metavar="FILE",
        help="multiplexed: what modules cost each other: a file, bandwidth (default: estimated "
        "from shares of the memory bandwidth), or blind")
    add("--solver", metavar="NAME",
        help="multiplexed: auto (default), greedy, exact, local_search")


def check_style(args: argparse.Namespace, configured: str | None = None) -> str:
    """The style that is asked for, by options or else by ``parallel.style``.

    Raises:
        ConfigError: options that contradict each other.
    """
    from raymm.config.sections import ConfigError

    if args.multiplex and args.style not in (None, "multiplexed"):
        raise ConfigError(f"--multiplex is --style multiplexed, but --style is {args.style}")
    style = "multiplexed" if args.multiplex else args.style or configured or "pipelined"
    if style == "pipelined":
        options = ("quota_steps", "interference", "solver")
        given = [name for name in options if getattr(args, name) is not None]
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is of multiplexed plans; accepted with --style "
                "multiplexed or auto"
            )
    else:
        refused = _PIPELINED_ONLY if style == "multiplexed" else ("measure",)
        given = [name for name in refused if getattr(args, name) is not None]
        if given:
            raise ConfigError(f"--{given[0]} is of pipelined plans; it cannot be used with --style "
                              f"{style}")  # fmt: skip
    return style


def with_given(args: argparse.Namespace, style: str, given, request):
    """The request as a pipelined plan that the configuration gives has it, where the styles are
    compared.

    Raises:
        ConfigError, MultiplexError: options that contradict the plan.
    """
    from raymm.config.sections import ConfigError
    from raymm.planning.styles import with_ranks_of

    if given is None or style != "auto":
        return request
    refused = [name for name in _PIPELINED_ONLY if getattr(args, name) is not None]
    if refused:
        raise ConfigError(
            f"--{refused[0]} is of plans that raymm makes, but the configuration gives one "
            "(parallel); give one of them"
        )
    return with_ranks_of(given, request)


def refuse_mapping(given, path: str | None) -> None:
    """What is planned already, multiplexed, is not planned again.

    Raises:
        ConfigError: ``given`` is a mapping.
    """
    from raymm.config.sections import ConfigError
    from raymm.scheduler.multiplex.mapping import Mapping

    if isinstance(given, Mapping):
        raise ConfigError(
            f"parallel.plan is {path!r}, a multiplexed mapping, which `raymm train` runs as it is; "
            "accepted here: a pipelined plan, or none"
        )


def run_style(
    style: str, args: argparse.Namespace, config, model, given, request, note: str | None,
    output: Output, suffix: str, console: Console,
) -> None:
    """Plan multiplexed, or both ways; print, draw and save.

    Raises:
        MultiplexError, PlanError, DeviceError, ProfileError, LoadError: naming what is wrong.
    """
    from raymm.planning.request import DataShape
    from raymm.planning.styles import compare_styles, plan_multiplexed_request
    from raymm.scheduler.graph.strict_json import MultiplexError
    from raymm.scheduler.plan.plan import PlanError

    request, options = _options(args, request)
    request.check(model)
    data = DataShape.of_config(config.data, model.encoder_names)
    dtype = config.run.precision
    if not console.is_terminal:
        console.print(f"mapping {len(model.encoder_names) + 1} modules to {request.ranks} devices "
                      "...")  # fmt: skip
    if note is not None:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if data.microbatches > 1:
        console.print(
            f"note: data.microbatches is {data.microbatches}: the mapping is planned for a step's "
            f"{data.samples * data.microbatches} samples at once, so train it with "
            f"data.microbatches: 1; as it is, it would run {data.microbatches} times per step",
            highlight=False, markup=False, soft_wrap=True,
        )
    if style == "multiplexed":
        if given is not None:
            console.print("note: the configuration's layouts (parallel) are of a pipelined plan: "
                          "not used here", highlight=False, soft_wrap=True)  # fmt: skip
        multiplexed = plan_multiplexed_request(model, request, data, dtype, options)
        _show(multiplexed, console)
        if multiplexed.unfit:
            raise MultiplexError(multiplexed.unfit)
        _save(multiplexed, output, suffix, console)
        return
    found = compare_styles(model, request, data, dtype, options, given)
    for one in (found.pipelined, found.multiplexed):
        if one is not None:
            _show(one, console)
    console.print(found.explain(), highlight=False, markup=False, soft_wrap=True)
    if found.style is None:
        raise PlanError("neither style fits: " + "; ".join(found.refused.values()))
    if "multiplexed" in found.seconds:
        _save(found.multiplexed, output, suffix, console)
    if "pipelined" in found.seconds:
        save_pipelined(found.pipelined, output, suffix, console)


def _options(args: argparse.Namespace, request):
    """The request, and what only multiplexing has; ``--profile`` may be of surfaces."""
    from dataclasses import replace

    from raymm.planning.styles import MultiplexOptions
    from raymm.scheduler.graph.strict_json import whole

    solver = "auto" if args.solver is None else args.solver
    options = MultiplexOptions(interference=args.interference, strategy=solver)
    if args.quota_steps is not None:
        options = replace(options, steps=whole(args.quota_steps, "--quota-steps", 1))
    if request.profile is not None and has_surfaces(request.profile):
        return replace(request, profile=None), replace(options, surfaces=request.profile)
    return request, options


def has_surfaces(path: str) -> bool:
    """Whether a file is of scaling surfaces, not of layers. What is no such file at all is for
    its reader to refuse."""
    from raymm.scheduler.graph.strict_json import MultiplexError, json_value, read_file

    try:
        data = json_value(read_file(path), path)
    except MultiplexError:
        return False
    return isinstance(data, dict) and "surfaces" in data


def _show(planned, console: Console) -> None:
    console.print(planned.table())
    console.print(planned.explain(), highlight=False, markup=False, soft_wrap=True)


def _save(planned, output: Output, suffix: str, console: Console) -> None:
    with output.writing() as folder:
        write_whole(file := folder / MAPPING, planned.mapping.to_json())
        picture = planned.draw((folder / MAPPING).with_suffix(suffix))
    for one in (file, picture):
        console.print(f"wrote {one}", highlight=False, soft_wrap=True)


def pipelined_files(suffix: str) -> tuple[str, str, str]:
    """A plan, its picture, and that of its schedule."""
    return "plan.json", f"plan{suffix}", f"plan_schedule{suffix}"


def files_of(style: str, suffix: str) -> tuple[str, ...]:
    """Names of what is saved."""
    mapping = MAPPING, Path(MAPPING).with_suffix(suffix).name
    return {
        "pipelined": pipelined_files(suffix), "multiplexed": mapping,
        "auto": (*pipelined_files(suffix), *mapping),
    }[style]


def save_pipelined(planned, output: Output, suffix: str, console: Console) -> None:
    """A pipelined plan and its pictures.

    Raises:
        ConfigError: they cannot be written.
    """
    from raymm.config.build import write_json
    from raymm.draw import draw_plan

    with output.writing() as folder:
        files = [folder / name for name in pipelined_files(suffix)]
        write_json(files[0], planned.plan.to_dict())
        draw_plan(planned.plan, files[1])
        planned.draw(files[2])
    for one in files:
        console.print(f"wrote {one}", highlight=False, soft_wrap=True)
