"""Rules for changes between a checkpoint and the run that resumes from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from raymm.errors import CheckpointError
from raymm.storage.manifest import Manifest

# Maximum number of differences that a message names for one field.
SHOWN = 5
_MISSING = object()
_OTHER_DECAY = (
    "weight decay would apply to other parameters; earlier versions decayed everything by "
    "default, which is `no_decay: []` now"
)
_OWN_NAME = re.compile(r"^raymm(\.\w+)+:")


class Rule(NamedTuple):
    """Rule for changes of a field.

    Attributes:
        fields: pattern of field names. The first matching rule applies.
        accepted: True to resume with a message; False to require the field in
            ``run.allow_changes``.
    """

    fields: str
    accepted: bool
    why: str


RULES = (
    # Progress and rates, which resumed runs usually change.
    Rule("run.steps", True, ""),
    Rule("optimizer.total_steps", True, "the rest of the learning rate schedule changes"),
    Rule("optimizer.name", False, "the saved optimizer state is for another algorithm"),
    Rule("optimizer.modules.*.name", False, "the saved optimizer state is for another algorithm"),
    Rule("optimizer.parameters", False, "weights would be rounded, or master weights lost"),
    Rule("optimizer.modules.*.parameters", False, "weights would be rounded, or masters lost"),
    Rule("optimizer.no_decay*", False, _OTHER_DECAY),
    Rule("optimizer.modules.*.no_decay*", False, _OTHER_DECAY),
    Rule("optimizer.*", True, "it applies from the next step on"),
    Rule("run.precision", True, "numbers are rounded differently"),
    Rule("run.seed", False, "dropout, and weights that are not in checkpoints, would change"),
    # Samples of each step. The data position counts samples or planned steps.
    Rule("data.*.row_form.code", True, "rows are converted differently from the next step on"),
    Rule("data.*.times", True, "the files were rewritten; the part that was compared is the same"),
    Rule("data.train.*.name", True, "samples and metrics use the new name"),
    Rule("data.train.*.weight*", True, "it applies from the next step on"),
    Rule("data.train*", False, "the position in the epoch would refer to other samples"),
    Rule("data.seed", False, "the rest of the epoch would repeat some samples and skip others"),
    Rule("data.shuffle", False, "the rest of the epoch would repeat some samples and skip others"),
    Rule("data.batch_size", True, "the epoch continues at the same sample with another step size"),
    Rule("data.microbatches", True, "the same samples in other microbatches"),
    Rule("data.batching*", True, "the rest of the epoch is planned again"),
    Rule("data.heldout*", True, "held-out losses cannot be compared with earlier ones"),
    Rule("data.batches", True, "batches in memory are used in turn"),
    # Inputs of the model.
    Rule("data.tokenizer*", False, "token ids, or the template around them, would change"),
    Rule("data.processor_files*", False, "the model would receive other numbers"),
    Rule("data.modalities.*.processor_files*", False, "the encoder would receive other numbers"),
    Rule("data.*", True, "samples are prepared differently from the next step on"),
    # Computation of the model. Names, shapes and dtypes must always match both ways.
    Rule("model.parameters*", False, ""),
    Rule("model.*.code", True, "the function of that name, or a value that it holds, has changed"),
    Rule("model.packing", True, "the loss is the same"),
    Rule("model.*lora.dropout", True, "it applies from the next step on"),
    Rule("model.*.config.*drop*", True, "it applies from the next step on"),
    Rule("model.*.weights.times", True, "the files were rewritten; the compared part is the same"),
    Rule("model.*.weights*", False, "frozen weights, which are not in checkpoints, would change"),
    Rule("model.*", False, "the model would compute other results with the same weights"),
)
# These changes are never allowed: tensors would be lost or made up.
_NEVER = "model.parameters"

# Fields of the data that affect the order of rows, not their content.
_ORDER = (
    "data.*.times", "data.train.*.weight*", "data.seed", "data.shuffle", "data.batch_size",
    "data.microbatches", "data.batching*",
)


def have_same_rows(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if the data of two runs have the same rows in any order."""
    fields = {field for field in {*was, *now} if field.startswith("data.")}
    return all(
        any(fnmatchcase(name, pattern) for pattern in _ORDER)
        for field in fields
        for name, _, _ in _differences(field, was.get(field, _MISSING), now.get(field, _MISSING))
    )


