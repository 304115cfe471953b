"""Conversations that were once rejected or trained on wrong labels."""

import json

import pytest
import torch
from PIL import Image

from benchmarks.shared.row_models import TARGETS, save
from benchmarks.shared.templates import SHAPES
from raymm.errors import SampleError
from tests.support.built_rows import BuiltRows, case_file, with_template
from tests.support.tiny_folders import tiny

KIND = "qwen2_5_vl"
END = "<|im_end|>\n"


def due(rows: BuiltRows, index: int = 0, **more) -> str:
    """Return the text that the chat template renders for the messages of a row."""
    text = rows.dataset.path.read_text().splitlines()[index]
    return rows.processor.apply_chat_template(json.loads(text)["messages"], tokenize=False, **more)


def test_a_conversation_may_begin_with_the_assistant(tmp_path):
    rows = BuiltRows(case_file("assistant-first/rows.jsonl", tmp_path), tiny(KIND)[0])
    assert rows.text() == due(rows)
    assert rows.learned() == f"Hello.{END}Hello.{END}"


@pytest.mark.parametrize("template", ["chat_template", "system"])
def test_strings_stay_strings_where_templates_take_them(template, tmp_path):
    model = with_template(KIND, f"list-content-repr/{template}.jinja", tmp_path)
    rows = BuiltRows(case_file("list-content-repr/rows.jsonl", tmp_path), model)
    for index in range(2):
        assert "'type'" not in rows.text(index)
        assert rows.learned(index) == f"Hello.{END}"
        assert "Say" in rows.text(index)
    assert "A tone." in rows.text(1)


def test_flags_of_messages_mask_them(tmp_path):
    rows = BuiltRows(case_file("message-loss-flag/rows.jsonl", tmp_path), tiny(KIND)[0])
    assert [rows.learned(index) for index in range(3)] == [f"A blue square.{END}"] * 3
    assert "A red circle." in rows.text()


@pytest.mark.parametrize("template, thought", [
    ("chat_template", "<think>\n\n</think>\n\n"), ("generation", ""),
])
def test_thinking_templates_learn_every_turn(template, thought, tmp_path):
    model = with_template(KIND, f"thinking-multiturn/{template}.jinja", tmp_path)
    rows = BuiltRows(case_file("thinking-multiturn/rows.jsonl", tmp_path), model)
    assert rows.text() == due(rows)
    end = END if thought else "<|im_end|>"  # a generation block marks the end of a turn
    assert rows.learned() == f"A red circle.{end}{thought}A blue square.{end}"


def test_tools_reach_the_chat_template(tmp_path):
    model = with_template(KIND, "tools-dropped/chat_template.jinja", tmp_path)
    for name in ("tools-dropped", "tool-call-null-content"):
        rows = BuiltRows(case_file(f"{name}/rows.jsonl", tmp_path), model)
        tools = json.loads(rows.dataset.path.read_text())["tools"]
        assert rows.text() == due(rows, tools=tools)
        assert rows.text().startswith("<|im_start|>system\nTOOLS [{")
        call = '<tool_call>{"name": "crop", "arguments": {"x": 1}}</tool_call>'
        assert rows.learned() == f"{call}{END}A red circle.{END}"


def test_tools_that_no_template_writes_are_refused(tmp_path):
    rows = BuiltRows(case_file("tools-dropped/rows.jsonl", tmp_path), tiny(KIND)[0])
    with pytest.raises(SampleError, match="tools"):
        rows.row()


@pytest.mark.parametrize("first", ["text", "messages"])
def test_each_row_has_one_token_that_begins_it(first, tmp_path):
    values = [
        {"text": "a red circle"},
        {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "A"}]},
    ]
    file = tmp_path / "rows.jsonl"
    ordered = values if first == "text" else values[::-1]
    file.write_text("".join(json.dumps(value) + "\n" for value in ordered))
    model = str(save(TARGETS["gemma3"], tmp_path / "model"))
    rows = BuiltRows(file, model, batch_size=2)
    together = rows.builder.build([[0, 1]]).microbatches[0]
    bos = rows.processor.tokenizer.convert_tokens_to_ids(SHAPES["gemma3"].bos)
    for index in range(2):
        shown = together["attention_mask"][index].bool()
        ids = together["input_ids"][index][shown]
        assert ids.tolist() == rows.row(index)["input_ids"][0].tolist()
        assert ids.tolist().count(bos) == 1 and ids[0] == bos


def test_an_item_token_in_a_text_is_refused(tmp_path):
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    asked = [{"type": "image"}, {"type": "text", "text": "what is <image_soft_token> here"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"images": ["a.png"], "messages": [
        {"role": "user", "content": asked}, {"role": "assistant", "content": "red"},
    ]}))
    with pytest.raises(SampleError, match="<image_soft_token>"):
        BuiltRows(file, tiny("gemma3")[0]).row()


def test_images_after_a_reply_keep_its_labels(tmp_path):
    for name, width in (("a.png", 170), ("b.png", 190)):
        Image.new("RGB", (width, 80), "red").save(tmp_path / name)
    user, image = {"role": "user"}, [{"type": "image"}]
    messages = [
        user | {"content": "say"}, {"role": "assistant", "content": "red"},
        user | {"content": image}, {"role": "assistant", "content": "green"},
        user | {"content": image}, {"role": "assistant", "content": "yellow"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages, "images": ["a.png", "b.png"]}))
    rows = BuiltRows(file, tiny("llava_onevision")[0])
    assert rows.learned() == f"red{END}green{END}yellow{END}"
    assert torch.equal(rows.row()["image_sizes"], torch.tensor([[80, 170], [80, 190]]))
