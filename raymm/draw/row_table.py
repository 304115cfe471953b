"""Tables of named texts for a console and for a notebook, and texts in tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from itertools import pairwise

from rich import box
from rich.table import Table


def row_table(
    rows: Sequence[Mapping[str, str]],
    title: str,
    caption: str,
    left: Collection[str],
    sections: Collection[int] = (),
) -> Table:
    """Return a table for a rich console.

    Args:
        rows: at least one; all with the same columns, in order.
        left: columns of words, aligned left; the others have numbers.
        sections: rows with a line above.
    """
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0),
        title_justify="left", caption_justify="left",
    )
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for index, row in enumerate(rows):
        if index in sections:
            table.add_section()
        table.add_row(*row.values())
    return table


def html_table(rows: Sequence[Mapping[str, str]], explanation: str) -> str:
    """Return a table for a notebook, with a text below."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<pre>{escape(explanation)}</pre>"
    )


def time_text(seconds: float) -> str:
    """Return seconds as text, in milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def ranges_text(parts: Sequence[range], text: Callable[[range], str]) -> str:
    """Return the text of adjacent ranges as one; of others, without the middle of a long list."""
    if all(first.stop == second.start for first, second in pairwise(parts)):
        return text(range(parts[0].start, parts[-1].stop))
    shown = [text(part) for part in (*parts[:2], *parts[2:][-1:])]
    return f"{shown[0]}, {shown[1]} .. {shown[2]}" if len(parts) > 3 else ", ".join(shown)


def numbers_text(numbers: range) -> str:
    """Return a range of whole numbers: ``"3"`` or ``"0-7"``."""
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
