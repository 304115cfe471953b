"""``raymm data preview``: print rows as training reads them, with the learned tokens marked."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from raymm.actors.weights.hub_folder import local_folder, pinned
from raymm.cli.start_settings import is_text_only
from raymm.errors import ConfigError

if TYPE_CHECKING:  # import torch
    from raymm.data import DataConfig, StepBuilder
    from raymm.data.readers.detect import Detected
    from raymm.data.samples.media import Sample

_LEARNED, _ITEM, _NOTE = "black on green", "cyan", "dim"
_LEARNED_PALE = "black on #9be89b"  # for terminals with more than 16 colours
# Marks around learned text on terminals without colours.
_MARKS = ("[[", "]]")
# Minimum number of equal consecutive tokens that are printed as one with their number.
_REPEATED = 4
_ROWS, _WIDTH = 3, 100
# No row of a preview is cut.
_MAX_LENGTH = 10**9


class _Run(NamedTuple):
    """Consecutive tokens of a row; ``repeats`` is above 1 for one repeated token."""

    text: str
    learned: bool
    repeats: int


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``raymm data``."""
    actions = command.add_subparsers(required=True, metavar="ACTION")
    preview = actions.add_parser(
        "preview", help="print rows as training reads them, with the learned tokens marked"
    )
    preview.add_argument("data", metavar="FILE", help="rows: JSON, JSON lines, Parquet, a folder")
    preview.add_argument(
        "--model", required=True, metavar="MODEL",
        help="folder or hub id of a model with its processor, or folder of a tokenizer",
    )
    preview.add_argument(
        "--rows", type=int, default=_ROWS, metavar="N", help=f"rows to print (default: {_ROWS})"
    )
    preview.add_argument("--svg", metavar="FILE", help="save what is printed as a picture")
    preview.set_defaults(run=run_preview)


def run_preview(args: argparse.Namespace) -> int:
    """Print the first rows of a file, and return 0, or 1 if one of them cannot be used. Raise a
    ``ConfigError`` if there is no such folder or file, and for media of a tokenizer alone, and a
    ``DataError`` if a file cannot be read."""
    from raymm.data import open_split
    from raymm.data.readers.detect import detect
    from raymm.errors import SampleError

    if args.rows < 1:
        raise ConfigError(f"--rows is {args.rows}; accepted: at least 1")
    try:
        model = local_folder(pinned(args.model), weights=False)
    except ConfigError as error:
        raise ConfigError(f"--model is {args.model!r}. {error}") from None
    if not Path(model).is_dir():
        raise ConfigError(
            f"--model is {args.model!r}, which is not a local folder; accepted: a folder with a "
            "processor or a tokenizer, or the id of a model on the hub"
        )
    detected = detect(args.data)
    config = _config(detected, model)
    console = Console(
        record=bool(args.svg), width=None if Console().is_terminal else _WIDTH, highlight=False,
        force_terminal=True if args.svg else None, color_system="truecolor" if args.svg else "auto",
    )
    console.print(detected.summary, markup=False, soft_wrap=True)
    console.print(_legend(console))
    dataset = open_split(config, "train")
    from raymm.data import step_builder  # imports torch, so only once the rows are read

    builder = step_builder(config, dataset)
    code = 0
    for index in range(min(args.rows, len(dataset))):
        sample = dataset[index]
        console.print()
        try:
            for title, text in _rows(builder, config, sample, console):
                console.print(title, style="bold", markup=False, soft_wrap=True)
                console.print(text, soft_wrap=not args.svg)
        except SampleError as error:
            console.print(
                f"row {index} cannot be used: {error}", style="red", markup=False,
                soft_wrap=not args.svg,
            )
            code = 1
    if args.svg:
        picture = console.export_svg(
            title=f"raymm data preview {args.data}", theme=DEFAULT_TERMINAL_THEME
        )
        # The picture must not load fonts from a server.
        Path(args.svg).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S))
    return code


