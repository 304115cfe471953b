"""``raymm profile``: measure the cost of each layer of a configured run, or scaling surfaces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich import box
from rich.console import Console
from rich.table import Table

from raymm.errors import PlanError
from raymm.files.output import Output
from raymm.files.run_files import write_whole
from raymm.plural import plural
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.graph.module_graph import ModuleGraph

if TYPE_CHECKING:
    from raymm.profiling.surfaces import SurfaceProfile

# Maximum relative difference in time of layers of the same shape that share a row.
_SAME_WITHIN = 0.25
_TIMES = ("forward", "backward_input", "backward_weight")
_SIZES = ("activation_bytes", "parameter_bytes")
DEFAULT_GPUS = 8
# Suffixes of the files next to the surfaces.
BESIDE_SURFACES = (".colocations.json", ".interference.json")


def add_profile_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``raymm profile``, except the configuration."""
    command.add_argument(
        "--out", required=True, help="JSON file to write; a picture is written next to it"
    )
    command.add_argument(
        "--lengths", default="", metavar="N,N,...",
        help="more lengths (tokens per sample) to run the language model on; encoders then also "
             "run on half and twice as many items",
    )
    command.add_argument("--repeats", type=int, default=5, help="runs per measurement (default 5)")
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=None,
        help="instead of the configuration's run.device",
    )
    command.add_argument(
        "--multiplex", action="store_true",
        help="measure modules' scaling surfaces (GPUs x quota) for multiplexed plans, and on GPUs "
             "how modules side by side slow each other down",
    )
    command.add_argument(
        "--gpus", type=int, metavar="N",
        help="with --multiplex: maximum replicas of a module (default: planning.ranks, else 8)",
    )


