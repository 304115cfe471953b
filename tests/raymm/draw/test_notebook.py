"""HTML of notebooks is well-formed, with widths in proportion and escaped texts."""

import base64
import re
from xml.etree import ElementTree

import pytest

from raymm.draw.notebook import bars_html, figures_html, pictures_html, progress_html

ODD = "<b> & \"\u00fc\""


def widths(html):
    return [int(width) for width in re.findall(r"width:(\d+)px;height", html)]


def text_of(html):
    tree = ElementTree.fromstring(f"<a>{html.replace('&nbsp;', ' ')}</a>")
    return "".join(tree.itertext())


def test_bars_are_as_long_as_their_shares():
    html = bars_html(ODD, {ODD: 0.5, "b": 1.5, "c": -1.0}, {ODD: "llm", "b": "x", "c": "x"})
    assert widths(html) == [120, 240, 0]
    assert text_of(html) == f"{ODD}{ODD}50%b150%c-100%"


@pytest.mark.parametrize(("done", "total", "width", "count"), [
    (3, 4, 180, "3/4"), (5, 4, 240, "5/4"), (7, None, 0, "7"), (0, 0, 0, "0"),
])
def test_progress_is_a_share_of_a_known_total(done, total, width, count):
    html = progress_html(done, total, ODD)
    assert widths(html) == [width] and text_of(html) == f"{count}  {ODD}"


def test_pictures_are_embedded_and_missing_ones_left_out(tmp_path):
    (file := tmp_path / "a.png").write_bytes(b"\x89PNG")
    html = pictures_html(ODD, {ODD: file, "none": tmp_path / "none.png"})
    assert text_of(html) == ODD and html.count("<img") == 1
    data = re.search("base64,([^\"]*)\"", html)
    assert data is not None and base64.b64decode(data[1]) == b"\x89PNG"
    assert figures_html({}) == ""
