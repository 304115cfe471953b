"""Messages about wrong fields of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

# Maximum number of characters of a value in an error.
_SHOWN = 200


def explain(error: ValidationError, section: type[BaseModel]) -> str:
    """Return a line per wrong field: its path, what is accepted, and its value."""
    lines = []
    for item in error.errors():
        where = ".".join(str(key) for key in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            accepted = _fields_at(section, item["loc"][:-1])
            suggestion = _meant(item["loc"], accepted, section)
            lines.append(f"{where}: unknown key; {suggestion}accepted: {', '.join(accepted)}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but not given")
        elif item["type"] == "model_type":
            lines.append(f"{where}: must be a section of keys (got {shown(item['input'])})")
        elif item["type"] == "invalid_key" or item["loc"][-1:] == ("[key]",):
            lines.append(f"{where}: keys must be strings; put this one in quotes")
        else:
            message = item["msg"].removeprefix("Value error, ")
            value = item["input"]
            got = "" if isinstance(value, dict) else f" (got {shown(value)})"
            lines.append(f"{where}: {message}{got}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Format a value for an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print numbers of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def closest(name: str, accepted: Iterable[str]) -> str | None:
    """Return the accepted name that is most similar to a misspelt one, or None."""
    return next(iter(difflib.get_close_matches(name, list(accepted), 1)), None)


def _meant(path: Sequence[Any], accepted: Sequence[str], section: type[BaseModel]) -> str:
    """Return "did you mean ...?" for a misspelt key or a key of another section."""
    *parents, name = map(str, path)
    if suggestion := closest(name, accepted):
        return f"did you mean {'.'.join([*parents, suggestion])}? "
    elsewhere = [".".join(field_path) for field_path in _paths(section) if field_path[-1] == name]
    return f"did you mean {' or '.join(elsewhere)}? " if elsewhere else ""


def _paths(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field, except those of sections in lists and mappings."""
    for name, field in section.model_fields.items():
        yield (name,)
        arguments = (field.annotation, *getattr(field.annotation, "__args__", ()))
        for inner in arguments:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from ((name, *path) for path in _paths(inner))


def _fields_at(section: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Return the field names of the section at a location."""
    for key in path:
        field = section.model_fields.get(key)
        models = _models_in(field.annotation) if field is not None else []
        if models:
            section = models[0]
        # a dict key (an encoder's name) does not change the section
    return sorted(section.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in getattr(annotation, "__args__", ()) for m in _models_in(argument)]
