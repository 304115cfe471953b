"""The source can print all quotes of the page on troubleshooting."""

import re

from tests.docs.pages import ROOT
from tests.docs.source_texts import source_texts

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^\| `(.+?)` \|", PAGE, re.M)


def missing(quotes: list[str]) -> list[str]:
    """Return the quotes that no text of the source contains."""
    texts = set(source_texts())
    return [quote for quote in quotes if not any(quote in text for text in texts)]


def test_every_error_is_one_of_the_source():
    assert len(QUOTES) > 30
    assert missing(QUOTES) == []


def test_quotes_that_are_not_printed_are_detected():
    assert missing(["the plan has … ranks of … … apiece"]) != []
