"""The command line: ``raymm train``, ``plan``, ``profile``, ``trace``, ``check``, ``export``,
``generate``, ``data``, ``doctor``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from raymm.errors import InputError, RunError
from raymm.files.config_file import with_overrides
from raymm.files.field_errors import closest
from raymm.packages import explained_imports, import_object
from raymm.version import __version__

if TYPE_CHECKING:
    from raymm.config.sections import TrainConfig
    from raymm.training.trainer import Trainer

COMMANDS = {
    "train": "train, or continue from the run's last checkpoint",
    "plan": "plan which modules run on which devices; show, draw and save the plan",
    "export": "write trained modules as Hugging Face folders",
    "profile": "measure the cost of each layer on a device",
    "generate": "generate text from prompts with a run's model",
    "trace": "summarise a run's last timeline",
    "check": "check, compare or prune checkpoints",
    "data": "show rows of a data set as training reads them",
    "doctor": "check the nodes of a cluster and measure the connections between them",
}

# Errors that a user can fix. Anything else is a defect and keeps its traceback.
EXIT_USER_ERROR = 2
EXIT_RUN_FAILED = 1
# The run would fail in the same way again (EX_SOFTWARE of sysexits.h).
EXIT_REPEATS = 70
# The run left a node that is about to end, or reached its time limit. Its work is saved
# (EX_TEMPFAIL of sysexits.h).
EXIT_START_AGAIN = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    - 0: success, also for a run that takes its last step in spite of a signal.
    - 1: the run failed; the same command resumes it.
    - 2: the request cannot run with this configuration, model, data or cluster.
    - 70: the run failed and would fail again.
    - 75: the run left a node that is about to end and found no other, or reached
      ``run.max_seconds``; start it again.
    - 128 + number: a signal ended the run (143 for SIGTERM, 130 for SIGINT), with or without a
      checkpoint.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    args = _parsed(words)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for import paths in configs, as with `python -m`
    from raymm.training.stop_request import StopRequest

    console, stop = Console(stderr=True), StopRequest()
    try:
        with stop.listening(), explained_imports("raymm"):
            code = args.run(args)
    except InputError as error:
        config, is_of_option = getattr(args, "config", None), str(error).startswith("--")
        if config and config not in str(error) and not is_of_option:
            error.add_note(f"(in the configuration {with_overrides(config, args.overrides)})")
        console.print(f"[bold red]error:[/] {type(error).__name__}:", highlight=False)
        for text in (str(error), *getattr(error, "__notes__", ())):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if os.environ.get("RAYMM_TRACEBACK"):
            raise
        return EXIT_USER_ERROR
    except RunError as error:
        console.print("[bold red]the run failed:[/]", highlight=False)
        for text in (str(error), *getattr(error, "__notes__", ())):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        return EXIT_REPEATS if error.repeats else EXIT_RUN_FAILED
    except KeyboardInterrupt as end:
        if end.args:  # from a run, which has printed what was saved
            return 128 + signal.SIGINT
        number = stop.reason.number if stop.reason else signal.SIGINT
        return _stopped(console, signal.Signals(number))
    except SystemExit as end:  # ray.init() turns SIGTERM into this
        if end.code == signal.SIGTERM:
            return _stopped(console, signal.SIGTERM)
        if end.code == 128 + signal.SIGTERM and end.args != (end.code,):  # of a run, as above
            return 128 + signal.SIGTERM
        traceback.print_exc()
        console.print(
            "[bold red]error:[/] a function or module that the configuration names called "
            f"sys.exit({end.code!r}), see above; let it raise an error instead", highlight=False,
        )
        return EXIT_USER_ERROR
    return code or 0


def _stopped(console: Console, number: signal.Signals) -> int:
    console.print(f"stopped by {number.name}")
    return 128 + number  # as shells report a signal


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line. An unknown option ends the program with a
    suggestion."""
    parser = _parser(words[:1])
    args, unknown = parser.parse_known_args(words)
    for word in unknown:
        suggestion = closest(word.partition("=")[0], args.options)
        parser.error(
            f"unknown argument {word}" + (f"; did you mean {suggestion}?" if suggestion else "")
            + f" See raymm {words[0]} --help"
        )
    return args


