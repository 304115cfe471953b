"""Every row form gives the same sample; other rows raise a SampleError with the reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.row_forms import FORMS, TEXT_ROLES
from raymm.data.samples.rows import RowRules, parse_row
from raymm.data.samples.source_config import SourceConfig
from raymm.errors import SampleError

FOLDERS = MediaFolders(Path("/data"))
MODALITIES = {"image": "image", "video": "video", "audio": "audio"}


def parse(row, **rules):
    return parse_row(row, RowRules(**{"parts": MODALITIES, **rules}), FOLDERS, "row")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def as_messages(system, pairs):
    turns = [message for asked, told in pairs for message in (user(asked), assistant(told))]
    return [{"role": "system", "content": system}, *turns] if system else turns


def as_sharegpt(system, pairs, names=("system", "human", "gpt")):
    names = dict(zip(("system", "user", "assistant"), names, strict=True))
    return [
        {"from": names[m["role"]], "value": m["content"]} for m in as_messages(system, pairs)
    ]


def system_column(system):
    return {"system": system} if system else {}


WRITERS = {
    "messages": lambda s, p: {"messages": as_messages(s, p)},
    "messages as JSON": lambda s, p: {"messages": json.dumps(as_messages(s, p))},
    "messages with from": lambda s, p: {"messages": as_sharegpt(s, p)},
    "messages as lists": lambda s, p: {
        "messages": {
            key: [m[key] for m in as_messages(s, p)] for key in ("role", "content")
        }
    },
    "messages, nulls": lambda s, p: {
        "messages": [{**m, "name": None, "tool_calls": None} for m in as_messages(s, p)],
        "tools": None, "chat_template_kwargs": None,
    },
    "messages, system apart": lambda s, p: {
        "messages": as_messages("", p), **system_column(s)
    },
    "text parts": lambda s, p: {
        "messages": [
            {**m, "content": [{"type": "text", "text": m["content"], "image": None}]}
            for m in as_messages(s, p)
        ]
    },
    "conversations": lambda s, p: {"conversations": as_sharegpt(s, p)},
    "conversations, chatgpt": lambda s, p: {
        "conversations": as_sharegpt(s, p, ("system", "user", "chatgpt"))
    },
    "conversations, roles": lambda s, p: {
        "conversations": [
            {**m, "role": {"assistant": "bot", "user": "human"}.get(m["role"], m["role"])}
            for m in as_messages(s, p)
        ]
    },
    "alpaca": lambda s, p: {
        "instruction": p[-1][0], "input": "", "output": p[-1][1], "history": p[:-1],
        **system_column(s),
    },
    "query": lambda s, p: {
        "query": p[-1][0], "response": p[-1][1], "history": [list(pair) for pair in p[:-1]],
        **system_column(s),
    },
    "prompt, completion": lambda s, p: {
        "prompt": as_messages(s, p)[:-1], "completion": [assistant(p[-1][1])],
    },
    "renamed": lambda s, p: {"chat": as_messages(s, p)},
}
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20
)


def plain(message):
    """Return a message without its flag, with the text of its parts."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}


@given(st.one_of(st.just(""), TEXT), st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_one_conversation_is_one_sample_in_every_form(system, pairs):
    expected = as_messages(system, pairs)
    for name, write in WRITERS.items():
        row = json.loads(json.dumps(write(system, pairs)))
        columns = {"messages": "chat"} if name == "renamed" else {}
        parsed = parse(row, text_columns=columns)
        assert [plain(m) for m in parsed.text.messages] == expected, name
        assert not parsed.unused and not parsed.media, name
        flags = [m.get("loss") for m in parsed.text.messages]
        learned = [None] * len(expected)
        if name == "prompt, completion":
            learned = [False] * (len(expected) - 1) + [None]
        assert flags == learned, name


PREFERENCES = {
    "strings": {"prompt": "what", "chosen": " a cat", "rejected": " a dog"},
    "messages": {
        "prompt": [user("what")], "chosen": [assistant("a cat")], "rejected": [assistant("a dog")],
    },
    "one message each": {
        "prompt": [user("what")], "chosen": assistant("a cat"), "rejected": assistant("a dog"),
    },
    "no prompt": {
        "chosen": [user("what"), assistant("a cat")], "rejected": [user("what"), assistant("a dog")]
    },
    "prompt and whole conversations": {
        "prompt": [user("what")], "chosen": [user("what"), assistant("a cat")],
        "rejected": [user("what"), assistant("a dog")],
    },
    "text of the prompt and whole conversations": {
        "prompt": "what", "chosen": [user("what"), assistant("a cat")],
        "rejected": [user("what"), assistant("a dog")],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "what"}],
        "chosen": {"from": "gpt", "value": "a cat"}, "rejected": {"from": "gpt", "value": "a dog"},
    },
    "alpaca": {"instruction": "what", "input": "", "chosen": "a cat", "rejected": "a dog"},
    "rejected response": {
        "messages": [user("what"), assistant("a cat")], "rejected_response": "a dog"
    },
    "rejected messages": {
        "messages": [user("what"), assistant("a cat")],
        "rejected_messages": [user("what"), assistant("a dog")],
    },
    "query": {"query": "what", "response": "a cat", "rejected_response": "a dog"},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_every_preference_form_gives_both_answers(name):
    parsed = parse(PREFERENCES[name])
    pair = parsed.text.preference
    if name == "strings":
        assert (pair.prompt, pair.chosen, pair.rejected) == ("what", " a cat", " a dog")
    else:
        assert (pair.prompt, pair.chosen, pair.rejected) == (
            [user("what")], [assistant("a cat")], [assistant("a dog")]
        )
    assert not parsed.unused


