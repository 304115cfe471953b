"""Command-line options for those fields of a dataclass that have a ``help``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Any, get_origin, get_type_hints

from raymm.errors import ConfigError, InputError


def _shown(options: type) -> dict[str, Field]:
    return {field.name: field for field in fields(options) if "help" in field.metadata}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_option_arguments(command: argparse.ArgumentParser, options: type) -> None:
    """Add an option per field, with None as the default. Mappings are given as ``--name KEY=N``,
    repeatedly, and sequences as ``--name A,B``."""
    hints = get_type_hints(options)
    for name, field in _shown(options).items():
        settings: dict[str, Any] = {}
        if get_origin(hints[name]) is dict:
            settings["action"] = "append"
        elif int in _leaves(hints[name]):
            settings["type"] = int
        elif float in _leaves(hints[name]):
            settings["type"] = float
        command.add_argument(_flag(name), **settings, **field.metadata)


def _leaves(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", (hint,))


def given_options(args: argparse.Namespace, options: type) -> list[str]:
    """Return the fields of the dataclass that the command line sets."""
    return [name for name in _shown(options) if getattr(args, name) is not None]


@contextmanager
def options_in_errors(args: argparse.Namespace, options: type) -> Iterator[None]:
    """Name options of the command line in errors about their values: the option in place of its
    field, or else a note with all given options."""
    try:
        yield
    except InputError as error:
        text, names = str(error), given_options(args, options)
        for name in names:
            if re.match(rf"{name}\b", text):
                raise type(error)(f"{_flag(name)}{text.removeprefix(name)}") from error
        values = {_flag(name): getattr(args, name) for name in names}
        words = [
            f"{flag} {value}" for flag, shown in values.items()
            for value in (shown if isinstance(shown, list) else [shown])
        ]
        if words and not text.startswith("--"):
            error.add_note(f"(with {' '.join(words)})")
        raise


def read_options(
    args: argparse.Namespace, options: type, default: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that the command line sets, by field. Keys of mappings are merged into
    those of ``default``. Raises ConfigError if a value is invalid."""
    hints = get_type_hints(options)
    values = {name: getattr(args, name) for name in given_options(args, options)}
    for name, value in values.items():
        if get_origin(hints[name]) is dict:
            values[name] = {**default[name], **parse_counts(_flag(name), value)}
        elif "Sequence" in str(get_origin(hints[name])):
            values[name] = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return values


def parse_counts(flag: str, entries: list[str]) -> dict[str, int]:
    """Return ``{"llm": 4096}`` for ``["llm=4096"]``. Raises ConfigError if an entry is not
    ``module=number``."""
    counts = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"{flag} has {entry!r}; give module=number, such as llm=4096")
        counts[name] = int(number)
    return counts
