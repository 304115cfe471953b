"""Conversion of the messages of a row to ``role`` and ``content``."""

from __future__ import annotations

import json
from typing import Any

from raymm.errors import SampleError

# The role whose messages are labels.
LEARNED_ROLE = "assistant"
# Role names in ShareGPT and LLaVA (``from``), ms-swift and LLaMA-Factory.
_ROLES = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot", "bing", "bard"),
    "tool": ("tool", "function", "observation", "tool_response", "function_response"),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
# Roles whose text is a tool call in JSON.
_CALLS = ("function_call", "tool_call")
# Keys of a message that switch its labels on or off.
_FLAGS = ("loss", "weight", "train")


def read_messages(value: object, column: str, rename: bool) -> list[dict]:
    """Return messages with ``role`` and ``content``, without null values. Raise a ``SampleError``
    if the value has another form.

    Args:
        value: a list of messages, a list in a JSON string, or a dict of lists as stored by
            ``Sequence({...})`` of ``datasets``. A message has ``role`` and ``content``, or ``from``
            and ``value``.
        rename: also rename the roles of messages with ``role`` and ``content``, such as ``human``.
            Roles in ``from`` are always renamed.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"{column!r} is a text that is not JSON ({error}); accepted: a list of messages, "
                "or a list in a JSON string", column,
            ) from None
    if isinstance(value, dict) and value and all(isinstance(v, list) for v in value.values()):
        names, lists = list(value), list(value.values())
        if len(set(map(len, lists))) > 1:
            lengths = {name: len(items) for name, items in value.items()}
            raise SampleError(
                f"{column!r} has lists of different lengths {lengths}; accepted: equal ones, with "
                "an element for each message", column,
            )
        value = [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
    if not isinstance(value, list) or not value:
        raise SampleError(f"{column!r} must be a list with at least one message", column)
    return [
        _message(message, f"{column}[{number}]", column, rename)
        for number, message in enumerate(value)
    ]


def one_or_more_messages(value: object, column: str) -> list[dict]:
    """Return :func:`read_messages` of a list of messages, or of one message; raise a
    ``SampleError`` for other values."""
    is_one = isinstance(value, dict) and isinstance(value.get("role", value.get("from")), str)
    return read_messages([value] if is_one else value, column, True)


def _message(message: object, where: str, column: str, rename: bool) -> dict:
    if not isinstance(message, dict):
        raise SampleError(f"{where} must be a message, got {type(message).__name__}", column)
    names = ("from", "value") if "from" in message and "role" not in message else (
        "role", "content"
    )
    role, content = message.get(names[0]), message.get(names[1])
    if not isinstance(role, str):
        raise SampleError(
            f"{where} needs a string 'role' (or 'from'); it has {sorted(map(str, message))}", column
        )
    other_fields = {
        key: value for key, value in message.items()
        if key not in (*names, *_FLAGS) and value is not None
    }
    rename = rename or names[0] == "from"
    if rename and role in _CALLS:
        other_fields["tool_calls"] = _tool_calls(content, where, column)
        role, content = "assistant", None
    elif rename:
        role = _ROLE_OF.get(role, role)
        if names[0] == "from" and role not in _ROLES:
            accepted = sorted({*_ROLE_OF, *_CALLS})
            raise SampleError(f"{where} is from {role!r}; accepted: {', '.join(accepted)}", column)
    elif role != LEARNED_ROLE and _ROLE_OF.get(role) == LEARNED_ROLE:
        raise SampleError(
            f"{where} has the role {role!r}, which is not learned; accepted: {LEARNED_ROLE!r} for "
            "answers (and 'user' for questions). Rename the roles, or rename the column to "
            "'conversations', whose roles are converted", column,
        )
    _check_content(content, other_fields, where, names[1], column)
    loss = _loss(message, where, column)
    if loss and role != LEARNED_ROLE:
        raise SampleError(
            f"{where} has the role {role!r} and a flag to be learned; only messages with the role "
            f"{LEARNED_ROLE!r} are learned. Remove the flag", column,
        )
    return {
        "role": role, "content": content, **other_fields,
        **({} if loss is None else {"loss": loss}),
    }


def _check_content(content: object, rest: dict, where: str, name: str, column: str) -> None:
    if isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(part, f"{where}.{name}[{number}]", column)
    elif content is None and (rest.get("tool_calls") or rest.get("function_call")):
        return
    elif not isinstance(content, str):
        raise SampleError(
            f"{where} needs a string {name!r}, or a list of parts (null only next to 'tool_calls')",
            column,
        )


def _check_part(part: object, where: str, column: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise SampleError(f"{where} must be a part with a string 'type'", column)
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise SampleError(f"{where} has type 'text' and needs a string 'text'", column)


def _tool_calls(content: object, where: str, column: str) -> list[dict]:
    """Return the tool calls of a message whose text is ``{"name": ..., "arguments": ...}``, or a
    list of such objects."""
    calls: Any = content
    if isinstance(content, str):
        try:
            calls = json.loads(content)
        except (ValueError, RecursionError):
            calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    is_valid = isinstance(calls, list) and calls and all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
        for call in calls
    )
    if not is_valid:
        raise SampleError(
            f"{where} calls a function; its text must be JSON with 'name' and 'arguments'", column
        )
    return [
        {"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
        for c in calls
    ]


def _loss(message: dict, where: str, column: str) -> bool | None:
    """Return True or False if the message has a flag for its labels, None otherwise."""
    flags = {}
    for name in _FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise SampleError(
                f"{where} has {name!r}: {value!r}; accepted: true and false, or 1 and 0", column
            )
        flags[name] = bool(value)
    if len(set(flags.values())) > 1:
        raise SampleError(f"{where} has {flags}, which contradict each other", column)
    return next(iter(flags.values()), None)
