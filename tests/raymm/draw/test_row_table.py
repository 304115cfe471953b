"""Tables of texts for a console and for a notebook."""

from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from raymm.draw.row_table import html_table, row_table, time_text

ROWS = [{"name": "a", "time": "1 s"}, {"name": "<b>", "time": "10 s"}]


def test_words_are_aligned_left_and_numbers_right():
    console = Console(file=(text := StringIO()), width=80)
    console.print(row_table(ROWS, "title", "caption", ["name"], sections=[1]))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines[0] == "title" and lines[-1] == "caption"
    first, second = (next(line for line in lines if cell in line) for cell in ("1 s", "10 s"))
    assert first.index("a") == second.index("<b>") and len(first) == len(second)
    assert lines.index(second) > lines.index(first) + 1  # a line above the section


def test_html_has_the_cells_escaped():
    tree = ElementTree.fromstring(f"<a>{html_table(ROWS, 'a < b')}</a>")
    assert [cell.text for cell in tree.iter("th")] == ["name", "time"]
    assert [cell.text for cell in tree.iter("td")] == ["a", "1 s", "<b>", "10 s"]
    assert [text.text for text in tree.iter("pre")] == ["a < b"]


@pytest.mark.parametrize(("seconds", "text"), [
    (1.0, "1 s"), (12.345, "12.3 s"), (0.5, "500 ms"), (1.234e-5, "0.0123 ms"), (0.0, "0 ms"),
])
def test_times_below_a_second_are_in_milliseconds(seconds, text):
    assert time_text(seconds) == text