def test_strings_of_prompt_and_completion_learn_the_completion():
    parsed = parse({"prompt": "what is ", "completion": "a cat"})
    assert (parsed.text.text, parsed.text.prompt_characters) == ("what is a cat", 8)
    assert parsed.form == "prompt_completion" and parsed.text.messages is None


def test_instruction_and_input_are_joined():
    parsed = parse({"instruction": "translate", "input": "chat", "output": "cat"})
    assert parsed.text.messages[0] == user("translate\nchat")


@pytest.mark.parametrize(("flag", "value", "loss"), [
    ("loss", False, False), ("loss", True, True), ("weight", 0, False), ("weight", 1.0, True),
    ("train", False, False), ("train", None, None), ("weight", 0.5, "'weight': 0.5"),
    ("loss", "no", "'loss': 'no'"), ("train", [], r"'train': \[\]"),
])
def test_flags_of_messages_become_loss(flag, value, loss):
    row = {"messages": [user("what"), {**assistant("a cat"), flag: value}]}
    if isinstance(loss, str):
        with pytest.raises(SampleError, match=rf"messages\[1\] has {loss}; accepted: true and"):
            parse(row)
        return
    answer = parse(row).text.messages[1]
    assert answer == assistant("a cat") | ({} if loss is None else {"loss": loss})


def test_flags_that_contradict_each_other_are_refused():
    row = {"messages": [user("what"), {**assistant("a"), "loss": True, "weight": 0}]}
    with pytest.raises(SampleError, match="contradict"):
        parse(row)


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_template_arguments_reach_the_sample(as_json):
    tools, template = [{"type": "function", "function": {"name": "look"}}], {"thinking": False}
    row = {
        "messages": [
            user("look"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "a cat", "tool_call_id": "1"}, assistant("a cat"),
        ],
        "tools": json.dumps(tools) if as_json else tools,
        "chat_template_kwargs": json.dumps(template) if as_json else template,
    }
    text = parse(row).text
    assert (text.tools, text.template) == (tools, template)
    assert text.messages == row["messages"]


