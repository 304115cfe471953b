"""Row forms: layouts of rows in common datasets, and their conversion to messages or text.

The columns of a row determine its form (:func:`find_form`). Columns are identified by their roles
(``messages``, ``prompt``, ...); a configuration may assign other column names to roles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raymm.data.samples.media import Preference
from raymm.data.samples.messages import one_or_more_messages, read_messages
from raymm.errors import SampleError

TEXT, MESSAGES, ID = "text", "messages", "id"
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
# Advice in errors if no form fits.
RENAME = ". If its columns have other names, set them: columns: {messages: NAME}"
# Columns that every form with messages may have.
_CHAT = ("system", "tools", "chat_template_kwargs")


@dataclass(frozen=True)
class RowText:
    """Text of a row; fields are those of :class:`raymm.data.samples.media.Sample`.

    Attributes:
        messages: parts may contain media.
        text: exactly one of ``messages`` and ``text`` is set.
        preference: both answers, if the row has two.
    """

    messages: list[dict] | None
    text: str | None
    preference: Preference | None = None
    tools: list[dict] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prompt_characters: int = 0


class RoleValues:
    """Values of a row by role.

    Args:
        columns: role -> column, for columns with other names.
        taken: columns without a role: ignored columns, and columns of media.
    """

    def __init__(self, row: Mapping, columns: Mapping[str, str], taken: frozenset[str]) -> None:
        self._columns = columns
        self._values = {
            role: value for role in TEXT_ROLES
            if (role in columns or role not in taken)
            and (value := row.get(columns.get(role, role))) is not None
        }

    def __contains__(self, role: str) -> bool:
        return role in self._values

    def get(self, role: str) -> Any:
        return self._values.get(role)

    def column(self, role: str) -> str:
        return self._columns.get(role, role)

    def string(self, role: str, default: str | None = None) -> str:
        """Return the value of a role; raise a ``SampleError`` if it is not a string."""
        value = self._values.get(role, default)
        if not isinstance(value, str):
            column = self.column(role)
            raise SampleError(f"{column!r} must be a string, got {type(value).__name__}", column)
        return value

    def parsed(self, role: str) -> Any:
        """Return the value of a role, parsed if it is a string; raise a ``SampleError`` for invalid
        JSON."""
        return _parsed(self._values.get(role), self.column(role))


class RowForm(NamedTuple):
    """Layout of rows.

    Attributes:
        required: roles that a row of this form has.
        optional: further roles that the form uses.
        convert: makes the text of a row from its roles.
        main: role that is named in errors about the text.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[RoleValues], RowText]
    main: str


def find_form(values: RoleValues, name: str | None, present: list[str]) -> str:
    """Return the name of the form of a row: the first of :data:`FORMS` whose columns the row has.
    Raise a ``SampleError`` if the row lacks columns of the configured form, or fits no form."""
    if name is not None:
        missing = [values.column(role) for role in FORMS[name].required if role not in values]
        if not missing:
            return name
        raise SampleError(
            f"a row of form {name!r} needs {' and '.join(map(repr, missing))}; it has {present}"
        )
    for form, (required, *_) in FORMS.items():
        if all(role in values for role in required):
            return form
    raise SampleError(f"a sample needs {accepted_columns(values.column)}; it has {present}{RENAME}")


def accepted_columns(column: Callable[[str], str], names: Sequence[str] = ()) -> str:
    """Return the columns of some row forms (by default all) as text for errors. ``column`` maps a
    role to its column."""
    columns = [
        " and ".join(repr(column(role)) for role in FORMS[name].required) for name in names or FORMS
    ]
    return " (or ".join([columns[0], ", ".join(columns[1:])]) + ")" if columns[1:] else columns[0]


def convert_row(values: RoleValues, form: str) -> RowText:
    """Convert a row of a form; raise a ``SampleError`` for a value that does not fit the form."""
    text = FORMS[form].convert(values)
    if "tools" not in FORMS[form].optional:
        return text
    tools, template = _tools(values), _template(values)
    if text.text is not None and (tools or template):
        role = "tools" if tools else "chat_template_kwargs"
        column = values.column(role)
        raise SampleError(f"{column!r} needs messages, and the row has text", column)
    return RowText(
        text.messages, text.text, text.preference, tools, template, text.prompt_characters
    )


def _from_text(values: RoleValues) -> RowText:
    return RowText(None, values.string(TEXT))


