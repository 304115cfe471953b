"""Settings of a run without a configuration file, from its model, its rows and a few options."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from raymm.actors.weights.hub_folder import is_hub_id, local_folder, split_id
from raymm.config.model_section import LoraSection
from raymm.errors import ConfigError
from raymm.files.config_file import parse_yaml
from raymm.files.field_errors import closest, explain
from raymm.training.under_way import UnderWay

if TYPE_CHECKING:  # imports numpy
    from raymm.data.readers.detect import Detected

EPOCHS, LR, LORA_LR, WARMUP = 3.0, 1e-5, 1e-4, 0.03
LORA = {"r": 16, "alpha": 32.0}
# Rows of a step, and maximum rows and text tokens of a microbatch.
_BATCH, _MICROBATCH, _TOKENS = 16, 8, 4096
# Held-out rows: fraction of all rows, maximum, and minimum number of rows for any.
_EVAL_FRACTION, _MOST_EVAL_ROWS, _LEAST_ROWS = 0.02, 512, 200
_EVALUATIONS = 10  # evaluations per run
_MULTIPLE = 64  # max_length is rounded up to a multiple
# Files that only models of text with images, video or sound have.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class Options:
    """Options of ``raymm train`` with ``--model`` and ``--data``; None if not given."""

    lora: dict[str, Any] | None
    lr: float | None
    epochs: float | None
    eval_fraction: float | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Return the options of the command line. Raises ConfigError, which names the option, its
        value and what is accepted."""
        for name, value in (("lr", args.lr), ("epochs", args.epochs)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name} is {value:g}; accepted: a number above 0")
        fraction = args.eval_fraction
        if fraction is not None and not 0 <= fraction < 1:
            raise ConfigError(f"--eval-fraction is {fraction:g}; accepted: from 0 to below 1")
        lora = None if args.lora is None else _lora(args.lora)
        return cls(lora, args.lr, args.epochs, fraction)


