"""``raymm check``: check, compare and prune checkpoints."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from raymm.actors.storage.location import check_location
from raymm.errors import ConfigError
from raymm.plural import plural

if TYPE_CHECKING:  # imports torch
    from raymm.storage.inspection import CheckpointReport, Comparison

# Maximum number of printed tensors of a comparison, the most different first.
TENSORS_SHOWN = 20
EXIT_NOT_WHOLE = 1


def add_check_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``raymm check``."""
    command.add_argument(
        "location", help="folder or URL of a run (run.storage_path), or of one of its checkpoints"
    )
    command.add_argument(
        "--against", metavar="CHECKPOINT",
        help="folder or URL of another checkpoint to compare with, tensor by tensor",
    )
    command.add_argument(
        "--keep", type=int, metavar="N",
        help="then remove all but the newest N whole checkpoints; the run must not be in progress",
    )


def run_check(args: argparse.Namespace) -> int:
    """Print a line per checkpoint, and return 0 if all are complete and, with ``--against``, equal,
    else 1. Raise a ``ConfigError`` for invalid options, and a ``CheckpointError`` if there is no
    checkpoint, or a compared one is incomplete."""
    from raymm.storage.inspection import inspect_checkpoints, prune_checkpoints
    from raymm.storage.step_folders import is_folder_name

    for option, value in (("location", args.location), ("--against", args.against)):
        try:
            check_location(value or "here")
        except ValueError as error:
            raise ConfigError(f"{option} is {value!r}: {error}") from None
    is_checkpoint = is_folder_name(args.location.rstrip("/").rpartition("/")[2])
    if args.keep is not None and args.keep < 1:
        raise ConfigError(f"--keep is {args.keep}; expected at least 1")
    if args.keep is not None and is_checkpoint:
        raise ConfigError(f"--keep needs a run's folder; {args.location!r} is one checkpoint")
    if args.against is not None:
        return _print_comparison(args.location, args.against)
    console = Console()
    reports = []
    for report in inspect_checkpoints(args.location):
        reports.append(report)
        console.print(_line(report), markup=False, highlight=False, soft_wrap=True)
    if args.keep is not None:
        for folder in prune_checkpoints(args.location, args.keep, console.print):
            console.print(f"removed {folder}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_NOT_WHOLE if any(r.problem and not r.torn for r in reports) else 0


def _line(report: CheckpointReport) -> str:
    if report.manifest is None:
        return f"{'torn' if report.torn else 'CORRUPT'}  {report.folder}: {report.problem}"
    manifest = report.manifest
    return (
        f"whole  {report.folder}: step {manifest.step}, {report.tensors} tensors in "
        f"{plural(len(manifest.files), 'file')}, {report.nbytes / 1e6:,.1f} MB"
    )


def _print_comparison(first: str, second: str) -> int:
    from raymm.storage.inspection import compare_checkpoints

    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing")
        comparison = compare_checkpoints(
            first, second, lambda done, of: progress.update(task, completed=done, total=of)
        )
    console.print(
        f"{comparison.equal} tensors are the same; {len(comparison.different)} differ; "
        f"{len(comparison.only_first)} are in the first only, "
        f"{len(comparison.only_second)} in the second",
        highlight=False,
    )
    for names, where in ((comparison.only_first, first), (comparison.only_second, second)):
        if names:
            suffix = f" and {len(names) - TENSORS_SHOWN} more" * (len(names) > TENSORS_SHOWN)
            text = f"only in {where}: {', '.join(names[:TENSORS_SHOWN])}{suffix}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if comparison.different:
        console.print(_table(comparison))
    return 0 if comparison.same else EXIT_NOT_WHOLE


def _table(comparison: Comparison) -> Table:
    title = "norm of the difference over the first one's norm"
    if len(comparison.different) > TENSORS_SHOWN:
        title += f", the {TENSORS_SHOWN} largest of {len(comparison.different)}"
    table = Table("tensor", "difference", title=title)
    for tensor in comparison.different[:TENSORS_SHOWN]:
        if tensor.kinds is not None:
            text = " and ".join(tensor.kinds)
        else:
            text = "not finite" if math.isnan(tensor.relative) else f"{tensor.relative:.3g}"
        table.add_row(tensor.name, text)
    return table