def compare(
    folder: Path | str, manifest: Manifest, run: Mapping[str, Any], allowed: Sequence[str] = ()
) -> list[str]:
    """Compare a run with the checkpoint that it resumes from. Raise a ``CheckpointError`` if fields
    have changed that must not. Names all of them.

    Args:
        allowed: names of fields that may have changed (``run.allow_changes``).

    Returns:
        A line for each accepted change.
    """
    if not manifest.run:
        raise CheckpointError(
            f"{folder} has no description of its run: it was not saved by a trainer"
        )
    texts: list[str] = []
    refused: dict[str, str] = {}
    for field in sorted({*manifest.run, *run}):
        old, new = manifest.run.get(field, _MISSING), run.get(field, _MISSING)
        if field.endswith(".code") and _of_another_name(field, manifest.run, run):
            continue
        lines: dict[Rule, list[str]] = {}
        for subfield, old_value, new_value in _differences(field, old, new):
            lines.setdefault(_rule(subfield, old_value, new_value), []).append(
                _line(subfield, old_value, new_value)
            )
        for rule, changes in lines.items():
            text = _shortened(changes) + (f" ({rule.why})" if rule.why else "")
            if rule.accepted or (field in allowed and field != _NEVER):
                texts.append(text)
            else:
                refused[field] = text
    if refused:
        raise CheckpointError(_refusal(folder, refused))
    return [f"changed since step {manifest.step}: {text}" for text in texts]


def _of_another_name(field: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if a function's code is not comparable: its name differs, or an earlier version
    of raymm without code digests wrote the checkpoint."""
    name = field.removesuffix(".code")
    return was.get(name) != now.get(name) or field not in was or field not in now


def _refusal(folder: Path | str, refused: Mapping[str, str]) -> str:
    cure = "Restore the old values, or set another run.storage_path to start a new run"
    if _NEVER in refused:
        cure += "; `raymm export` with the old settings writes the weights to start it from"
    else:
        cure += (
            f". If the change is intended, resume with run.allow_changes: [{', '.join(refused)}]"
        )
    return "\n".join([
        f"cannot resume from {folder}, which was saved by another run:", *refused.values(), cure,
    ])


def _rule(place: str, was: Any, now: Any) -> Rule:
    rule = next((rule for rule in RULES if fnmatchcase(place, rule.fields)), None)
    if rule is None:
        return Rule(place, True, "")
    if ".config." in place and _MISSING in (was, now):
        return Rule(place, True, "versions of transformers differ in their fields")
    return rule


def _line(place: str, was: Any, now: Any) -> str:
    if place.startswith(f"{_NEVER}."):
        name = place.removeprefix(f"{_NEVER}.")
        if now is _MISSING:
            return f"{name} is in the checkpoint, but not in the model"
        if was is _MISSING:
            return f"{name} is in the model, but not in the checkpoint"
        return f"{name} is {now} in the model, but {was} in the checkpoint"
    return f"{place} is {_shown(now)}, was {_shown(was)}"


def _shown(value: Any) -> str:
    return "not there" if value is _MISSING else f"{value!r:.80}"


def _shortened(changes: list[str]) -> str:
    hidden = len(changes) - SHOWN
    return "; ".join(changes[:SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")


def _differences(place: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost fields where two values differ."""
    if type(was) is type(now) and was == now:
        return
    if isinstance(was, str) and now == _OWN_NAME.sub("raymm:", was):
        return  # older checkpoints also name the file
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        was, now = dict(enumerate(was)), dict(enumerate(now))
    if not (isinstance(was, dict) and isinstance(now, dict)):
        yield place, was, now
        return
    keys = {**was, **now}
    if "times" in keys and was.get("digest") != now.get("digest"):
        del keys["times"]  # rewritten files have other times
        if was.get("files") != now.get("files"):
            del keys["digest"]  # the differing files are named
    for key in keys:
        yield from _differences(f"{place}.{key}", was.get(key, _MISSING), now.get(key, _MISSING))
