"""Two questions about every stamp: what is in the picture, and what kind of thing that is.

Kinds are those of the folders that the stamps are sorted into. Pictures are scaled down and
written on white, so that every program reads the same pixels.
"""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

KIND, CAPTION = "What kind of thing is it?", "What is in the picture?"
SIDE = 256  # pixels of a picture's longer side, at most
# Folders with the longest names first: a letter is a symbol, too.
_KINDS = {
    "symbols/alphabets": "letter", "symbols/money": "money", "symbols": "symbol",
    "town/roadsigns": "sign", "town/flags": "flag", "town": "building",
    "animals": "animal", "clothes": "clothes", "food": "food", "hobbies": "hobby",
    "household": "household", "medical": "medicine", "military": "military",
    "naturalforces": "nature", "people": "people", "plants": "plant", "seasonal": "season",
    "space": "space", "sports": "sport", "vehicles": "vehicle",
}  # fmt: skip


def kind_of(picture: str) -> str:
    """The kind of a stamp.

    Args:
        picture: its path below ``images/``.

    Raises:
        ValueError: it is of no folder that is known.
    """
    for folder, kind in _KINDS.items():
        if picture.startswith(f"{folder}/"):
            return kind
    raise ValueError(f"no kind of {picture!r}; known are {', '.join(_KINDS)}")


def write_questions(stamps: Path, out: Path) -> dict[str, int]:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``images/``; returns the rows of each file.

    Args:
        stamps: the folder that :func:`examples.alignment.stamps.prepare` wrote: its split is kept,
            so what a held-out picture shows is in no training answer.
        out: a folder.
    """
    counts = {}
    for split in ("train", "heldout"):
        rows: list[dict] = []
        for line in (stamps / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if not row["id"].startswith("image/"):
                continue
            picture, caption = row["images"][0], row["messages"][-1]["content"]
            _shrink(stamps / picture, out / picture)
            kind = kind_of(picture.removeprefix("images/"))
            for name, question, answer in (
                ("kind", KIND, kind), ("caption", CAPTION, caption)
            ):
                rows.append({
                    "id": f"{name}/{row['id'].removeprefix('image/')}",
                    "messages": [
                        {"role": "user", "content": [
                            {"type": "image"}, {"type": "text", "text": question},
                        ]},
                        {"role": "assistant", "content": answer},
                    ],
                    "images": [picture],
                })
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{split}.jsonl").write_text(text, encoding="utf-8")
        counts[split] = len(rows)
    return counts


def _shrink(picture: Path, target: Path) -> None:
    with Image.open(picture) as image:
        rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    canvas.alpha_composite(rgba)
    small = canvas.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC)
    target.parent.mkdir(parents=True, exist_ok=True)
    small.save(target)
