"""What a notebook shows of a run: bars and pictures, as HTML that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.colors import to_hex

from raymm.draw.palette import PROGRESS, WAIT, module_hues

_BAR_PX = 240


def bars_html(summary: str, shares: Mapping[str, float], modules: Mapping[str, str]) -> str:
    """A line of text, and a bar per name.

    Args:
        summary: the text.
        shares: of the whole, from 0 to 1, by name.
        modules: the module of each name, which gives its colour.
    """
    hues = module_hues(modules.values())
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td>'
        f'<td><div style="width:{_BAR_PX}px;background:{WAIT}"><div style="width:'
        f'{round(_BAR_PX * min(max(share, 0.0), 1.0))}px;height:12px;'
        f'background:{to_hex(hues[modules[name]])}"></div></div></td>'
        f'<td style="text-align:right">{share:.0%}</td></tr>'
        for name, share in shares.items()
    )
    return f"<div>{escape(summary)}</div><table>{rows}</table>"


def progress_html(done: int, total: int | None, text: str) -> str:
    """A bar of what is done, and a line of text.

    Args:
        done: so many of them.
        total: None as long as that is not known.
        text: beside the bar.
    """
    share = min(done / total, 1.0) if total else 0.0
    count = f"{done}/{total}" if total else str(done)
    return (
        f'<div style="display:flex;align-items:center;gap:8px">'
        f'<div style="width:{_BAR_PX}px;background:{WAIT}"><div style="width:'
        f'{round(_BAR_PX * share)}px;height:12px;background:{PROGRESS}"></div></div>'
        f"<span>{escape(count)}&nbsp; {escape(text)}</span></div>"
    )


def figures_html(pictures: Mapping[str, Path]) -> str:
    """PNG files, which become part of the notebook.

    Args:
        pictures: by what they are; those that are not there are left out.
    """
    return "".join(
        f'<figure><img style="max-width:100%" alt="{escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"/></figure>'
        for name, path in pictures.items() if path.is_file()
    )


def pictures_html(summary: str, pictures: Mapping[str, Path]) -> str:
    """A line of text, and PNG files below it.

    Args:
        summary: the text.
        pictures: as of :func:`figures_html`.
    """
    return f"<pre>{escape(summary)}</pre>{figures_html(pictures)}"
