"""Labels without generation blocks equal those of TRL's templates with blocks.

TRL ships chat templates of many models with ``{% generation %}`` blocks around the assistant's text
(``assistant_only_loss``). Without the blocks, the same template must give the same labels.
"""

import re
import warnings
from pathlib import Path

import pytest
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raymm.data.conversations.template import ChatTemplate, special_ids
from raymm.data.samples.media import Sample
from raymm.errors import SampleError

FOLDER = Path(trl.__file__).parent / "chat_templates"
SUFFIX = "_training.jinja"
TEMPLATES = sorted(file.name.removesuffix(SUFFIX) for file in FOLDER.glob(f"*{SUFFIX}"))
# TRL also learns the header of the turn, or its last characters, which the generation prompt has.
WITH_HEADER = {"deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer", "qwen2_5"}
# The template opens the tool's turn in the assistant's; TRL does not learn that token.
OPENS_TOOL_TURN = {("diffusion_gemma", "tools")}
SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|<\|?\w+\|?>(?<=turn\|>)|<(?:start_of_turn|end_of_turn|image|"
    r"start_of_image|end_of_utterance|channel\|)>|\[gMASK\]|<sop>|\[/?INST\]|</?s>"
)
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}}  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "id": "a12345678",
        "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}  # fmt: skip
CONVERSATIONS = {
    "one turn": [user("Hi there"), said("Hello.")],
    "system": [
        {"role": "system", "content": "Be brief."}, user("Hi"), said("Hello."), user("And?"),
        said("Nothing."),
    ],
    "three turns": [
        user("Hi"), said("Hello."), user("Two?"), said("Two."), user("Three?"), said("Three."),
    ],
    "equal turns": [user("a"), said("a"), user("a"), said("a")],
    "two users": [user("Hi"), user("There?"), said("Hello.")],
    "assistant first": [said("Welcome!"), user("Hi"), said("Hello.")],
    "reasoning": [
        user("Hi"), said("Hello.", reasoning_content="They greet."), user("Two?"),
        said("Two.", reasoning_content="Count."),
    ],
    "thoughts in the content": [
        user("Hi"), said("<think>\nThey greet.\n</think>\n\nHello."), user("Two?"),
        said("<think>\nCount.\n</think>\n\nTwo."),
    ],
    "tools": [
        user("Weather in Rome?"), said("", tool_calls=[CALL]),
        {"role": "tool", "name": "get_weather", "tool_call_id": "a12345678", "content": "Sunny"},
        said("It is sunny."), user("Thanks"), said("Welcome."),
    ],
}  # fmt: skip