def _from_messages(values: RoleValues) -> RowText:
    column = values.column(MESSAGES)
    messages = _with_system(values, read_messages(values.get(MESSAGES), column, False))
    if "rejected_messages" in values:
        rejected_column = values.column("rejected_messages")
        rejected = read_messages(values.get("rejected_messages"), rejected_column, False)
        return _split_prompt(messages, _with_system(values, rejected), column, rejected_column)
    if "rejected_response" in values:
        return _pair(messages[:-1], messages[-1:], _answer(values, "rejected_response"), column)
    return RowText(messages, None)


def _from_conversations(values: RoleValues) -> RowText:
    column = values.column("conversations")
    messages = _with_system(values, read_messages(values.get("conversations"), column, True))
    if CHOSEN in values and REJECTED in values:
        return _pair(messages, _answer(values, CHOSEN), _answer(values, REJECTED), column)
    return RowText(messages, None)


def _from_preference(values: RoleValues) -> RowText:
    """Convert TRL's preference format, or an instruction with two answers."""
    if PROMPT not in values and "instruction" in values:
        prompt = _instruction(values)
        return _pair(
            prompt, _answer(values, CHOSEN), _answer(values, REJECTED), values.column("instruction")
        )
    roles = [PROMPT, CHOSEN, REJECTED] if PROMPT in values else [CHOSEN, REJECTED]
    strings = [role for role in roles if isinstance(values.get(role), str)]
    if PROMPT in values and strings == roles:
        if "system" in values:
            column = values.column("system")
            raise SampleError(f"{column!r} needs messages, and the row has text", column)
        prompt, chosen, rejected = (values.string(role) for role in roles)
        preference = Preference(prompt, chosen, rejected)
        return RowText(None, preference.answers[0], preference)
    names = [values.column(role) for role in (PROMPT, CHOSEN, REJECTED)]
    if strings == [PROMPT]:
        pair = _common_prompt(values)
        if pair.preference and pair.preference.prompt[-1]["content"] == values.get(PROMPT):
            return pair
    if strings:
        accepted = (
            "only texts, or messages" if PROMPT in values else "texts with a prompt, or messages"
        )
        column = values.column(strings[0])
        raise SampleError(f"{column!r} is a text; accepted: {accepted}, in all of {names}", column)
    if PROMPT not in values:
        return _common_prompt(values)
    prompt, chosen, rejected = (
        one_or_more_messages(values.get(role), values.column(role)) for role in roles
    )
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return _pair(_with_system(values, prompt), chosen, rejected, names[0])


def _common_prompt(values: RoleValues) -> RowText:
    """Convert two complete conversations, which begin with the prompt."""
    chosen, rejected = (
        _with_system(values, one_or_more_messages(values.get(role), values.column(role)))
        for role in (CHOSEN, REJECTED)
    )
    return _split_prompt(chosen, rejected, values.column(CHOSEN), values.column(REJECTED))


def _split_prompt(chosen: list[dict], rejected: list[dict], column: str, other: str) -> RowText:
    """Use the common first messages of both conversations as the prompt."""
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    if not (count and chosen[count:] and rejected[count:]):
        raise SampleError(
            f"{column!r} and {other!r} must begin with the same messages and then differ, as "
            "there is no 'prompt'", column,
        )
    return _pair(chosen[:count], chosen[count:], rejected[count:], column)


def _pair(prompt: list[dict], chosen: list[dict], rejected: list[dict], column: str) -> RowText:
    if not prompt or not chosen or not rejected:
        raise SampleError(f"{column!r} has no prompt, or no answer to it", column)
    preference = Preference(prompt, chosen, rejected)
    return RowText(preference.answers[0], None, preference)


def _answer(values: RoleValues, role: str) -> list[dict]:
    """Return the messages of an answer, which is a string, a message, or messages."""
    value = values.get(role)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return one_or_more_messages(value, values.column(role))


