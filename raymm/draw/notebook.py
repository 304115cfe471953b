"""What a notebook shows of a run: bars and pictures, as HTML that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.colors import to_hex

from raymm.draw.palette import TEXT, WAIT, module_hues

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
    return f'<div style="color:{TEXT}">{escape(summary)}</div><table>{rows}</table>'


def pictures_html(summary: str, pictures: Mapping[str, Path]) -> str:
    """A line of text, and PNG files below it, which become part of the notebook.

    Args:
        summary: the text.
        pictures: by what they are; those that are not there are left out.
    """
    figures = "".join(
        f'<figure><img style="max-width:100%" alt="{escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"/></figure>'
        for name, path in pictures.items() if path.is_file()
    )
    return f"<pre>{escape(summary)}</pre>{figures}"
