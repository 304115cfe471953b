"""What is wrong with a configuration, by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from raymm.errors import InputError

# Characters of a value that an error shows.
_SHOWN = 200


class ConfigError(InputError, ValueError):
    """A configuration that cannot run. Names the field, its value and what is accepted."""


def explain(error: ValidationError, section: type[BaseModel]) -> str:
    """A line per wrong field: its path, what is accepted, and its value.

    Args:
        error: of validating a ``section``.
        section: decides which keys are accepted where.
    """
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            accepted = ", ".join(_fields_at(section, item["loc"][:-1]))
            lines.append(f"{where}: unknown key; accepted: {accepted}")
        elif item["type"] == "missing":
            lines.append(f"{where}: required, but not given")
        elif item["type"] == "model_type":
            lines.append(f"{where}: must be a section of keys (got {shown(item['input'])})")
        elif item["type"] == "invalid_key" or item["loc"][-1:] == ("[key]",):
            lines.append(f"{where}: keys are texts; put this one in quotes")
        else:
            message = item["msg"].removeprefix("Value error, ")
            value = item["input"]
            got = "" if isinstance(value, dict) else f" (got {shown(value)})"
            lines.append(f"{where}: {message}{got}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as an error message has it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no number of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _fields_at(section: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Names of the fields of the section that a location leads to."""
    for part in path:
        field = section.model_fields.get(part)
        models = _models_in(field.annotation) if field is not None else []
        if models:
            section = models[0]
        # a dict key (an encoder's name) stays at the section its values have
    return sorted(section.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in getattr(annotation, "__args__", ()) for m in _models_in(argument)]
