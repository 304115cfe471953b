"""Samples to try with: pictures of a coloured shape, tones, and questions about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image, ImageDraw

COLOURS = {"red": "#c22", "green": "#2a2", "blue": "#22c", "yellow": "#dc2"}
SHAPES = ("circle", "square", "triangle")
TONES = {"low": 220.0, "middle": 440.0, "high": 880.0}
RATE = 16_000
# Sides of pictures: no two samples need be of one size.
SIDES = ((96, 96), (128, 80), (72, 136), (160, 112))


def draw(folder: Path, sound: bool, count: int = 48, seed: int = 0) -> Path:
    """Write ``train.jsonl`` and the files that it names; returns it. Of every six samples one has
    text alone, and one two items.

    Args:
        folder: gets them.
        sound: tones instead of pictures.
        count: of samples.
        seed: of what is drawn.
    """
    random = np.random.default_rng(seed)
    media = folder / ("sounds" if sound else "images")
    media.mkdir(parents=True, exist_ok=True)
    kind, column = ("audio", "audio") if sound else ("image", "images")
    lines = []
    for number in range(count):
        items = {4: 0, 5: 2}.get(number % 6, 1)
        names, answers = [], []
        for item in range(items):
            path = media / f"{number}-{item}.{'wav' if sound else 'png'}"
            answers.append((_tone if sound else _picture)(path, random))
            names.append(str(path.relative_to(folder)))
        parts = [{"type": kind}] * items
        question = "Say something." if not items else (
            "How high is the sound?" if sound else "What is in the picture?"
        )
        lines.append({
            "id": f"sample-{number}",
            "messages": [
                {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
                {"role": "assistant", "content": " Then ".join(answers) or "Hello."},
            ],
            column: names,
        })
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def write_texts(folder: Path, count: int, seed: int) -> Path:
    """Write ``train.jsonl`` with ``count`` questions about shapes, without pictures; return it."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        colour, shape = random.choice(list(COLOURS)), random.choice(SHAPES)
        lines.append({"id": f"sample-{number}", "messages": [
            {"role": "user", "content": f"Name a {colour} {shape}."},
            {"role": "assistant", "content": f"A {colour} {shape}."},
        ]})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def words() -> Iterator[str]:
    """All text that samples may have, for a tokenizer."""
    yield from ("Say something.", "How high is the sound?", "What is in the picture?", "Hello.")
    yield from (f"A {colour} {shape}. Then" for colour in COLOURS for shape in SHAPES)
    yield from (f"A {tone} tone." for tone in TONES)
    yield "user assistant system"


def _picture(path: Path, random: np.random.Generator) -> str:
    width, height = SIDES[int(random.integers(len(SIDES)))]
    colour, shape = list(COLOURS)[int(random.integers(len(COLOURS)))], SHAPES[
        int(random.integers(len(SHAPES)))
    ]
    image = Image.new("RGB", (width, height), "white")
    side = min(width, height) // 2
    left, top = int(random.integers(width - side)), int(random.integers(height - side))
    box = (left, top, left + side, top + side)
    canvas = ImageDraw.Draw(image)
    if shape == "circle":
        canvas.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        canvas.rectangle(box, fill=COLOURS[colour])
    else:
        corners = [(left, top + side), (left + side, top + side), (left + side // 2, top)]
        canvas.polygon(corners, fill=COLOURS[colour])
    image.save(path)
    return f"A {colour} {shape}."


def _tone(path: Path, random: np.random.Generator) -> str:
    name = list(TONES)[int(random.integers(len(TONES)))]
    seconds = float(random.uniform(0.3, 0.9))
    times = np.arange(int(RATE * seconds)) / RATE
    wave = 0.3 * np.sin(2 * np.pi * TONES[name] * times) + 0.01 * random.standard_normal(len(times))
    soundfile.write(path, wave.astype(np.float32), RATE)
    return f"A {name} tone."