def byte_tokenizer(template):
    """Return a tokenizer of bytes and of the special tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=template,
        additional_special_tokens=sorted({*SPECIAL.findall(template), "<bos>", "<eos>"}),
    )


def chat(tokenizer, template, messages, tools):
    tokenizer.chat_template = template
    sample = Sample(0, "the-id", messages, None, {}, tools=tools)
    return ChatTemplate(tokenizer).chat(sample, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_equal_generation_blocks(name):
    tagged = (FOLDER / f"{name}{SUFFIX}").read_text()
    # Another tag without output keeps the white space of the template.
    untagged = re.sub(r"(\{%-?)\s*(?:end)?generation\s*(-?%\})", r"\1 set nothing = 1 \2", tagged)
    tokenizer, compared = byte_tokenizer(tagged), 0
    for case, messages in CONVERSATIONS.items():
        if not ChatTemplate(tokenizer).takes("user")[0]:
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]
        tools = [TOOL] if case == "tools" else None
        try:
            due = tokenizer.apply_chat_template(
                messages, chat_template=tagged, tools=tools, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception:  # a template may reject a conversation, or call missing functions
            continue
        masks = [bool(value) for value in due["assistant_masks"]]
        try:
            found = chat(tokenizer, untagged, messages, tools)
            assert list(chat(tokenizer, tagged, messages, tools).learned) == masks
        except SampleError as error:
            # The template drops content of the row; TRL trains without it.
            assert re.search(
                r"(reasoning_content|tool_calls|'tools'|\(tool\)).* does not write", str(error)
            )
            continue
        assert list(found.ids) == due["input_ids"]
        compared += 1
        if name in WITH_HEADER:
            check_header(tokenizer, due["input_ids"], masks, found.learned)
        elif (name, case) not in OPENS_TOOL_TURN:
            assert list(found.learned) == masks, case
    assert compared >= 3


def check_header(tokenizer, ids, masks, learned):
    """Check that TRL's labels differ by the same few tokens in each turn, before raymm's."""
    extra = [mask and not own for mask, own in zip(masks, learned, strict=True)]
    assert not any(own and not mask for mask, own in zip(masks, learned, strict=True))
    starts = [i for i, own in enumerate(learned) if own and not learned[i - 1]]
    headers = set()
    for start in starts:
        first = start
        while first and extra[first - 1]:
            first -= 1
        headers.add(tokenizer.decode(ids[first:start]))
    assert headers <= {"\n", "<｜Assistant｜>", "<｜Assistant｜><think>\n", "<|start|>assistant"}
    assert len(headers) <= 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "gptoss"])
def test_templates_that_rewrite_earlier_turns(name):
    """Learn every turn as in the whole rendering, with thoughts only where they are rendered."""
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer(template)
    for case in ("three turns", "reasoning", "tools", "assistant first"):
        messages = CONVERSATIONS[case]
        if name == "glm4moe" and case == "tools":
            messages = [{k: v for k, v in m.items() if k != "name"} for m in messages]
        found = chat(tokenizer, template, messages, [TOOL] if case == "tools" else None)
        learned = "".join(
            tokenizer.decode([token]) if own else "\0"
            for token, own in zip(found.ids, found.learned, strict=True)
        )
        turns = [turn for turn in learned.split("\0") if turn]
        assert len(turns) == sum(m["role"] == "assistant" for m in messages), turns
        for turn, message in zip(
            turns, [m for m in messages if m["role"] == "assistant"], strict=True
        ):
            assert message["content"] in turn or "get_weather" in turn
            assert "user" not in turn.removesuffix("<|user|>")
        if case == "reasoning" and name.startswith("qwen"):
            assert "They greet." not in "".join(turns)
            assert "Count." in turns[-1]


def test_masked_messages_have_no_labels():
    template = (FOLDER / "qwen2_5_vl_training.jinja").read_text()
    tokenizer = byte_tokenizer(template)
    messages = [user("Hi"), said("Hello.", loss=False), user("Two?"), said("Two.")]
    untagged = (FOLDER / "qwen2_5_vl.jinja").read_text()
    for text in (template, untagged):
        found = chat(tokenizer, text, messages, None)
        ids = [token for token, own in zip(found.ids, found.learned, strict=True) if own]
        assert tokenizer.decode(ids) == "Two.<|im_end|>\n"
    assert special_ids(tokenizer) >= {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_a_block_that_leaves_out_the_end_is_warned_of():
    whole = (FOLDER / "llama3_training.jinja").read_text()
    tokenizer = byte_tokenizer(whole)
    old, new = "'<|eot_id|>' }}\n        {%- endgeneration %}", "'' }}{% endgeneration %}<|eot_id|>"
    cut = re.sub(r"message\['content'\] \| trim \+ " + re.escape(old), lambda match: (
        "message['content'] | trim + " + new), whole)
    assert cut != whole
    with pytest.warns(UserWarning, match=r"labels end before '<\|eot_id\|>'; move"):
        chat(tokenizer, cut, CONVERSATIONS["three turns"], None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        chat(tokenizer, whole, CONVERSATIONS["three turns"], None)


def test_a_last_turn_without_an_end_is_a_warning():
    template = (FOLDER / "glm4moe.jinja").read_text()
    with pytest.warns(UserWarning, match="no token after the last turn"):
        chat(byte_tokenizer(template), template, CONVERSATIONS["one turn"], None)
