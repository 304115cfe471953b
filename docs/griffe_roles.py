"""Extension of griffe for two forms in docstrings that Google's style does not have."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?([\w.]+)`")
_SHARED_ENTRY = re.compile(
    r"^    ((?:\*{0,2}\w+,\s+)+\*{0,2}\w+):(.*?)(?=^    \S|^\S|\Z)", re.MULTILINE | re.DOTALL
)


class Roles(griffe.Extension):
    """Replaces roles (``:class:`X```) by code, and an entry for several names by one for each."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _SHARED_ENTRY.sub(_entries, text)


def _entries(match: re.Match[str]) -> str:
    names, description = match.groups()
    description = description.rstrip() + "\n"
    return "".join(f"    {name}:{description}" for name in re.split(r",\s+", names))