def _config(detected: Detected, model: str) -> DataConfig:
    from raymm.data import DataConfig

    text_only = is_text_only(model)
    if detected.modalities and text_only:
        raise ConfigError(
            f"{detected.path} has items of {', '.join(detected.modalities)}, and --model "
            f"{model!r} has no processor for them; accepted: a model that takes such items"
        )
    return DataConfig.model_validate({
        **detected.data_section, ("tokenizer" if text_only else "processor"): model,
        "batch_size": 1, "microbatches": 1, "max_length": _MAX_LENGTH, "shuffle": False,
        "preferences": detected.preferences > 0,
    })


def _legend(console: Console) -> Text:
    text = Text("learned tokens are ")
    if console.is_terminal:
        text.append("marked", _learned_style(console))
    else:
        text.append("between " + " and ".join(_MARKS))
    return text.append("; repeated tokens are shown once, with their number")


def _learned_style(console: Console) -> str:
    return _LEARNED if console.color_system in (None, "standard", "windows") else _LEARNED_PALE


def _rows(
    builder: StepBuilder, config: DataConfig, sample: Sample, console: Console
) -> Iterator[tuple[str, Text]]:
    """Yield a title and the tokens of each row of a sample; a preference has two rows."""
    from raymm.data import IGNORE_INDEX

    microbatch = builder.build([[sample.index]]).microbatches[0]
    mask = microbatch["attention_mask"].bool()
    name = Path(sample.id).name if sample.id == sample.place else sample.id
    for number, shown in enumerate(mask):
        ids = microbatch["input_ids"][number][shown].tolist()
        learned = (microbatch["labels"][number][shown] != IGNORE_INDEX).tolist()
        media = _media_tokens(builder, sample, ids, number)
        title = f"row {sample.index}, {name}"
        title += f" ({('chosen', 'rejected')[number]})" if len(mask) > 1 else ""
        title += f": {len(ids):,} tokens ({len(ids) - media:,} text, {media:,} media), "
        title += "; ".join([f"{sum(learned):,} learned", *_sizes(config, sample)])
        yield title, _marked(_runs(builder.tokenizer, ids, learned), console)


def _media_tokens(builder: Any, sample: Sample, ids: Sequence[int], row: int) -> int:
    if builder.config.processor is None:
        return sum(token in builder.text.placeholder_ids.values() for token in ids)
    if not any(sample.media.values()):
        return 0
    return len(ids) - sum(map(len, builder.encode(sample).rows[row].runs))


def _sizes(config: DataConfig, sample: Sample) -> Iterator[str]:
    from raymm.data.samples.headers import AUDIO, check_media

    for kind, items in sample.media.items():
        for item in items:
            frames = item if isinstance(item, tuple) else (item,)
            header = check_media(frames[0], config.limits, kind == "video" and len(frames) == 1)
            if header.kind == AUDIO:
                yield f"{kind} {header.frames / header.rate:.2f} s at {header.rate:,} Hz"
                continue
            size = f"{kind} {header.width} x {header.height} pixels"
            size += f", {header.seconds:.2f} s" if header.seconds else ""
            yield size + (f", {len(frames)} frames" if isinstance(item, tuple) else "")


def _runs(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> Iterator[_Run]:
    """Yield runs of tokens that are all learned or all not, with repeated tokens separate."""
    pending: list[int] = []
    flag = False
    for (token, is_learned), group in groupby(zip(ids, learned, strict=True)):
        count = len(list(group))
        if pending and (is_learned != flag or count >= _REPEATED):
            yield _Run(tokenizer.decode(pending), flag, 1)
            pending = []
        flag = is_learned
        if count >= _REPEATED:
            yield _Run(tokenizer.decode([token]), flag, count)
        else:
            pending += [token] * count
    if pending:
        yield _Run(tokenizer.decode(pending), flag, 1)


def _marked(runs: Iterator[_Run], console: Console) -> Text:
    text = Text()
    for run in runs:
        # A learned line break would be invisible.
        shown = run.text.replace("\n", "↵\n") if run.learned else run.text
        shown += f" x {run.repeats:,}" if run.repeats > 1 else ""
        if not run.learned:
            text.append(shown, _ITEM if run.repeats > 1 else _NOTE)
        elif console.is_terminal:
            text.append(shown, _learned_style(console))
        else:
            text.append(_MARKS[0] + shown + _MARKS[1])
    text.rstrip()
    return text
