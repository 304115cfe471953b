"""``raymm train --model MODEL --data DATA``: a configuration from a model and its rows."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from raymm.actors.weights.hub_folder import (
    dataset_commit,
    is_hub_id,
    local_folder,
    pinned,
    split_id,
)
from raymm.cli.start_settings import (
    WARMUP,
    Options,
    apply_options,
    first_settings,
    settings_without_rows,
)
from raymm.data.remote.urls import is_url
from raymm.data.samples.source_config import HUB
from raymm.errors import ConfigError
from raymm.files.config_file import apply_override, expand_variables, read_sections
from raymm.files.field_errors import explain
from raymm.files.run_files import write_whole
from raymm.training.under_way import UnderWay

if TYPE_CHECKING:  # imports numpy
    from raymm.config.sections import TrainConfig
    from raymm.data.readers.detect import Detected

CONFIG = "run.yaml"
# Microbatches of a trial configuration, a multiple of most numbers of replicas.
_TRIAL_MICROBATCHES = 55_440
# Options without a configuration, and the corresponding settings.
_SETTINGS = {
    "model": "model.path", "data": "data.train",
    "output": "run.storage_path", "split": "data.train", "subset": "data.train",
    "lora": "model.train", "lr": "optimizer.lr", "epochs": "run.steps",
    "eval_fraction": "data.heldout_fraction",
}


def add_folder_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``raymm train`` without a configuration."""
    add = command.add_argument
    add("--model", metavar="MODEL",
        help="folder of a model, or its id on the hub: ORG/NAME or ORG/NAME@REVISION")
    add("--data", metavar="DATA",
        help="rows: a file, folder, glob or URL, or a data set's id on the hub: ORG/NAME or "
        "ORG/NAME@REVISION")
    add("--split", metavar="NAME", help="split of a data set on the hub (default: train)")
    add("--subset", metavar="NAME", help="configuration of a data set on the hub")
    add("--output", "--out", metavar="FOLDER", dest="output",
        help="folder of the run (default: runs/ and the model's name)")
    add("--lora", nargs="*", metavar="KEY=VALUE",
        help="train adapters of the language model: r=16 alpha=32 dropout=0 (the defaults), "
        "targets, dora, use_rslora, base=int4")
    add("--lr", type=float, help="learning rate (default: 1e-5, with --lora 1e-4)")
    add("--epochs", type=float, metavar="N", help="passes over the rows (default: 3)")
    add("--eval-fraction", type=float, metavar="F",
        help="fraction of rows held out for evaluation (default: 0.02, or 0 if there are few rows)")


