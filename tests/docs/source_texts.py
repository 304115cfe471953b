"""Texts that the source can print, as a page quotes them: with … for filled-in values."""

import ast
from collections.abc import Iterator

from tests import house

FILLED_IN = "…"


def text_of(node: ast.AST) -> str | None:
    """Return a constant or an f-string as text; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or FILLED_IN for value in node.values)
    return None


def source_texts() -> Iterator[str]:
    """Yield texts of all files of the packages, including docstrings, with single spaces."""
    for file in house.files():
        for node in ast.walk(house.tree(file)):
            if (text := text_of(node)) is not None:
                yield " ".join(text.split())