def _from_prompt_completion(values: RoleValues) -> RowText:
    prompt, completion = values.get(PROMPT), values.get("completion")
    column = values.column(PROMPT)
    if "label" in values:
        raise SampleError(
            f"{values.column('label')!r} rates the answer; rows with one rated answer are not "
            "supported. Accepted: prompt and completion, or prompt, chosen and rejected. To learn "
            "all answers, list the column in data.ignore_columns", values.column("label"),
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if "system" in values:
            system = values.column("system")
            raise SampleError(f"{system!r} needs messages, and the row has text", system)
        return RowText(None, prompt + completion, prompt_characters=len(prompt))
    if isinstance(prompt, str) or isinstance(completion, str):
        completion_column = values.column("completion")
        raise SampleError(
            f"one of {column!r} and {completion_column!r} is a text and the other is not; "
            "accepted: both texts, or both messages", column,
        )
    messages = _with_system(values, one_or_more_messages(prompt, column))
    answer = one_or_more_messages(completion, values.column("completion"))
    return RowText([{**message, "loss": False} for message in messages] + answer, None)


def _from_alpaca(values: RoleValues) -> RowText:
    answer = {"role": "assistant", "content": values.string("output")}
    return RowText([*_instruction(values), answer], None)


def _instruction(values: RoleValues) -> list[dict]:
    texts = [values.string("instruction"), values.string("input", "")]
    question = "\n".join(text for text in texts if text)
    return _with_system(values, [*_history(values), {"role": "user", "content": question}])


def _from_query(values: RoleValues) -> RowText:
    question = {"role": "user", "content": values.string("query")}
    prompt = _with_system(values, [*_history(values), question])
    answer = [{"role": "assistant", "content": values.string("response")}]
    if "rejected_response" in values:
        rejected = _answer(values, "rejected_response")
        return _pair(prompt, answer, rejected, values.column("query"))
    return RowText(prompt + answer, None)


def _history(values: RoleValues) -> list[dict]:
    """Return the messages of earlier turns, a list of [question, answer]."""
    history, column = values.parsed("history") or [], values.column("history")
    is_pairs = isinstance(history, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not is_pairs:
        raise SampleError(f"{column!r} must be a list of [question, answer], both texts", column)
    return [
        {"role": role, "content": text}
        for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _with_system(values: RoleValues, messages: list[dict]) -> list[dict]:
    """Insert the text of ``system`` as the first message."""
    system = values.string("system", "")
    if not system:
        return messages
    if messages[0]["role"] == "system":
        column = values.column("system")
        raise SampleError(f"{column!r} is given, and the messages have a system message", column)
    return [{"role": "system", "content": system}, *messages]


def _tools(values: RoleValues) -> list[dict] | None:
    column = values.column("tools")
    tools = values.parsed("tools")
    if isinstance(tools, list):
        tools = [_parsed(tool, column) for tool in tools]
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SampleError(
            f"{column!r} must be a list of function definitions (JSON objects), or a list in a "
            f"JSON string", column,
        )
    return tools


def _template(values: RoleValues) -> dict[str, Any]:
    column = values.column("chat_template_kwargs")
    template = values.parsed("chat_template_kwargs")
    if template is None:
        return {}
    if not isinstance(template, dict):
        raise SampleError(
            f"{column!r} must be an object of arguments, got {type(template).__name__}", column
        )
    return template


def _parsed(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{column!r} is a text that is not JSON: {error}", column) from None


# In the order in which they are tested.
FORMS: dict[str, RowForm] = {
    "messages": RowForm(
        (MESSAGES,), (*_CHAT, "rejected_response", "rejected_messages"), _from_messages, MESSAGES
    ),
    "conversations": RowForm(
        ("conversations",), (*_CHAT, CHOSEN, REJECTED), _from_conversations, "conversations"
    ),
    "preference": RowForm(
        (CHOSEN, REJECTED), (PROMPT, "instruction", "input", "history", *_CHAT), _from_preference,
        CHOSEN,
    ),
    "prompt_completion": RowForm(
        (PROMPT, "completion"), ("label", *_CHAT), _from_prompt_completion, "completion"
    ),
    "alpaca": RowForm(
        ("instruction", "output"), ("input", "history", *_CHAT), _from_alpaca, "output"
    ),
    "query_response": RowForm(
        ("query", "response"), ("history", "rejected_response", *_CHAT), _from_query, "response"
    ),
    "text": RowForm((TEXT,), (), _from_text, TEXT),
}
TEXT_ROLES = tuple(dict.fromkeys(
    [TEXT, MESSAGES, PROMPT, CHOSEN, REJECTED, ID]
    + [role for form in FORMS.values() for role in (*form.required, *form.optional)]
))

# End of errors about names of forms.
ACCEPTED = (
    f"{', '.join(FORMS)}, or module:function, which returns a row of one of these forms for a row"
)
