"""The command line: ``raymm train``, ``plan``, ``profile``, ``trace``, ``export``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raymm import __version__
from raymm.plan_command import add_plan_arguments, run_plan
from raymm.profile_command import add_profile_arguments, run_profile

# What a user can set right; anything else is a defect and keeps its traceback.
EXIT_USER_ERROR = 2
EXIT_RUN_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 if the run failed, 2 if what was asked
    for cannot run (configuration, model, data or cluster do not allow it), 128 + number if a
    signal stopped it."""
    args = _parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # import paths in configs, as `python -m` has it
    from raymm.actors.group import ClusterError, RankFailedError
    from raymm.checkpoint import CheckpointError
    from raymm.data import DataError
    from raymm.export import ExportError

    console = Console(stderr=True)
    try:
        args.run(args)
    except (ValueError, DataError, ClusterError, CheckpointError, ExportError) as error:
        console.print(f"[bold red]error:[/] {type(error).__name__}:", highlight=False)
        for text in (str(error), *getattr(error, "__notes__", ())):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if os.environ.get("RAYMM_TRACEBACK"):
            raise
        return EXIT_USER_ERROR
    except RankFailedError as error:
        console.print("[bold red]the run failed:[/]", highlight=False)
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        console.print("Start the same command again to go on from the last checkpoint.")
        return EXIT_RUN_FAILED
    except KeyboardInterrupt:
        return _stopped(console, signal.SIGINT)
    except SystemExit as stop:  # ray.init() turns SIGTERM into this
        if stop.code != signal.SIGTERM:
            raise
        return _stopped(console, signal.SIGTERM)
    return 0


def _stopped(console: Console, number: signal.Signals) -> int:
    console.print(
        f"stopped by {number.name}. Start the same command again to go on from the last "
        "checkpoint.", soft_wrap=True,
    )
    return 128 + number  # as shells report a signal


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raymm", description="Distributed training of multimodal models on Ray."
    )
    parser.add_argument("--version", action="version", version=f"raymm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, or go on from the run's last checkpoint")
    plan = commands.add_parser("plan", help="decide what runs where; show, draw and save it")
    export = commands.add_parser("export", help="write trained modules as Hugging Face folders")
    profile = commands.add_parser("profile", help="measure what the layers cost on a real device")
    for command in (train, plan, export, profile):
        command.add_argument("config", help="YAML file")
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides",
            help="change a value of the file (repeatable)",
        )
    train.set_defaults(run=_train)
    add_plan_arguments(plan)
    plan.set_defaults(run=run_plan)
    export.add_argument("--out", required=True, help="a new folder")
    export.set_defaults(run=_export)
    add_profile_arguments(profile)
    profile.set_defaults(run=run_profile)
    trace = commands.add_parser("trace", help="summarise a run's last timeline")
    trace.add_argument("run_folder", help="folder of a run (run.storage_path)")
    trace.set_defaults(run=_trace)
    return parser


def _train(args: argparse.Namespace) -> None:
    from raymm.build import build_model, build_plan
    from raymm.config import load_config
    from raymm.plan_request import PlanRequest
    from raymm.trainer import Trainer

    config = load_config(args.config, args.overrides)
    model = build_model(config)
    plan = build_plan(config, model)
    Trainer(
        model, PlanRequest.of_config(config) if plan is None else plan, config.data, config.run,
        optimizer=config.optimizer.build(config.run.steps),
        resources=config.resources.for_device,
        threads=config.resources.threads,
    ).fit()


def _export(args: argparse.Namespace) -> None:
    from raymm.build import build_model
    from raymm.config import load_config
    from raymm.export import export_model

    config = load_config(args.config, args.overrides)
    folders = export_model(
        build_model(config), config.run.storage_path, args.out, config.data.tokenizer
    )
    for folder in folders:
        print(f"wrote {folder}")


def _trace(args: argparse.Namespace) -> None:
    from raymm.config import ConfigError

    file = Path(args.run_folder) / "trace.json"
    if not file.is_file():
        raise ConfigError(f"run_folder is {args.run_folder!r}; it has no trace.json")
    events = json.loads(file.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    table = Table(title=str(file))
    for name in ("timeline", "rank", "busy ms", "waiting ms", "step ms", "bubble"):
        table.add_column(name, justify="left" if name in ("timeline", "rank") else "right")
    for (pid, tid), name in sorted(threads.items()):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        end = max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)
        mine = [e for e in spans if e["tid"] == tid]
        busy = sum(e["dur"] for e in mine if e["cat"].startswith(("forward", "backward")))
        wait = sum(e["dur"] for e in mine if e["cat"] == "recv")
        table.add_row(
            processes[pid], name, f"{busy / 1e3:.1f}", f"{wait / 1e3:.1f}", f"{end / 1e3:.1f}",
            f"{1 - busy / end:.0%}",
        )
    Console().print(table)
    print(f"open {file} in Perfetto or chrome://tracing")


if __name__ == "__main__":
    sys.exit(main())