def test_function_calls_of_sharegpt_become_tool_calls():
    call = json.dumps({"name": "look", "arguments": {"at": "cat"}})
    row = {"conversations": [
        {"from": "human", "value": "look"}, {"from": "function_call", "value": call},
        {"from": "observation", "value": "a cat"}, {"from": "gpt", "value": "a cat"},
    ]}
    assert parse(row).text.messages == [
        user("look"), {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cat"}, assistant("a cat"),
    ]


@pytest.mark.parametrize(("row", "message"), [
    ({"source": "x"}, r"needs 'messages' \(or .*'instruction' and 'output'.*it has \['source'\]"),
    ({"instruction": "a", "output": 5}, "'output' must be a string, got int"),
    ({"query": "a", "response": "b", "history": ["x"]}, "list of .question, answer."),
    ({"prompt": "a", "completion": [assistant("b")]}, "one of 'prompt' and 'completion' is a text"),
    ({"prompt": "a", "completion": "b", "label": True}, "'label' rates the answer"),
    ({"messages": [user("a")], "tools": "no"}, "'tools' is a text that is not JSON"),
    ({"messages": [user("a")], "tools": {"a": 1}}, "'tools' must be a list of function"),
    ({"prompt": "a", "completion": "b", "tools": [{}]}, "'tools' needs messages"),
    ({"messages": [{"role": "system", "content": "s"}], "system": "t"}, "'system' is given, and"),
    ({"messages": [{"role": "assistant", "content": None}]}, "needs a string 'content'"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "a part with a string 'type'"),
    ({"messages": [user("a"), assistant("b"), user("c"), {"role": "gpt", "content": "d"}]},
     r"messages\[3\] has the role 'gpt', which is not learned; accepted: 'assistant'"),
    ({"messages": [{**user("a"), "train": True}, assistant("b")]}, "has the role 'user' and"),
    ({"messages": {"role": ["user", "assistant"], "content": ["a"]}}, "lists of different lengths"),
    ({"conversations": [{"from": "function_call", "value": "look"}]}, "must be JSON with 'name'"),
    ({"prompt": "else", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), user("c")]},
     "'prompt' is a text; accepted: only texts, or messages"),
])
def test_rows_of_unknown_form_name_the_accepted_forms(row, message):
    with pytest.raises(SampleError, match=message):
        parse(row)


def test_a_configured_form_overrides_the_columns():
    row = {"messages": [user("a"), assistant("b")], "text": "c"}
    assert parse(row).form == "messages" and parse(row).unused == {"text"}
    assert parse(row, row_form="text").text.text == "c"
    assert parse(row, ignore_columns=frozenset({"messages"})).form == "text"
    with pytest.raises(SampleError, match="form 'alpaca' needs 'instruction' and 'output'"):
        parse(row, row_form="alpaca")


def test_columns_name_the_roles_of_every_form():
    row = {"question": "a", "answer": "b", "context": "c", "category": "d"}
    columns = {"instruction": "question", "output": "answer", "input": "context"}
    parsed = parse(row, text_columns=columns)
    assert parsed.text.messages == [user("a\nc"), assistant("b")]
    assert parsed.unused == {"category"} and parsed.column == "answer"


def test_empty_values_are_not_unused_columns():
    row = {"text": "a", "images": [], "score": None, "note": "", "rank": 0}
    assert parse(row).unused == {"rank"}
    assert parse({"text": "a", "tools": [{}]}).unused == {"tools"}


def test_the_configuration_accepts_all_forms():
    for form in FORMS:
        assert SourceConfig(path="a.jsonl", row_form=form).row_form == form


KEYS = st.sampled_from([
    *TEXT_ROLES, "image", "images", "videos", "audio", "role", "content", "from", "value", "type",
    "text", "image_url", "input_audio", "data", "url", "path", "bytes", "tool_calls", "loss",
    "weight", "index", "name", "arguments",
])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([
        "user", "assistant", "human", "gpt", "text", "image", "image_url", "input_audio", "video",
        "function_call", "data:image/png;base64,AAAA", "data:,", "[]", "{}", '[{"role": "user"}]',
        "../x.png", "https://a.b/c.png", "iVBORw0KGgo" * 8,
    ]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image_url", "input_audio", "video", "depth"])},
    optional={key: VALUES for key in ("text", "image", "image_url", "input_audio", "url", "index")},
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={
        "role": LEAVES, "from": LEAVES, "content": st.one_of(VALUES, st.lists(PART, max_size=2)),
        "value": VALUES, "loss": VALUES, "tool_calls": VALUES,
    },
)
MESSAGES = st.one_of(VALUES, st.lists(MESSAGE, max_size=3), MESSAGE)
ROWS = st.one_of(
    VALUES,
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.fixed_dictionaries(
        {}, optional={
            key: MESSAGES for key in
            ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
        },
    ),
)


@given(ROWS, st.sampled_from([None, *FORMS]))
@settings(max_examples=200, deadline=None)
def test_any_row_is_a_sample_or_a_row_error(row, form):
    columns = {"image": "images", "audio": "audio"}
    try:
        parsed = parse(row, row_form=form, columns=columns, frames=frozenset({"video"}))
    except SampleError:
        return
    text = parsed.text
    assert (text.messages is None) != (text.text is None)
    for message in text.messages or ():
        assert isinstance(message["role"], str)
        assert message["content"] is None or isinstance(message["content"], str | list)
        assert message.get("loss") in (None, True, False)
