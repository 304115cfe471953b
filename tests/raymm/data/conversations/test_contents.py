"""Contents of any text keep their labels; contents that a template omits are rejected."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.data.conversations.template import ChatTemplate
from raymm.data.samples.media import Sample
from raymm.errors import SampleError
from tests.raymm.data.conversations.test_spans import (
    CALL,
    FOLDER,
    SUFFIX,
    TEMPLATES,
    WITH_HEADER,
    byte_tokenizer,
    chat,
    said,
    user,
)

# Its blocks of several bytes per character end elsewhere in transformers.
OTHER = {"diffusion_gemma"}
TEXTS = st.lists(st.sampled_from([
    "", " ", "\n", "a", "Hello.", "assistant\n", "user", "None", "{'type': 'text'}", "\r\n", "\t",
    "\u200b", "\u05e9\u05dc\u05d5\u05dd", "e\u0301\U0001f469\u200d\U0001f467", "\\alpha{x}",
    "{{ x }}", "<think>", "</think>", "<think>\nt\n</think>\n\nans", "<|im_end|>", "<eos>",
    "<|im_start|>assistant\n", "<bos>", "<end_of_turn>\n", "<|eot_id|>", "[INST] x [/INST]",
    "</s>", "<image>",
]), max_size=2).map("".join)


@st.composite
def conversations(draw):
    """Draw conversations whose contents look like the text of templates."""
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    if not messages and draw(st.booleans()):
        messages.append(said(draw(TEXTS)))
    users = draw(st.sampled_from([1, 1, 2]))
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXTS)) for _ in range(users)]
        messages.append(said(draw(TEXTS)))
    return messages


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - WITH_HEADER - OTHER))
def test_any_content_has_the_labels_of_generation_blocks(name):
    tagged = (FOLDER / f"{name}{SUFFIX}").read_text()
    untagged = re.sub(r"(\{%-?)\s*(?:end)?generation\s*(-?%\})", r"\1 set nothing = 1 \2", tagged)
    tokenizer = byte_tokenizer(tagged)
    has_parts, compared = not ChatTemplate(tokenizer).takes("user")[0], []

    @given(conversations())
    def check(messages):
        if has_parts:
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]
        try:
            due = tokenizer.apply_chat_template(
                messages, chat_template=tagged, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:  # a template may reject a conversation
            return
        try:
            found = chat(tokenizer, untagged, messages, None)
        except SampleError as error:
            # Some templates write nothing that identifies an assistant's first message.
            assert "are ambiguous" in str(error) and messages[0]["role"] == "assistant"
            return
        assert list(found.ids) == due["input_ids"]
        assert list(found.learned) == [bool(value) for value in due["assistant_masks"]]
        compared.append(messages)

    check()
    assert compared


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
INSTEAD = "{{ m.tool_calls[0].function if m.tool_calls else m.content }}"
DROPPING = {
    "a role": (CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in "
               "('user', 'assistant') %}"), [{"role": "developer", "content": "Be brief."}],
               r"messages\[0\] \(developer\) has a content, which the chat"),
    "text next to calls": (CHATML.replace("{{ m.content }}", INSTEAD),
                           [user("Hi"), said("I look.", tool_calls=[CALL])],
                           r"messages\[1\] \(assistant\) has a content next to tool calls, which"),
    "a second call": (CHATML.replace("{{ m.content }}", INSTEAD),
                      [user("Hi"), said("", tool_calls=[CALL, CALL])],
                      r"messages\[1\] has 'tool_calls', which the chat template does not write"),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_content_that_the_template_drops_is_refused(name):
    template, messages, reason = DROPPING[name]
    tokenizer = byte_tokenizer(template + PROMPT)
    messages = [*messages, user("Hi"), said("Hello.")]
    with pytest.raises(SampleError, match=reason):
        chat(tokenizer, template + PROMPT, messages, None)


def test_contents_that_may_be_dropped_are_ignored_by_name():
    template, messages, _ = DROPPING["a role"]
    tokenizer = byte_tokenizer(template)
    messages = [*messages, user("Hi"), said("Hello.")]
    sample = Sample(0, "the-id", messages, None, {})
    found = ChatTemplate(tokenizer, ignored=["content"]).chat(sample, messages)
    assert "Be brief" not in found.text and any(found.learned)


def test_an_appended_prompt_has_no_label():
    template = CHATML + "{{ '<|im_start|>assistant\\n' }}"
    with pytest.raises(SampleError, match=r"ends messages\[1\] differently when messages follow"):
        chat(byte_tokenizer(template), template, [user("Hi"), said("Hello.")], None)


@pytest.mark.parametrize("flags", [[False, None], [None, False]])
def test_masked_turns_without_blocks_stay_without_labels(flags):
    """Use templates with generation blocks for some of the turns only."""
    template = CHATML.replace(
        "{{ m.content }}", "{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
    )
    answers = [said("One.", loss=flags[0]), said("Two.", loss=flags[1])]
    messages = [user("Hi"), answers[0], user("And?"), answers[1]]
    found = chat(byte_tokenizer(template), template, messages, None)
    text = "".join(
        found.text[start:stop]
        for own, (start, stop) in zip(found.learned, found.offsets, strict=True) if own
    )
    assert text == ("Two." if flags[1] is None else "")


def test_a_template_of_parts_takes_them_of_tools_too():
    template = (FOLDER / "smolvlm.jinja").read_text()
    assert ChatTemplate(byte_tokenizer(template)).takes("tool") == (False, True)
