"""``raymm profile --multiplex``: measure scaling surfaces, show and save them."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from raymm.files.output import Output
from raymm.files.run_files import write_whole
from raymm.plural import plural
from raymm.profiling.surfaces import SurfaceProfile, profile_surfaces
from raymm.scheduler.costs.interference import colocations_to_json
from raymm.scheduler.costs.surface import surfaces_to_json
from raymm.scheduler.schedule.memory import GIB

DEFAULT_GPUS = 8
# Suffixes of the files next to the surfaces.
BESIDE_SURFACES = (".colocations.json", ".interference.json")


def run_surfaces(args: argparse.Namespace, config, model, output: Output) -> None:
    """Measure, print and save surfaces to ``output``. If modules were measured side by side,
    ``*.colocations.json`` and the fitted ``*.interference.json`` are written next to it.

    Raises:
        DataError, PlanError, ClusterError: names what is wrong.
    """
    from raymm.costs.full_microbatch import full_microbatch
    from raymm.runtime.cluster import connected, pick_device
    from raymm.runtime.options import resolve_precision

    microbatch = full_microbatch(config.data, model.encoder_names)
    with connected():
        device = pick_device(args.device or config.run.device, config.resources.for_device)
        profile = profile_surfaces(
            model, microbatch, batch=config.data.batch_size,
            gpus=args.gpus if args.gpus is not None else config.planning.ranks or DEFAULT_GPUS,
            repeats=args.repeats, device=device,
            precision=resolve_precision(config.run.precision, device),
            resources=config.resources.for_device(device), threads=config.resources.threads,
            ranks_per_node=config.planning.ranks_per_node,
        )
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
