"""Texts that the source can print, as a page quotes them: with … for what is filled in."""

import ast
from collections.abc import Iterator

from tests import house

FILLED_IN = "…"


def text_of(node: ast.AST) -> str | None:
    """A constant or an f-string; None for what is neither."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or FILLED_IN for value in node.values)
    return None


def source_texts() -> Iterator[str]:
    """Of all files of the packages, docstrings too; white space as one blank."""
    for file in house.files():
        for node in ast.walk(house.tree(file)):
            if (text := text_of(node)) is not None:
                yield " ".join(text.split())