@dataclass(frozen=True)
class FolderStart:
    """A run without a configuration file, with checked paths and options.

    Attributes:
        model: folder, or ``ORG/NAME@COMMIT``.
        source: configuration values of the source of the rows.
        earlier: configuration that an earlier command wrote; None for a new run.
    """

    model: str
    source: dict[str, Any]
    folder: Path
    options: Options
    overrides: tuple[str, ...]
    earlier: dict[str, Any] | None

    def trial(self) -> TrainConfig | None:
        """Check ``--set`` before rows are read. Return a configuration with placeholders for the
        values that depend on rows; None if the result of the check depends on rows. Raises
        ConfigError, which names every wrong field."""
        from raymm.config.sections import TrainConfig, parse_config

        if self.earlier is not None:
            return parse_config(self._overridden(copy.deepcopy(self.earlier)))
        values = self._overridden(
            settings_without_rows(self.model, self.source, self.folder, self.options)
        )
        if isinstance(data := values["data"], dict):
            count = data.get("microbatches", data.get("batch_size", _TRIAL_MICROBATCHES))
            data |= {"batch_size": count, "microbatches": count, **data}
            if "heldout" not in data:
                data.setdefault("heldout_fraction", 0.5)
        try:
            return TrainConfig.model_validate(expand_variables(values))
        except ValidationError as error:
            paths = [override.partition("=")[0].split(".") for override in self.overrides]
            text = explain(error, TrainConfig, lambda item: _is_of_override(item, paths))
            if text:
                raise ConfigError(text) from None
            return None

    def _overridden(self, values: dict[str, Any]) -> dict[str, Any]:
        for override in self.overrides:
            apply_override(values, override)
        return values

    @classmethod
    def of(cls, args: argparse.Namespace) -> FolderStart | None:
        """Check a command line without slow imports; None if it names a configuration. Raises
        ConfigError, which names the option, its value and what is accepted."""
        if args.config is not None:
            for name in _SETTINGS:
                if getattr(args, name) is not None:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} is given next to the configuration "
                        f"{args.config!r}; set {_SETTINGS[name]} there, or with --set"
                    )
            return None
        if args.model is None or args.data is None:
            raise ConfigError(
                "give a configuration file, or --model MODEL and --data DATA: a folder or hub id "
                "of a model, and a file, folder, URL or hub id of rows"
            )
        options = Options.of(args)
        folder = _run_folder(args)
        file = folder / CONFIG
        earlier = read_sections(file) if file.is_file() else None
        if earlier is not None:
            _check_same_run(args, file, earlier)
            return cls(args.model, {}, folder, options, tuple(args.overrides), earlier)
        source = _source(args)
        model = _model(args.model)
        return cls(model, source, folder, options, tuple(args.overrides), None)

    def read_rows(self) -> Detected:
        """Read all rows of a new run once, print a summary, and return the description of the rows.
        Raises DataError if rows cannot be used."""
        return self._detected

    @cached_property
    def _detected(self) -> Detected:
        from rich.console import Console

        from raymm.data.readers.base import ReaderOptions
        from raymm.data.readers.detect import detect

        options = {key: value for key, value in self.source.items() if key != "path"}
        with UnderWay(Console(stderr=True), "reading rows") as work:
            detected = detect(
                self.source["path"], options=ReaderOptions(**options),
                progress=lambda rows, part: work.update(f"reading rows: {rows:,} ({part:.0%})"),
            )
        print(detected.summary)
        return detected

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values of the configuration. Reads all rows of a new run. Raise a ``ConfigError`` or
        ``DataError`` if settings or rows cannot be used."""
        from raymm.config.sections import parse_config

        if self.earlier is None:
            values = first_settings(
                self.model, self.source, self.read_rows(), self.folder, self.options
            )
        else:
            values = copy.deepcopy(self.earlier)
            apply_options(values, self.options)
        steps = parse_config(self._overridden(values)).run.steps
        values.setdefault("optimizer", {}).setdefault("warmup_steps", round(WARMUP * steps))
        parse_config(values)
        return values

    def write(self) -> str:
        """Write the configuration, print it, and return its file."""
        file = self.folder / CONFIG
        text = yaml.safe_dump(self.values, sort_keys=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
        action = "resuming with" if self.earlier is not None else "wrote"
        print(f"{text}\n{action} {file}; the plan of the run will be saved next to it as plan.json")
        return str(file)


def _is_of_override(item: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> bool:
    """Return True if a validation error is about the value of an override, or about a section with
    an override that does not depend on rows."""
    where = [str(key) for key in item["loc"]]
    is_own = len(where) > 1 or where and where[0] not in ("model", "data")
    return any(
        where == path[:len(where)] and (is_own or item["type"] == "extra_forbidden")
        or where[:len(path)] == path
        for path in map(list, paths)
    )


def _run_folder(args: argparse.Namespace) -> Path:
    if args.output is not None:
        if is_url(args.output):
            raise ConfigError(
                f"--output is {args.output!r}; accepted: a folder. For a bucket, write a "
                "configuration with run.storage_path"
            )
        return Path(args.output)
    name = split_id(args.model)[0] if is_hub_id(args.model) else str(Path(args.model).resolve())
    path = Path(name)
    return Path("runs") / (path.name if path.name != "model" else path.parent.name)


def _check_same_run(args: argparse.Namespace, file: Path, earlier: dict[str, Any]) -> None:
    """Raise a ConfigError if the earlier command had another model or other rows."""
    model, data = earlier.get("model") or {}, earlier.get("data") or {}
    train = data.get("train")
    sources = train if isinstance(train, list) else [train]
    source = sources[0] if isinstance(sources[0], dict) else {"path": sources[0]}
    stored = {
        "model": model.get("path") or (model.get("language_model") or {}).get("path"),
        "data": source.get("path"),
    }
    differences = [
        (name, getattr(args, name), old_value) for name, old_value in stored.items()
        if len(sources) > 1 or not _same(getattr(args, name), str(old_value))
    ]
    for name, default in (("split", "train"), ("subset", None)):
        new_value, old_value = getattr(args, name) or default, source.get(name) or default
        if new_value != old_value:
            differences.append((name, new_value, old_value))
    for name, new_value, old_value in differences:
        if name == "model" and not is_hub_id(new_value):  # a missing folder is reported first
            _model(new_value)
        if name == "data" and not is_hub_id(new_value):
            _source(args)
        raise ConfigError(
            f"--{name} is {new_value!r}, but {file} is a run with {old_value!r}. Give the new run "
            f"another folder (--output), or remove {file.parent} to start again"
        )


def _same(now: str, before: str) -> bool:
    if is_hub_id(now) or before.startswith(HUB):
        return split_id(now)[0] == split_id(before.removeprefix(HUB))[0]
    return now == before or Path(now).resolve() == Path(before).resolve()


def _model(model: str) -> str:
    try:
        reference = pinned(model)
        folder = Path(local_folder(reference, weights=False))
    except ConfigError as error:
        raise ConfigError(f"--model is {model!r}. {error}") from None
    if not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.is_dir() else "is not a local folder"
        raise ConfigError(
            f"--model is {model!r}, which {problem}; accepted: a folder with config.json and "
            "safetensors, or the id of a model on the hub, such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return reference if is_hub_id(model) else str(folder.absolute())


def _source(args: argparse.Namespace) -> dict[str, Any]:
    from raymm.data.readers.files import is_there  # imports numpy

    data = args.data.removeprefix(HUB)
    on_hub = data != args.data or is_hub_id(data)
    options = {name: value for name in ("split", "subset") if (value := getattr(args, name))}
    if not on_hub:
        if options:
            raise ConfigError(
                f"--{next(iter(options))} is given, but --data is {data!r}, a file; accepted only "
                "with the id of a data set on the hub, ORG/NAME. Remove the option"
            )
        if not is_url(data) and not is_there(data):
            raise ConfigError(
                f"--data is {data!r}; there is no such file (looked for {Path(data).absolute()}). "
                "Accepted: a file, folder, glob or URL of rows, or the id of a data set on the "
                "hub, ORG/NAME"
            )
        return {"path": data if is_url(data) else str(Path(data).absolute())}
    name, revision = split_id(data)
    try:
        commit = dataset_commit(name, revision)
    except ConfigError as error:
        raise ConfigError(f"--data is {args.data!r}. {error}") from None
    return {"path": f"{HUB}{name}", **options, "revision": commit}
