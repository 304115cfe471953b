"""What may be different when a run goes on from a checkpoint, and what may not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from raymm.errors import CheckpointError
from raymm.storage.manifest import Manifest

# Differences that an error or a line names of one field.
SHOWN = 5
_MISSING = object()
_OTHER_DECAY = (
    "weight decay would apply to other parameters; earlier versions decayed everything by "
    "default, which is `no_decay: []` now"
)
_OWN_NAME = re.compile(r"^raymm(\.\w+)+:")


class Rule(NamedTuple):
    """What a change of a field means.

    Attributes:
        fields: pattern of their names; of several that fit, the first rule counts.
        accepted: whether the run goes on (and says so), or only where ``run.allow_changes`` names
            the field.
        why: what the change does.
    """

    fields: str
    accepted: bool
    why: str


RULES = (
    # Progress and rates: the usual reasons to go on with another file.
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
    # Which samples a step has. The position in the data is counted in samples or planned steps.
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
    # What the model is given.
    Rule("data.tokenizer*", False, "token ids, or the template around them, would change"),
    Rule("data.processor_files*", False, "the model would receive other numbers"),
    Rule("data.modalities.*.processor_files*", False, "the encoder would receive other numbers"),
    Rule("data.*", True, "samples are prepared differently from the next step on"),
    # What the model computes. Names, shapes and dtypes must fit both ways in any case.
    Rule("model.parameters*", False, ""),
    Rule("model.*.code", True, "the function of that name, or a value that it holds, has changed"),
    Rule("model.packing", True, "the loss is the same"),
    Rule("model.*lora.dropout", True, "it applies from the next step on"),
    Rule("model.*.config.*drop*", True, "it applies from the next step on"),
    Rule("model.*.weights.times", True, "the files were rewritten; the compared part is the same"),
    Rule("model.*.weights*", False, "frozen weights, which are not in checkpoints, would change"),
    Rule("model.*", False, "the model would compute other results with the same weights"),
)
# No option helps against these: something would be lost or made up.
_NEVER = "model.parameters"

# Fields of the data that decide when a row is used, not what is in it.
_ORDER = (
    "data.*.times", "data.train.*.weight*", "data.seed", "data.shuffle", "data.batch_size",
    "data.microbatches", "data.batching*",
)


def have_same_rows(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if the data of two runs give the same rows, whatever their order.

    Args:
        was, now: of :func:`raymm.storage.run_description.describe_run`.
    """
    fields = {field for field in {*was, *now} if field.startswith("data.")}
    return all(
        any(fnmatchcase(place, pattern) for pattern in _ORDER)
        for field in fields
        for place, _, _ in _differences(field, was.get(field, _MISSING), now.get(field, _MISSING))
    )


def compare(
    folder: Path | str, manifest: Manifest, run: Mapping[str, Any], allowed: Sequence[str] = ()
) -> list[str]:
    """Compare a run that wants to go on with what a checkpoint says of itself.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        run: :func:`raymm.storage.run_description.describe_run` of the run.
        allowed: names of fields that may have changed (``run.allow_changes``).

    Returns:
        A line for every field that has changed and may.

    Raises:
        CheckpointError: naming every field that has changed and may not.
    """
    if not manifest.run:
        raise CheckpointError(
            f"{folder} has no description of its run: it was not saved by a trainer"
        )
    texts: list[str] = []
    refused: dict[str, str] = {}
    for field in sorted({*manifest.run, *run}):
        was, now = manifest.run.get(field, _MISSING), run.get(field, _MISSING)
        if field.endswith(".code") and _of_another_name(field, manifest.run, run):
            continue
        lines: dict[Rule, list[str]] = {}
        for place, before, after in _differences(field, was, now):
            lines.setdefault(_rule(place, before, after), []).append(
                _line(place, before, after)
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
    """Whether a function's code is not to be compared: it has another name, which is said, or a
    raymm has written the checkpoint that did not look at code."""
    name = field.removesuffix(".code")
    return was.get(name) != now.get(name) or field not in was or field not in now


def _refusal(folder: Path | str, refused: Mapping[str, str]) -> str:
    cure = "Restore the old values, or set another run.storage_path to start a new run"
    if _NEVER in refused:
        cure += "; `raymm export` with the old settings writes the weights to start it from"
    else:
        cure += (
            ". If the change is intended, resume with run.allow_changes: "
            f"[{', '.join(refused)}]"
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
    more = len(changes) - SHOWN
    return "; ".join(changes[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _differences(place: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Innermost places where two values differ."""
    if type(was) is type(now) and was == now:
        return
    if isinstance(was, str) and now == _OWN_NAME.sub("raymm:", was):
        return  # of a checkpoint that says the file, too
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        was, now = dict(enumerate(was)), dict(enumerate(now))
    if not (isinstance(was, dict) and isinstance(now, dict)):
        yield place, was, now
        return
    keys = {**was, **now}
    if "times" in keys and was.get("digest") != now.get("digest"):
        del keys["times"]  # of files: written again, of course
        if was.get("files") != now.get("files"):
            del keys["digest"]  # which of them is said
    for key in keys:
        yield from _differences(
            f"{place}.{key}", was.get(key, _MISSING), now.get(key, _MISSING)
        )
