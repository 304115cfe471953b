"""easy-VQA: coloured shapes with questions (PyPI ``easy-vqa``, MIT). No audio.

The package's own test pictures are the held-out split. It has about ten questions a picture,
three quarters of them yes/no; one is taken, more often an open one, because a yes/no answer
can be guessed half the time without looking.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from examples.alignment.samples import (
    Sample,
    hash_choice,
    hash_fraction,
    in_order,
    split,
    summary,
    write_splits,
)

_DATA = Path("easy_vqa/data")
_COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
_SHAPES = ("circle", "rectangle", "triangle")
_HELDOUT_PICTURES = 500  # of the 1000 test pictures
_OPEN_FRACTION = 0.75
_TEXT_FRACTION = 0.1  # of the pictures also give a text-only sample

Question = tuple[str, str]  # question, answer


def read_questions(path: Path) -> dict[int, list[Question]]:
    """Questions and answers by picture number of a ``questions.json``."""
    questions = defaultdict(list)
    for question, answer, picture in json.loads(path.read_text(encoding="utf-8")):
        questions[picture].append((question, answer))
    return dict(questions)


def choose_question(questions: list[Question], name: str) -> Question:
    """One question of a picture, decided by the picture's ``name``, usually an open one."""
    open_ones = [question for question in questions if question[1] not in ("yes", "no")]
    if open_ones and hash_fraction(f"open {name}") < _OPEN_FRACTION:
        return hash_choice(open_ones, f"question {name}")
    return hash_choice(questions, f"question {name}")


def describe(questions: list[Question]) -> str | None:
    """Return the shape that a picture's questions describe, as ``a blue circle``."""
    told = [f"{q.rstrip('?')} {a}" for q, a in questions if a not in ("yes", "no")]
    words = set(" ".join(told).split())
    colors = [color for color in _COLORS if color in words]
    shapes = [shape for shape in _SHAPES if shape in words]
    return f"a {colors[0]} {shapes[0]}" if len(colors) == len(shapes) == 1 else None


def image_samples(data: Path, part: str, out: Path, limit: int | None = None) -> Iterator[Sample]:
    """A sample for each picture of ``part`` (``train`` or ``test``), or for ``limit`` of them."""
    pictures = read_questions(data / part / "questions.json")
    numbers = sorted(pictures, key=lambda number: hash_fraction(f"picture {part} {number}"))
    folder = out / "images" / part
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers[:limit]:
        name = f"{part}/{number}"
        question, answer = choose_question(pictures[number], name)
        shutil.copyfile(data / part / "images" / f"{number}.png", folder / f"{number}.png")
        yield Sample(f"image/{name}", name, question, answer, (f"images/{name}.png",))


def text_samples(data: Path) -> Iterator[Sample]:
    """Questions about a description instead of a picture, each text once."""
    seen = set()
    for number, questions in sorted(read_questions(data / "train" / "questions.json").items()):
        description = describe(questions)
        if description is None or hash_fraction(f"text {number}") >= _TEXT_FRACTION:
            continue
        question, answer = choose_question(questions, f"text {number}")
        text = f"The picture shows {description}. {question}"
        if text not in seen:
            seen.add(text)
            yield Sample(f"text/{number}", text, text, answer)


def prepare(sources: dict[str, Path], out: Path) -> str:
    """Write the data set into ``out`` from the unpacked package; returns a summary of it."""
    package = sources["easy-vqa"]
    data = package / _DATA
    text_train, text_heldout = split(text_samples(data))
    train = in_order([*image_samples(data, "train", out), *text_train])
    heldout = in_order([*image_samples(data, "test", out, _HELDOUT_PICTURES), *text_heldout])
    shutil.copyfile(package / "easy_vqa-1.0.dist-info/LICENSE", out / "LICENSE-easy-vqa.txt")
    return summary(write_splits(out, train, heldout, ("image", "text")))