def run_profile(args: argparse.Namespace) -> None:
    """Measure, save, print and draw. Raises ConfigError, DataError, PlanError or ClusterError,
    which name what is wrong."""
    from raymm.config.check_files import check_files
    from raymm.config.sections import load_config

    lengths = parse_lengths(args.lengths)
    if Path(args.out).suffix != ".json":
        raise PlanError(f"--out is {args.out!r}; the name must end in .json")
    if args.repeats < 1:
        raise PlanError(f"--repeats is {args.repeats}; it must be at least 1")
    if args.gpus is not None and not args.multiplex:
        raise PlanError("--gpus requires --multiplex")
    if args.gpus is not None and args.gpus < 1:
        raise PlanError(f"--gpus is {args.gpus}; it must be at least 1")
    if args.lengths and args.multiplex:
        raise PlanError("--lengths cannot be used with --multiplex, which uses the data's lengths")
    companions = BESIDE_SURFACES if args.multiplex else (".png",)
    output = Output.file("--out", args.out, *companions)
    output.check()
    config = load_config(args.config, args.overrides)
    check_files(config)
    from raymm.config.build import build_model
    from raymm.costs.profile_files import save_table
    from raymm.costs.workload import full_microbatch
    from raymm.draw.profile import draw_profile
    from raymm.model.features import MEASURED_COSTS
    from raymm.model.multimodal import MultimodalModule, module_graph
    from raymm.profiling.layers import LayerMeasurement
    from raymm.runtime.cluster import connected, pick_device
    from raymm.runtime.options import resolve_precision

    model = build_model(config)
    model.require(MEASURED_COSTS)
    model = cast(MultimodalModule, model)  # only models by parts have measured costs
    if args.multiplex:
        run_surfaces(args, config, model, output)
        return
    microbatch = full_microbatch(config.data, model.encoder_names)
    with connected():
        device = pick_device(args.device or config.run.device, config.resources.for_device)
        table = LayerMeasurement(
            model, microbatch, lengths=lengths, repeats=args.repeats,
            precision=resolve_precision(config.run.precision, device), device=device,
            resources=config.resources.for_device(device), threads=config.resources.threads,
        ).run()
    graph = module_graph(model)
    profile = table.at()
    profile.check(graph)
    with output.writing():
        target = save_table(table, output.target)
        picture = draw_profile(
            profile, target.with_suffix(".png"),
            projectors=[node.name for node in graph.nodes if node.projector],
        )
    console = Console()
    console.print(profile_rows(table, graph))
    for name, rows in table.modules.items():
        lengths_of = ", ".join(f"{row.tokens} tokens of {row.samples}" for row in rows)
        console.print(f"{name} measured at {lengths_of} samples", highlight=False, soft_wrap=True)
    for file in (target, picture):
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return ``(512, 1024)`` for ``"512,1024"``. Raises PlanError if an entry is not a whole
    number."""
    lengths = [length.strip() for length in text.split(",") if length.strip()]
    for length in lengths:
        if not length.isdecimal():
            raise PlanError(f"--lengths has {length!r}; give whole numbers, such as 512,1024")
        if len(length) > 9 or int(length) < 2:
            raise PlanError(f"--lengths has {length}; each must be above 1, below 10^9")
    return tuple(int(length) for length in lengths)


def profile_rows(table: ProfileTable, graph: ModuleGraph) -> Table:
    """Return a table of the default microbatch's costs, where equal neighbouring layers share a
    row."""
    shown = Table(title=f"one microbatch on {table.device}, {table.dtype}")
    for name in ("module", "layers", "F ms", "B_d ms", "B_w ms", "activ. MB", "param. MB"):
        is_text = name in ("module", "layers")
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    profile = table.at()
    for node in graph.nodes:
        layers = profile.modules[node.name]
        for lo, hi in _groups(layers, node.num_blocks):
            count = hi - lo
            mean = [sum(getattr(c, n) for c in layers[lo:hi]) / count for n in (*_TIMES, *_SIZES)]
            label = f"{lo}..{hi - 1}, each" if count > 1 else str(lo)
            if node.projector and lo == node.num_blocks:
                label = f"{lo} (projector)"
            shown.add_row(
                node.name, label, *(f"{1e3 * t:.2f}" for t in mean[:3]),
                *(f"{size / 1e6:.2f}" for size in mean[3:]),
            )
    return shown


def _groups(layers: tuple[LayerCost, ...], blocks: int) -> list[tuple[int, int]]:
    """Return the ranges of layers that cost about the same; a projector is separate."""
    bounds = [0]
    for index in range(1, len(layers)):
        if index == blocks or not _alike(layers[bounds[-1]], layers[index]):
            bounds.append(index)
    return list(zip(bounds, [*bounds[1:], len(layers)], strict=True))


def _alike(a: LayerCost, b: LayerCost) -> bool:
    if a.parameter_bytes != b.parameter_bytes:
        return False
    total_a, total_b = (sum(getattr(c, name) for name in _TIMES) for c in (a, b))
    return abs(total_a - total_b) <= _SAME_WITHIN * max(total_a, total_b)


def run_surfaces(args: argparse.Namespace, config, model, output: Output) -> None:
    """Measure, print and save surfaces to ``output``. If modules were measured side by side,
    ``*.colocations.json`` and the fitted ``*.interference.json`` are written next to it.

    Raises:
        DataError, PlanError, ClusterError: names what is wrong.
    """
    from raymm.costs.workload import full_microbatch
    from raymm.profiling.surfaces import SurfaceMeasurement
    from raymm.runtime.cluster import connected, pick_device
    from raymm.runtime.options import resolve_precision
    from raymm.scheduler.costs.interference import colocations_to_json
    from raymm.scheduler.costs.surface import surfaces_to_json

    microbatch = full_microbatch(config.data, model.encoder_names)
    with connected():
        device = pick_device(args.device or config.run.device, config.resources.for_device)
        profile = SurfaceMeasurement(
            model, microbatch, batch=config.data.batch_size,
            gpus=args.gpus if args.gpus is not None else config.planning.ranks or DEFAULT_GPUS,
            repeats=args.repeats, device=device,
            precision=resolve_precision(config.run.precision, device),
            resources=config.resources.for_device(device), threads=config.resources.threads,
            ranks_per_node=config.planning.ranks_per_node,
        ).run()
    console = Console()
    console.print(surfaces_table(profile))
    with output.writing():
        texts = {output.target: surfaces_to_json(profile.surfaces, profile.conditions)}
        colocations, interference = map(output.target.with_suffix, BESIDE_SURFACES)
        if profile.colocations:
            texts[colocations] = colocations_to_json(profile.colocations)
        if profile.fit is not None:
            texts[interference] = profile.fit.model.to_json()
        for file, text in texts.items():
            write_whole(file, text)
    if profile.fit is not None:
        console.print(
            f"interference fitted to {profile.fit.samples} colocations: R2 {profile.fit.r2:.2f}, "
            f"error {profile.fit.error:.1%} on average, {profile.fit.worst_error:.1%} at worst",
            highlight=False, soft_wrap=True,
        )
    for note in profile.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for file in texts:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)


def surfaces_table(profile: SurfaceProfile) -> Table:
    """Return a table of every module's milliseconds by degree and quota."""
    from raymm.scheduler.schedule.memory import GIB

    table = Table(
        title=f"forward and backward of {plural(profile.conditions.batch, 'sample')} on "
        f"{profile.conditions.device}, ms",
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title_justify="left",
    )
    steps = profile.surfaces[0].steps
    quotas = sorted({q for surface in profile.surfaces for q in surface.quotas})
    for name in ("module", "GPUs", *(f"{q / steps:.0%}" for q in quotas), "GiB"):
        table.add_column(name, justify="left" if name == "module" else "right", no_wrap=True)
    for surface in profile.surfaces:
        for i, degree in enumerate(surface.degrees):
            times = dict(zip(surface.quotas, surface.seconds[i], strict=True))
            table.add_row(
                surface.name if not i else "", str(degree),
                *(f"{1e3 * times[q]:.3g}" if q in times else "-" for q in quotas),
                f"{surface.memory_bytes[i] / GIB:.3f}",
            )
    return table
