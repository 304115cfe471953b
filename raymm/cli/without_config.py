"""``raymm train --model FOLDER --data FILE``: a configuration of what a folder and a file say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from raymm.files.config_error import ConfigError
from raymm.files.run_files import write_whole

CONFIG = "run.yaml"
# Columns by which items of a kind are known, and the tower that they go into.
_COLUMNS = {
    "image": ("images", "image"), "video": ("videos", "video"), "audio": ("audio", "audios"),
}
_TOWERS = {"image": "vision", "video": "vision", "audio": "audio"}
# Samples whose length is looked at; text tokens of a microbatch; samples of one, and of a step.
_SAMPLES, _TOKENS, _MOST, _BATCH = 64, 4096, 8, 16
_MULTIPLE = 64  # that the most tokens of a sample are rounded up to
_EPOCHS, _LR = 3, 1e-5


def add_folder_arguments(command: argparse.ArgumentParser) -> None:
    """Options of ``raymm train`` without a configuration."""
    add = command.add_argument
    add("--model", metavar="FOLDER", help="folder of a whole model with its processor")
    add("--data", metavar="FILE", help="its samples, with messages: JSONL or parquet")
    add("--out", metavar="FOLDER", help="of the run (default: runs/ and the model's name)")


def written_config(args: argparse.Namespace) -> str:
    """The configuration file to run: the one that is given, or one that is made and written.

    Raises:
        ConfigError: not exactly one of a file and a folder with data.
        DataError: data that cannot be used.
    """
    options = [name for name in ("model", "data", "out") if getattr(args, name) is not None]
    if args.config is not None and options:
        raise ConfigError(f"--{options[0]} is given beside {args.config!r}; give one of them")
    if args.config is not None:
        return args.config
    if args.model is None or args.data is None:
        raise ConfigError("give a configuration file, or --model FOLDER and --data FILE")
    values = chosen(args.model, args.data, args.out)
    folder = Path(values["run"]["storage_path"])
    file = folder / CONFIG
    if file.is_file():
        print(f"going on with {file}, which an earlier command wrote")
        return str(file)
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(values, sort_keys=False)
    write_whole(file, text)
    print(f"{text}\nwrote {file}; layouts are planned for the cluster, and saved beside it")
    return str(file)


def chosen(model: str, data: str, out: str | None = None) -> dict[str, Any]:
    """Values of a configuration.

    Args:
        model: folder of a whole model.
        data: its samples.
        out: folder of the run.

    Raises:
        ConfigError: no such folder.
        DataError: data that cannot be used.
    """
    if not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model is {model!r}; accepted: a folder with config.json and weights")
    modalities = {kind: {"column": column} for kind, column in _kinds(data).items()}
    rows, longest = _sizes(model, data, modalities)
    length = -(-longest // _MULTIPLE) * _MULTIPLE
    samples = max(1, min(_MOST, _TOKENS // length, rows))
    microbatches = max(1, min(_BATCH, rows) // samples)
    batch = samples * microbatches
    towers = {_TOWERS[kind]: "frozen" for kind in modalities}
    name = Path(model).resolve()
    folder = out or f"runs/{name.name if name.name != 'model' else name.parent.name}"
    return {
        "run": {"storage_path": str(folder), "steps": max(1, _EPOCHS * rows // batch)},
        "model": {
            "path": str(model), "train": {**towers, "projector": "full", "language_model": "full"},
        },
        "data": {
            "train": str(data), "modalities": modalities, "batch_size": batch,
            "microbatches": microbatches, "max_length": 2 * length,
        },
        "optimizer": {"lr": _LR},
    }


def _kinds(data: str) -> dict[str, str]:
    """By kind of items, the column that a file has them in."""
    file = Path(data)
    if not file.is_file():
        raise ConfigError(f"--data is {data!r}; there is no such file")
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        columns = set(parquet.read_schema(file).names)
    else:
        columns = set()
        with file.open() as lines:
            for number, line in zip(range(_SAMPLES), lines):  # noqa: B905  the file may be longer
                try:
                    columns |= set(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ConfigError(f"--data is {data!r}; line {number + 1}: {error}") from None
    there = {
        kind: [name for name in names if name in columns] for kind, names in _COLUMNS.items()
    }
    return {kind: names[0] for kind, names in there.items() if names}


def _sizes(model: str, data: str, modalities: dict[str, Any]) -> tuple[int, int]:
    """How many samples there are, and tokens of the longest of the first."""
    from raymm.data import DataConfig, open_split
    from raymm.data.loading.processed import ProcessedBuilder

    config = DataConfig.model_validate({
        "train": data, "processor": model, "modalities": modalities, "batch_size": 1,
        "microbatches": 1, "max_length": 10**6,
    })
    dataset = open_split(config, "train")
    builder = ProcessedBuilder(config, dataset)
    lengths = [
        builder.processor_batch([index])["input_ids"].shape[1]
        for index in range(min(_SAMPLES, len(dataset)))
    ]
    return len(dataset), max(lengths)
