"""Configuration files: a subset of YAML that all versions of YAML read in the same way."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from raymm.errors import ConfigError

# Maximum nesting of sections. Configurations have about eight levels; Python's stack would overflow
# at deeper nesting.
MOST_DEPTH = 50
# Maximum number of values with aliases expanded: ten lines of nested aliases make billions.
MOST_VALUES = 100_000
# Maximum file size in bytes, exceeded by files of weights or data that are given by mistake.
MOST_BYTES = 2**22

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
# Parts of the YAML parser's errors, and hints for the user.
_HINTS = {
    "mapping values are not allowed": "; put a text that has ': ' in quotes, and indent the keys "
    "of a section by the same number of spaces",
    "cannot start any token": "; indent with spaces, not tabs, and put texts that begin with "
    "@, ` or % in quotes",
    "could not find expected ':'": "; every line of a section is 'key: value'",
    "expected <block end>": "; indent the keys of a section by the same number of spaces",
}
# Suffixes of data files, which are not configurations.
_ROWS = (".jsonl", ".ndjson", ".parquet", ".tar", ".gz", ".zst")
_AS_ROWS = "pass rows of data with --data: raymm train --model MODEL --data"
_TAG = "tag:yaml.org,2002:"
# Numbers that YAML 1.1 and 1.2 read differently: 010 is 8 or 10, 1:30 is 90 or a string.
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$")


class _Loader(yaml.SafeLoader):
    """Loader that rejects duplicate keys and reads ``1e-4`` as a number, like JSON."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > MOST_DEPTH:
            raise ComposerError(
                None, None, f"nested deeper than {MOST_DEPTH}", self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # Keys as written; merged keys (<<) may be overridden.
        written = getattr(node, "written", node.value)
        names: set[Hashable] = set()
        for key, _ in written if isinstance(node, yaml.MappingNode) else ():
            merges = key.tag == f"{_TAG}merge"
            name = key.value if merges else self.construct_object(key, deep=True)
            if isinstance(name, Hashable):
                if name in names:
                    raise _wrong(key, f"the key {name!r} occurs twice in the same section")
                names.add(name)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if not hasattr(node, "written"):  # an aliased section is flattened at each use
            vars(node)["written"] = list(node.value)
        super().flatten_mapping(node)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if _AMBIGUOUS.match(node.value):
            raise _wrong(
                node, f"the number {node.value!r} is read differently by versions of YAML; write "
                "it as a decimal number, or a text in quotes"
            )
        if node.tag == f"{_TAG}int":
            return self.construct_yaml_int(node)
        return self.construct_yaml_float(node)


def _wrong(node: yaml.Node, reason: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


for _kind in ("int", "float"):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_number)
# YAML 1.1 requires a dot in floats and would read 1e-4 as a string.
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, what: str) -> Any:
    """Parse a YAML text. ``what`` names it in errors. Raise a ``ConfigError`` if the text is not
    valid YAML, a key occurs twice in a section or is not a string, a section contains an alias of
    itself, or there are more than :data:`MOST_VALUES` values or :data:`MOST_DEPTH` levels."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {_explained(error)}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # ValueError: a date such as 2024-13-45, or a number of thousands of digits.
        raise ConfigError(f"{what} is not valid YAML: {error}") from None
    _check_size(value, what)
    return value


def _explained(error: yaml.MarkedYAMLError) -> str:
    """Return line and cause of a YAML error, a hint, and the line itself."""
    why = ", ".join(filter(None, (error.context, error.problem)))
    hint = next((hint for phrase, hint in _HINTS.items() if phrase in why), "")
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{why}{hint}"
    snippet = mark.get_snippet(indent=2)
    return f"line {mark.line + 1}: {why}{hint}" + (f"\n{snippet}" if snippet else "")


def _check_size(value: Any, what: str) -> None:
    level, remaining = [value], MOST_VALUES
    for _ in range(MOST_DEPTH + 1):
        inner = (
            item for outer in level if isinstance(outer, dict | list | tuple | set)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        )
        level = list(islice(inner, remaining + 1))
        remaining -= len(level)
        if remaining < 0:
            raise ConfigError(f"{what} has more than {MOST_VALUES} values with aliases expanded")
    if level:
        raise ConfigError(
            f"{what} has sections nested deeper than {MOST_DEPTH}, or a section that "
            "contains an alias of itself"
        )


def read_text(path: str | os.PathLike[str], what: str, most: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file without a byte order mark. Raise a ``ConfigError`` if the
    file does not exist, cannot be read, or is too large.

    Args:
        what: field or option that names the file, for errors.
    """
    file = Path(path)
    where = f"{what} is {str(path)!r}"
    try:
        if file.is_dir():
            raise ConfigError(f"{where}, which is a folder; give a file")
        if not file.exists():
            raise ConfigError(f"{where}; there is no such file")
        with open(file, "rb") as stream:
            data = stream.read(most + 1)
        if len(data) > most:
            raise ConfigError(f"{where}, which has more than {most:,} bytes")
        return data.decode("utf-8-sig")
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}, which is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{where}, which cannot be read: {reason}") from None


