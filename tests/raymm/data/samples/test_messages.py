"""Messages of rows in all accepted forms."""

import json

import pytest

from raymm.data.samples.messages import one_or_more_messages, read_messages
from raymm.errors import SampleError

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("value", [
    CHAT,
    json.dumps(CHAT),
    {"role": ["user", "assistant"], "content": ["q", "a"]},
    [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
    [{**message, "name": None} for message in CHAT],
])
def test_every_form_gives_the_same_messages(value):
    assert read_messages(value, "chat", False) == CHAT


def test_one_message_is_a_list_of_one():
    assert one_or_more_messages(CHAT[0], "prompt") == CHAT[:1]
    assert one_or_more_messages({"from": "gpt", "value": "a"}, "prompt") == CHAT[1:]
    with pytest.raises(SampleError, match="'prompt' must be a list with at least one message"):
        one_or_more_messages({}, "prompt")


def test_a_function_call_becomes_tool_calls():
    call = {"name": "f", "arguments": {"x": 1}}
    (message,) = read_messages([{"from": "function_call", "value": json.dumps(call)}], "c", True)
    assert message == {
        "role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": call}],
    }


@pytest.mark.parametrize(("flags", "loss"), [
    ({}, None), ({"loss": True}, True), ({"weight": 0}, False), ({"train": 1.0, "loss": 1}, True),
    ({"loss": None, "weight": 0}, False),
])
def test_flags_switch_labels(flags, loss):
    (message,) = read_messages([{**CHAT[1], **flags}], "chat", True)
    assert message.get("loss") is loss and not {"weight", "train"} & message.keys()


@pytest.mark.parametrize(("value", "reason"), [
    ([], "'chat' must be a list with at least one message"),
    (None, "'chat' must be a list with at least one message"),
    ("[" * 10**5, "'chat' is a text that is not JSON"),
    ({"role": ["user"], "content": []}, "lists of different lengths {'role': 1, 'content': 0}"),
    ([CHAT[0], "a"], r"chat[1] must be a message, got str"),
    ([{"content": "q", "x": 1}], "chat[0] needs a string 'role' (or 'from'); it has ['content'"),
    ([{"role": "user", "content": float("nan")}], "chat[0] needs a string 'content'"),
    ([{"role": "user", "content": None}], "chat[0] needs a string 'content'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "chat[0].content[0] has type 'text'"),
    ([{"role": "user", "content": ["a"]}], "chat[0].content[0] must be a part"),
    ([{"from": "alien", "value": "q"}], "chat[0] is from 'alien'; accepted: assistant, bard"),
    ([{"role": "gpt", "content": "a"}], "chat[0] has the role 'gpt', which is not learned"),
    ([{**CHAT[1], "loss": 0.5}], "chat[0] has 'loss': 0.5; accepted: true and false, or 1 and 0"),
    ([{**CHAT[1], "loss": 1, "train": 0}], "which contradict each other"),
    ([{**CHAT[0], "loss": True}], "chat[0] has the role 'user' and a flag to be learned"),
    ([{"from": "tool_call", "value": "f(1)"}], "chat[0] calls a function; its text must be JSON"),
])  # fmt: skip
def test_other_messages_are_refused_with_the_place(value, reason):
    with pytest.raises(SampleError) as error:
        read_messages(value, "chat", False)
    assert reason in str(error.value)
