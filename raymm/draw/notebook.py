"""HTML views of a run for notebooks, with bars and embedded pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.colors import to_hex

from raymm.draw.palette import PROGRESS, WAIT, module_hues

_BAR_PX = 240


def bars_html(summary: str, shares: Mapping[str, float], modules: Mapping[str, str]) -> str:
    """Return a line of text, and a bar per name for shares from 0 to 1, in the colour of its
    module."""
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
    """Return a progress bar next to a line of text. ``total`` is None while it is unknown."""
    share = min(done / total, 1.0) if total else 0.0
    count = f"{done}/{total}" if total else str(done)
    return (
        f'<div style="display:flex;align-items:center;gap:8px">'
        f'<div style="width:{_BAR_PX}px;background:{WAIT}"><div style="width:'
        f'{round(_BAR_PX * share)}px;height:12px;background:{PROGRESS}"></div></div>'
        f"<span>{escape(count)}&nbsp; {escape(text)}</span></div>"
    )


def figures_html(pictures: Mapping[str, Path]) -> str:
    """Return PNG files by caption as embedded pictures; missing files are left out."""
    return "".join(
        f'<figure><img style="max-width:100%" alt="{escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"/></figure>'
        for name, path in pictures.items() if path.is_file()
    )


def pictures_html(summary: str, pictures: Mapping[str, Path]) -> str:
    """Return a line of text, and PNG files by caption below it."""
    return f"<pre>{escape(summary)}</pre>{figures_html(pictures)}"
