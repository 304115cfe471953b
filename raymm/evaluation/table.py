"""Page of the texts that a model generated, next to prompts, pictures and reference answers."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raymm.data import Sample
from raymm.data.samples.media import media_name, open_media
from raymm.errors import USER_CODE_RAISES
from raymm.files.run_files import write_whole

FOLDER = "evaluations"
THUMBNAIL = 160  # pixels of the longer side
_STYLE = (
    "body{font:14px sans-serif}table{border-collapse:collapse}td,th{border:1px solid #ccc;"
    "padding:4px 8px;text-align:left;vertical-align:top;white-space:pre-wrap}"
    "td:first-child{max-width:12em;overflow-wrap:anywhere}td:nth-child(n+3){min-width:10em}"
)


@dataclass(frozen=True)
class WrittenText:
    """Generated text of a sample, with its prompt and reference answer."""

    id: str
    prompt: str
    text: str
    answer: str


def write_table(
    folder: Path, step: int, texts: Sequence[WrittenText], samples: Mapping[str, Sample],
    metrics: Mapping[str, float],
) -> Path:
    """Write the texts after ``step`` steps to ``evaluations/step-N.html`` and ``.jsonl`` in
    ``folder``, the folder of the run; return the path of the page. Pictures come from ``samples``,
    by id."""
    out = folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    write_whole(out / f"{name}.jsonl", "".join(json.dumps(vars(t)) + "\n" for t in texts))
    rows = [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in (
            html.escape(text.id), _pictures(samples.get(text.id)),
            *map(html.escape, (text.prompt, text.text, text.answer)),
        )) + "</tr>"
        for text in texts
    ]
    facts = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
    heads = "".join(f"<th>{h}</th>" for h in ("sample", "media", "prompt", "written", "answer"))
    page = out / f"{name}.html"
    write_whole(page, (
        f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>"
        f"<h1>after step {step}: {html.escape(facts)}</h1><table><tr>{heads}</tr>"
        + "\n".join(rows) + "</table>\n"
    ))
    return page


def _pictures(sample: Sample | None) -> str:
    cells = []
    for item in (item for items in (sample.media if sample else {}).values() for item in items):
        frame = item[0] if isinstance(item, tuple) else item
        try:
            with open_media(frame) as file:
                cells.append(_thumbnail(file.read()))
        except USER_CODE_RAISES:  # a sound, or a file that is not a readable picture
            cells.append(html.escape(Path(media_name(item)).name))
    return "<br>".join(cells)


def _thumbnail(data: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        out = io.BytesIO()
        image.convert("RGBA").save(out, "PNG")
    return f'<img src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'
