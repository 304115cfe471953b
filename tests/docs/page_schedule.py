"""The custom schedule of ``docs/extending.md``, as a class."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.docs.pages import blocks


@cache
def limited_forwards() -> type[Any]:
    """Return the class that the page's block defines."""
    (text,) = [block.text for block in blocks("python") if "raymm.Schedule" in block.text]
    names: dict[str, Any] = {"__name__": "page"}
    exec(text, names)
    return names["LimitedForwards"]