def read_sections(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of a configuration file, with overrides applied in order. Raise a
    ``ConfigError`` if the file or an override is wrong. Names it."""
    if str(path).endswith(_ROWS) and os.path.isfile(path):
        raise ConfigError(f"{path} does not look like a configuration file; {_AS_ROWS} {path}")
    if os.path.isdir(path):
        raise ConfigError(
            f"config is {str(path)!r}, which is a folder; give a YAML file, or a model's folder "
            f"with --model: raymm train --model {path} --data FILE"
        )
    data = parse_yaml(read_text(path, "config"), str(path))
    if data is None:
        raise ConfigError(f"{path} is empty; it needs the sections run, model and data")
    if isinstance(data, list):
        raise ConfigError(
            f"{path} holds a list, but a configuration has the sections run, model and data; "
            f"{_AS_ROWS} {path}"
        )
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} holds a {type(data).__name__}, but a configuration has the sections run, "
            "model and data"
        )
    for override in overrides:
        apply_override(data, override)
    return data


def with_overrides(path: str | os.PathLike[str], overrides: Sequence[str]) -> str:
    """Return the name of a configuration and its overrides for an error."""
    return " ".join([str(path), *["with"][:len(overrides)], *(f"--set {o}" for o in overrides)])


def expand_variables(value: Any, where: str = "") -> Any:
    """Replace ``${NAME}`` and ``${NAME:-default}`` in strings by environment variables, and a
    leading ``~`` by the home folder. Raise a ``ConfigError`` if a variable without default is not
    set."""
    if isinstance(value, dict):
        prefix = f"{where}." if where else ""
        return {k: expand_variables(v, f"{prefix}{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and default is None:
            raise ConfigError(f"{where}: the environment variable {name} is not set")
        return os.environ.get(name) or default or ""

    expanded = _VARIABLE.sub(replace, value)
    return os.path.expanduser(expanded) if expanded.startswith("~") else expanded


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply one ``a.b.c=value`` in place. The value is parsed as YAML. Raise a ``ConfigError`` if
    there is no ``=``, the path leads through a value, or the value is not YAML."""
    path, equals, text = override.partition("=")
    *parents, last = path.split(".")
    if not equals or not all((*parents, last)):
        raise ConfigError(f"--set takes key.path=value, got {override!r}")
    target = data
    for name in parents:
        if target.get(name) is None:
            target[name] = {}
        if not isinstance(target[name], dict):
            raise ConfigError(f"--set {override}: {name!r} is a value, not a section")
        # Copy the section, so that the override does not change its aliases.
        target[name] = dict(target[name])
        target = target[name]
    target[last] = parse_yaml(text, f"--set {override}")
