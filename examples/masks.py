"""Pictures of the attention masks that raymm knows, side by side.

    python -m examples.masks [--length 65536] [--out docs/images/masks.png]
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.spans import Span

COLUMNS = 4
TITLE_PIXELS = 28


def sample_spans(length: int, documents: int) -> list[Span]:
    """Two images and an audio clip in every document, in sixteenths of it."""
    size = length // documents
    unit = size // 16
    return [
        Span(number * size + start * unit, number * size + stop * unit, kind)
        for number in range(documents)
        for start, stop, kind in ((1, 4, 1), (6, 8, 2), (9, 12, 1))
    ]


def masks(length: int) -> dict[str, Callable[[], AttentionMask]]:
    """Builders by title; ``length`` tokens each."""
    one, packed = sample_spans(length, 1), sample_spans(length, 4)
    sizes = [length // 4] * 4
    unit = length // 16
    images = [unit, 6 * unit, 11 * unit]
    return {
        "prepended (EP)": lambda: patterns.prepended(
            [(1, 5 * unit), (2, 3 * unit)], length - 8 * unit
        ),
        "embedded (EE)": lambda: patterns.embedded(length, one),
        "embedded, items isolated": lambda: patterns.embedded(length, one, isolate=True),
        "packed (MP)": lambda: patterns.packed(sizes, packed),
        "causal with own image, window": lambda: patterns.causal_with_own_image(
            length, packed, document_lengths=sizes, window=length // 8
        ),
        "prefix": lambda: patterns.prefix_causal(length, [length // 10] * 4, sizes),
        "sinks and window": lambda: patterns.sinks_and_window(length, length // 32, length // 8),
        "causal blockwise": lambda: patterns.causal_blockwise(length, length // 16),
        "shared question": lambda: patterns.shared_question(length // 5, [length // 5] * 4),
        "documents": lambda: patterns.documents(sizes),
        "cross attention, last image": lambda: patterns.cross_images(length, images, [1024] * 3),
        "cross attention, all before": lambda: patterns.cross_images(
            length, images, [1024] * 3, only_last=False
        ),
    }


def gallery(length: int) -> Image.Image:
    """All of them in one picture."""
    cells = []
    for title, build in masks(length).items():
        buffer = io.BytesIO()
        build().draw(320).savefig(buffer, dpi=75)
        drawn = Image.open(buffer).convert("RGB")
        cell = Image.new("RGB", (drawn.width, drawn.height + TITLE_PIXELS), "white")
        cell.paste(drawn, (0, TITLE_PIXELS))
        ImageDraw.Draw(cell).text((cell.width // 2, 6), title, "black", anchor="ma", font_size=17)
        cells.append(cell)
    width, height = cells[0].size
    whole = Image.new("RGB", (COLUMNS * width, -(-len(cells) // COLUMNS) * height), "white")
    for number, cell in enumerate(cells):
        whole.paste(cell, (number % COLUMNS * width, number // COLUMNS * height))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=65536, help="tokens of each mask")
    parser.add_argument("--out", type=Path, default=Path("masks.png"))
    args = parser.parse_args()
    if args.length < 256:
        parser.error(f"--length must be at least 256, got {args.length}")
    gallery(args.length).save(args.out, optimize=True)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