def _lora(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    accepted = list(LoraSection.model_fields)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in accepted:
            hint = closest(name, accepted)
            raise ConfigError(
                f"--lora has {word!r}; " + (f"did you mean {hint}=...? " if hint else "")
                + f"accepted: KEY=VALUE, e.g. r=16; keys: {', '.join(accepted)}"
            )
        values[name] = parse_yaml(text, f"--lora {name}")
    values = {**LORA, **values}
    try:
        r = LoraSection.model_validate(values).r
    except ValidationError as error:
        raise ConfigError(f"--lora: {explain(error, LoraSection)}") from None
    return values if any(word.startswith("alpha=") for word in words) else {
        **values, "alpha": 2.0 * r
    }


def settings_without_rows(
    model: str, source: dict[str, Any], folder: Path, options: Options
) -> dict[str, Any]:
    """Return the configuration values of a new run that do not depend on its rows; see
    :func:`first_settings`."""
    path, revision = split_id(model) if is_hub_id(model) else (model, None)
    reference = {"path": path} | ({"revision": revision} if revision else {})
    text_only = is_text_only(model)
    values: dict[str, Any] = {
        "run": {"storage_path": str(folder), "steps": 1},
        "model": {"language_model": {**reference, "train": "full"}} if text_only
        else {**reference, "train": {"language_model": "full"}},
        "data": {
            "train": [source] if len(source) > 1 else source["path"],
            "tokenizer" if text_only else "processor": model,
        },
    }
    apply_options(values, Options(options.lora, options.lr, None, None))
    return values


def first_settings(
    model: str, source: dict[str, Any], detected: Detected, folder: Path, options: Options
) -> dict[str, Any]:
    """Return the configuration values of a new run. Reads all rows. ``model`` is a folder or
    ``ORG/NAME@COMMIT``, and ``source`` has the configuration values of the source of the rows.
    Raise a ``ConfigError`` or ``DataError`` if the model cannot be trained on the rows."""
    from rich.console import Console

    from raymm.data import DataConfig, open_split, row_lengths
    from raymm.data.samples.config import TOWER_OF

    without_rows = settings_without_rows(model, source, folder, options)
    data = {**detected.data_section, **without_rows["data"]}
    sections: dict[str, Any] = without_rows["model"]
    if "language_model" in sections:
        if detected.modalities:
            path = sections["language_model"]["path"]
            raise ConfigError(
                f"--data has items of {', '.join(detected.modalities)}, and --model {path!r} is a "
                "text-only model (its folder has no processor); give a model that takes them"
            )
    else:
        towers = dict.fromkeys((TOWER_OF[kind] for kind in detected.modalities), "frozen")
        between = {"projector": "full"} if towers else {}
        sections["train"] = {**towers, **between, "language_model": "full"}
    if detected.preferences:
        sections["loss"] = {"dpo": {"reference": "base" if options.lora else "initial"}}
    config = DataConfig.model_validate({
        **data, "batch_size": 1, "microbatches": 1, "preferences": bool(detected.preferences),
    })
    with UnderWay(Console(stderr=True), "counting tokens") as work:
        lengths = row_lengths(
            config, open_split(config, "train"),
            lambda rows, total: work.update(f"counting tokens: {rows:,} of {total:,} rows"),
        )
    data.pop("processor", None)  # the default is the model's
    longest = -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE
    samples = max(1, min(_MICROBATCH, _TOKENS // longest, len(lengths)))
    microbatches = max(1, min(_BATCH, len(lengths)) // samples)
    values: dict[str, Any] = {
        "run": {"storage_path": str(folder), **_device()},
        "model": sections,
        "data": {
            **data, "batch_size": samples * microbatches, "microbatches": microbatches,
            "max_length": longest,
        },
        "optimizer": {"schedule": "cosine"},
    }
    fraction = 0.0 if len(lengths) < _LEAST_ROWS else min(
        _EVAL_FRACTION, _MOST_EVAL_ROWS / len(lengths)
    )  # fmt: skip
    apply_options(values, Options(
        options.lora, options.lr or (LR if options.lora is None else LORA_LR),
        options.epochs or EPOCHS,
        round(fraction, 6) if options.eval_fraction is None else options.eval_fraction,
    ))
    return values


def apply_options(values: dict[str, Any], options: Options) -> None:
    """Apply options to the values of a configuration, in place."""
    run, model, data = values["run"], values["model"], values["data"]
    if options.lora is not None:
        adapters = {"lora": options.lora}
        if "train" in model:  # the projector stays frozen, too
            model["train"] |= {"projector": "frozen", "language_model": adapters}
        else:
            model["language_model"]["train"] = adapters
    if options.lr is not None:
        values.setdefault("optimizer", {})["lr"] = options.lr
    if options.eval_fraction is not None:
        data.pop("heldout_fraction", None)
        run.pop("eval_every", None)
        if options.eval_fraction:
            data["heldout_fraction"] = options.eval_fraction
    if options.epochs is not None:
        from raymm.config.sections import parse_config
        from raymm.data import open_split

        config = parse_config({**values, "run": {**run, "steps": 1}})
        rows = len(open_split(config.data, "train"))
        run["steps"] = max(1, round(options.epochs * rows / data["batch_size"]))
    if data.get("heldout_fraction"):
        run.setdefault("eval_every", max(1, run["steps"] // _EVALUATIONS))


def is_text_only(model: str) -> bool:
    """Return True for a text model, or a tokenizer alone: a folder without a processor."""
    folder = Path(local_folder(model, weights=False))
    if any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return False
    if not (folder / "config.json").is_file():
        return True
    config = json.loads((folder / "config.json").read_text())
    return not any(name.endswith("_config") and name != "text_config" for name in config)


def _device() -> dict[str, Any]:
    """Return the device and the precision of a run: bfloat16 on GPUs."""
    from raymm.runtime.cluster import connected, pick_device

    if os.environ.get("RAY_ADDRESS") in (None, "", "local"):
        from raymm.actors.host.gpus import read_gpus

        gpus = read_gpus()
        is_gpu = gpus is not None and bool(gpus.names)
    else:
        with connected():
            is_gpu = pick_device("auto") == "cuda"
    return {"device": "cuda", "precision": "bf16"} if is_gpu else {}
