"""Samples of a data set: one JSON object a line, with Hugging Face datasets' column names.

A line is ``{"id", "messages": [{"role", "content"}, ...], "images": [...], "audio": [...]}``;
media paths are relative to the file. Split and order depend on texts and ids alone, so every
machine makes the same files.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_SEED = "raymm-alignment-7"
HELDOUT_FRACTION = 0.11
KINDS = ("image", "speech", "both", "text")


@dataclass(frozen=True)
class Sample:
    """One question and its answer. ``group`` is the text that decides train or held-out."""

    id: str
    group: str
    question: str
    answer: str
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """One of ``KINDS``, by the media it has."""
        if self.images:
            return "both" if self.audio else "image"
        return "speech" if self.audio else "text"

    def as_row(self) -> dict:
        """The JSON object of this sample."""
        return {
            "id": self.id,
            "messages": [
                {"role": "user", "content": self.question},
                {"role": "assistant", "content": self.answer},
            ],
            "images": list(self.images),
            "audio": list(self.audio),
        }


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone; stands in for a random draw."""
    digest = hashlib.sha256(f"{_SEED}\0{text}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def hash_choice(options: Sequence, text: str):
    """One of ``options``, decided by ``text``."""
    return options[int(hash_fraction(text) * len(options))]


def group_key(text: str) -> str:
    """``text`` without case, punctuation and spacing: equal keys never end up in both splits."""
    return re.sub(r"\W+", " ", text.casefold()).strip() or text.strip()


def is_heldout(sample: Sample) -> bool:
    """Return True if the sample is held out. All samples of a group are in one split."""
    return hash_fraction(f"group {group_key(sample.group)}") < HELDOUT_FRACTION


def in_order(samples: Iterable[Sample]) -> list[Sample]:
    """The samples in an order decided by their ids. ``ValueError`` on a repeated id."""
    ordered = sorted(samples, key=lambda sample: (hash_fraction(f"order {sample.id}"), sample.id))
    repeated = [i for i, n in Counter(sample.id for sample in ordered).items() if n > 1]
    if repeated:
        raise ValueError(f"sample id {repeated[0]!r} is not unique ({len(repeated)} such ids)")
    return ordered


def split(samples: Iterable[Sample]) -> tuple[list[Sample], list[Sample]]:
    """(train, held-out) by ``is_heldout``, each in order. ``ValueError`` on a repeated id."""
    ordered = in_order(samples)
    return (
        [sample for sample in ordered if not is_heldout(sample)],
        [sample for sample in ordered if is_heldout(sample)],
    )


def write_jsonl(path: Path, samples: Iterable[Sample]) -> None:
    """Write the samples, one a line, UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample.as_row(), ensure_ascii=False) + "\n")


def write_splits(
    folder: Path, train: list[Sample], heldout: list[Sample], kinds: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Write ``train.jsonl`` and ``heldout.jsonl``; returns counts per split and kind.

    Raises ``ValueError`` if a split lacks one of ``kinds``, or a sample's file does not exist:
    a data set that cannot be trained on must not be committed.
    """
    counts = {}
    for name, samples in (("train", train), ("heldout", heldout)):
        counts[name] = dict(Counter(sample.kind for sample in samples))
        lacking = [kind for kind in kinds if kind not in counts[name]]
        if lacking:
            raise ValueError(f"{name} has no {' and no '.join(lacking)} samples: {counts[name]}")
        for sample in samples:
            for media in (*sample.images, *sample.audio):
                if not (folder / media).is_file():
                    raise ValueError(f"{name} sample {sample.id!r}: no file {media!r}")
        write_jsonl(folder / f"{name}.jsonl", samples)
    return counts


def summary(counts: dict[str, dict[str, int]]) -> str:
    """Counts per split and kind in words, from ``write_splits``."""
    return "; ".join(
        f"{name} {sum(kinds.values())} ("
        + ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kind in kinds)
        + ")"
        for name, kinds in counts.items()
    )