def _parser(named: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser with the options of the named commands, whose modules are imported."""
    parser = argparse.ArgumentParser(
        prog="raymm", description="Distributed training of multimodal models on Ray."
    )
    parser.add_argument("--version", action="version", version=f"raymm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in named:
            _add_arguments(name, command)
        command.set_defaults(options=[*command._option_string_actions])
    return parser


def _add_arguments(name: str, command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    if name not in ("trace", "check", "data", "doctor"):
        add("config", help="YAML file", nargs="?" if name == "train" else None)
        add(
            "--set", action="append", default=[], metavar="KEY.PATH=VALUE", dest="overrides",
            help="change a value of the file (repeatable)",
        )
    match name:
        case "train":
            from raymm.cli.without_config import add_folder_arguments

            add_folder_arguments(command)
            command.set_defaults(run=_train)
        case "export":
            add("--out", required=True, help="a new folder")
            add("--merge", action="store_true",
                help="merge adapters into the weights instead of writing peft folders")
            add("--ema", action="store_true",
                help="write the average of the weights (optimizer.ema)")
            add("--dtype", choices=("source", "float32", "bfloat16", "float16"), default="source",
                help="dtype of the weights; source (default) keeps the folder's, for each tensor")
            command.set_defaults(run=_export)
        case "data":
            from raymm.cli.data import add_data_arguments

            add_data_arguments(command)
        case _:
            import_object(f"raymm.cli.{name}:add_{name}_arguments")(command)
            command.set_defaults(run=import_object(f"raymm.cli.{name}:run_{name}"))


def _train(args: argparse.Namespace) -> int:
    from raymm.runtime.embedded.forked_workers import single_threaded, start_servers_early

    with single_threaded():
        from raymm.cli.without_config import FolderStart
        from raymm.config.check_files import check_files
        from raymm.config.sections import load_config, parse_config
    start, trial = FolderStart.of(args), None
    if start is None:
        config = load_config(args.config, args.overrides)
        check_files(config, with_data=True)
    elif start.overrides and (trial := start.trial()) is not None:
        check_files(trial)
    # Settings of other sections are checked without a model.
    of_model = ("model", "parallel", "planning", "optimizer")
    needs_model = trial is not None and trial.parallel.plan is None and any(
        override.startswith(of_model) for override in args.overrides
    )
    if os.environ.get("RAY_ADDRESS"):
        from raymm.runtime.cluster import check_address

        check_address()
    if start is not None and start.earlier is None and not needs_model:
        with single_threaded():
            start.read_rows()
    # The following imports of torch, transformers and Ray take seconds.
    console = Console(stderr=True)
    if start is not None:
        console.print("loading torch, transformers and Ray")
    start_servers_early()
    from raymm.training.under_way import UnderWay

    if needs_model:
        assert trial is not None
        with UnderWay(console, "checking the settings against the model"):
            _check_model(trial)
    if start is not None:
        config = parse_config(start.values)
        check_files(config, with_data=True)
    with UnderWay(console, "checking the settings against the model"):
        trainer = _trainer(config)
    if start is not None:
        args.config = start.write()
    result = trainer.fit()
    if result.stopped:
        return EXIT_START_AGAIN
    overrides = [] if start is not None else args.overrides  # run.yaml has them
    words = ["raymm", "export", args.config, *(w for o in overrides for w in ("--set", o))]
    print(f"to export it:  {shlex.join([*words, '--out', str(result.path / 'export')])}")
    return 0


def _check_model(config: TrainConfig) -> None:
    """Check layouts, planning and optimizer against the model. Leaves out what may depend on rows:
    the number of steps, the metrics, and whether the model runs on its inputs."""
    from raymm.config.build import build_model, build_plan
    from raymm.files.section import MOST_COUNT
    from raymm.planning.request import PlanRequest
    from raymm.training.run_start import check_updates

    try:
        model = build_model(config)
    except InputError:  # raised again with the inputs of the rows, if they do not help
        return
    plan = build_plan(config, model)
    if plan is None:
        PlanRequest.of_config(config).check(model)
    run = config.run.model_copy(update={"steps": 1, "evaluate": None})
    check_updates(config.optimizer.build(MOST_COUNT), run, model, plan)


def _trainer(config: TrainConfig) -> Trainer:
    from raymm.config.build import build_layouts, build_model, build_plan
    from raymm.planning.request import PlanRequest
    from raymm.training.trainer import Trainer

    model = build_model(config)
    plan, layouts = build_plan(config, model), build_layouts(config)
    parallel = layouts if layouts is not None and layouts.elastic else plan
    return Trainer(
        model, PlanRequest.of_config(config) if parallel is None else parallel,
        config.data, config.run,
        optimizer=config.optimizer.build(config.run.steps),
        resources=config.resources.for_device,
        threads=config.resources.threads,
        cache=config.cache, at=config.at,
    )


def _export(args: argparse.Namespace) -> None:
    from raymm.config.check_files import check_files
    from raymm.config.sections import load_config

    config = load_config(args.config, args.overrides)
    check_files(config)
    from raymm.training.under_way import UnderWay

    with UnderWay(Console(stderr=True), "loading torch and transformers") as work:
        from raymm.config.build import build_model
        from raymm.storage.export import export_model

        work.update("reading the model")
        model = build_model(config)
        work.update("exporting the model")
        folders = export_model(
            model, config.run.storage_path, args.out,
            config.data.processor or config.data.tokenizer,
            trust_remote_code=config.data.trust_remote_code, merge=args.merge,
            averaged=args.ema, dtype=args.dtype,
        )
    for folder in folders:
        print(f"wrote {folder}")


if __name__ == "__main__":
    sys.exit(main())
