"""Claim: rows of every form are converted exactly as transformers converts them.

Run with `python -m benchmarks.row_forms --json`.

Each case is rows of one form, with media of one form, in a file of one form; each target is a tiny
processor or tokenizer with the template of a published model. A cell is a case read for a target:
the file is detected, opened and made into microbatches as in a data worker, and token ids, labels
and media tensors are compared with a reference that uses transformers alone. Outcomes of a cell:

- ``equal``;
- ``refused``: raymm rejects the rows, and so does the template or the processor itself;
- ``wrong``: anything else, with the reason.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoProcessor, AutoTokenizer

from benchmarks.shared.common import console, emit, machine, parser
from benchmarks.shared.row_cases import CLIP, Case, Media, cases, write
from benchmarks.shared.row_models import TARGETS, Target, save
from benchmarks.shared.row_reference import IGNORED, CannotRenderError, Expected, reference
from benchmarks.shared.templates import SHAPES
from raymm.data import DataConfig, open_split, step_builder
from raymm.data.readers.detect import detect
from raymm.errors import DataError, SampleError

EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
_MAX_LENGTH = 4096


class Cell(NamedTuple):
    """Outcome of one case for one target, with a message unless it is equal."""

    outcome: str
    sentence: str = ""


def main() -> None:
    arguments = _arguments()
    out = console()
    transformers.logging.set_verbosity_error()
    started = time.monotonic()
    outcomes: Counter[str] = Counter()
    forms, wrong = set(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        media = Media(folder)
        chosen = [case for case in cases(media) if _matches(case.name, arguments.case)]
        for target_name, target in TARGETS.items():
            if not _matches(target_name, arguments.target):
                continue
            loaded = load(target, folder / "models" / target_name)
            for case in chosen:
                if not applies(case, target):
                    continue
                cell = check(case, target, loaded, folder)
                forms.add(case.name)
                outcomes[cell.outcome] += 1
                if cell.outcome == WRONG:
                    wrong.append(f"{target_name} | {case.name}: {cell.sentence}")
                print(f"{cell.outcome:8}{target_name} | {case.name}  {cell.sentence}".rstrip())
    result = {
        "forms": len(forms), **{name: outcomes[name] for name in (EQUAL, REFUSED, WRONG)},
        "wrong_cells": wrong, "seconds": round(time.monotonic() - started, 1),
        "machine": machine(),
    }
    out.print(", ".join(f"{result[name]} {name}" for name in ("forms", EQUAL, REFUSED, WRONG)))
    emit(result, arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--case", nargs="+", metavar="TEXT", help="cases whose name contains this")
    options.add_argument("--target", nargs="+", metavar="TEXT", help="targets that contain this")
    return options.parse_args()


def _matches(name: str, wanted: Sequence[str] | None) -> bool:
    return not wanted or any(text in name for text in wanted)


def load(target: Target, folder: Path) -> Any:
    """Save a target and load it with transformers."""
    save(target, folder)
    return (AutoProcessor if target.processor else AutoTokenizer).from_pretrained(folder)


def applies(case: Case, target: Target) -> bool:
    """Return True if the target supports the kind of rows."""
    shape = SHAPES[target.shape]
    return (
        case.kinds <= target.media
        and ("tools" not in case.needs or shape.tools)
        and ("thinks" not in case.needs or shape.thinks)
        and ("tokenizer" not in case.needs or target.processor is None)
        and ("processor" not in case.needs or target.processor is not None)
        # In a preference, the text after the prompt is learned, whatever the template marks.
        and not (target.training and "preferences" in case.config)
    )


def check(case: Case, target: Target, loaded: Any, folder: Path) -> Cell:
    """Read a case for a target and compare it with the reference.

    Args:
        loaded: processor or tokenizer of the target.
        folder: folder with the media; gets the file.
    """
    path = write(case, folder)
    try:
        expected = [_reference(loaded, target, row) for row in case.expected]
        refusal = ""
    except CannotRenderError as error:
        expected, refusal = [], str(error)
    try:
        model = getattr(loaded, "tokenizer", loaded).name_or_path
        rows = _built(case, target, model, path)
    except Exception as error:  # only the data path's own errors are rejections
        explained = bool(refusal) and isinstance(error, DataError | SampleError)
        sentence = " ".join(f"[{type(error).__name__}] {error}".split())
        return Cell(REFUSED if explained else WRONG, sentence)
    finally:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    if refusal:
        return Cell(WRONG, f"accepted, but transformers refuses it: {refusal}")
    if len(rows) != len(expected):
        return Cell(WRONG, f"{len(rows)} rows instead of {len(expected)}")
    for number, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        if difference := _difference(row, wanted, loaded, target):
            return Cell(WRONG, f"row {number}: {difference}")
    return Cell(EQUAL)


def _reference(loaded: Any, target: Target, row: Expected) -> dict[str, torch.Tensor]:
    shape = SHAPES[target.shape]
    return reference(loaded, target.shape, shape, row, CLIP)


def _built(case: Case, target: Target, model: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows as a data worker builds them, each in a separate microbatch."""
    section = detect(path).data_section
    for name, values in case.config.get("modalities", {}).items():
        section["modalities"].setdefault(name, {}).update(values)
    config = DataConfig.model_validate({
        **section, ("processor" if target.processor else "tokenizer"): model,
        "batch_size": 1, "microbatches": 1, "max_length": _MAX_LENGTH, "shuffle": False,
        **{name: value for name, value in case.config.items() if name != "modalities"},
    })
    dataset = open_split(config, "train")
    builder = step_builder(config, dataset)
    microbatches = [
        microbatch for index in range(len(dataset))
        for microbatch in builder.build([[index]]).microbatches
    ]
    if not case.config.get("preferences"):
        return [dict(microbatch) for microbatch in microbatches]
    rows = []
    for microbatch in microbatches:  # both answers are rows of one microbatch
        for number, mask in enumerate(microbatch["attention_mask"].bool()):
            rows.append({
                name: value[number : number + 1][:, mask] for name, value in microbatch.items()
            })
    return rows


def _difference(
    row: Mapping[str, Any], wanted: Mapping[str, Any], loaded: Any, target: Target
) -> str:
    """Return the first difference; empty if there is none."""
    tokenizer = getattr(loaded, "tokenizer", loaded)
    names = list(wanted) if target.processor else ["input_ids", "labels"]
    missing = set(names) ^ set(row) if target.processor else set()
    if missing:
        return f"has {sorted(row)} instead of {sorted(wanted)}"
    for name in names:
        own, due = row[name], wanted[name]
        if name == "labels" and not torch.equal(own, due):
            shown = [tokenizer.decode(value[value != IGNORED]) for value in (own, due)]
            return f"labels {shown[0]!r} instead of {shown[1]!r}"
        if name == "input_ids" and not torch.equal(own, due):
            return f"tokens {tokenizer.decode(own[0])!r} instead of {tokenizer.decode(due[0])!r}"
        if isinstance(due, torch.Tensor) and not torch.equal(torch.as_tensor(own), due):
            return f"{name} differs ({tuple(own.shape)}, {tuple(due.shape)})"
    return ""


if __name__ == "__main__":
    main()
