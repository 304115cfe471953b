"""Texts of rows that contain a model's own tokens literally, such as ``<|image_pad|>``.

Each row is rejected by a message that names the row and the token, or becomes a microbatch that the
model's forward accepts. None of them passes the checks and fails in the forward.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from examples.vlm.kinds import KINDS
from raymm.cli.generate import _prompts
from raymm.config.vlm import example_batch
from raymm.data import DataConfig, ModalityDataConfig, Sample, local_steps
from raymm.data.conversations.text import TextEncoder, load_tokenizer
from raymm.data.samples.media import Preference
from raymm.errors import SampleError
from raymm.evaluation.text_evaluation import last_answer, prompt_before
from raymm.model.vlm import PretrainedVlm, from_pretrained
from tests.support.tiny_folders import modalities, tiny


def turn(role, *content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


# By form, the texts of a row around a token; the row has one item, or none.
FORMS = {
    "user": lambda t, item: [turn("user", item, f"what is {t} here"), turn("assistant", "red")],
    "user, only it": lambda t, item: [turn("user", item, t), turn("assistant", "red")],
    "user, after the item": lambda t, item: [
        turn("user", "what", item, f"{t} here"), turn("assistant", "red")],
    "assistant": lambda t, item: [turn("user", item, "what"), turn("assistant", f"red {t}")],
    "system": lambda t, item: [
        turn("system", f"see {t}"), turn("user", item, "what"), turn("assistant", "red")],
    "tool result": lambda t, item: [
        turn("user", item, "what"), turn("assistant", "red"), turn("tool", f"is {t}"),
        turn("assistant", "red")],
    "later turn": lambda t, item: [
        turn("user", item, "what"), turn("assistant", "red"), turn("user", f"and {t}?"),
        turn("assistant", "red")],
    "no item": lambda t, item: [turn("user", f"what is {t} here"), turn("assistant", "red")],
}  # fmt: skip
TEXTS = {
    "text": lambda t: {"text": f"what is {t} here"},
    "prompt and completion": lambda t: {"prompt": f"what is {t} here", "completion": " red"},
    "completion": lambda t: {"prompt": "what is here", "completion": f" red {t}"},
}


def tokens(kind: str) -> list[str]:
    spec = KINDS[kind]
    every = dict.fromkeys((*spec.tokens, *spec.named.values()))
    # One of the many tokens of picture parts.
    return [t for t in every if not t.startswith("<row_") or t == "<row_1_col_1>"]


@functools.cache
def item_of(kind: str) -> tuple[str, object]:
    """Return the column and the value of a row's only item."""
    rows = Path(tiny(kind)[1]).read_text().splitlines()
    (column,) = (modality["column"] for modality in modalities(kind).values())
    return next(
        (column, items) for items in (json.loads(row).get(column) for row in rows)
        if items and len(items) == 1
    )


def config(kind: str, file: Path, has_items: bool = True) -> DataConfig:
    return DataConfig(
        train=str(file), processor=tiny(kind)[0], modalities=modalities(kind) if has_items else {},
        batch_size=1, microbatches=1, shuffle=False,
        media_folders=[str(Path(tiny(kind)[1]).parent)],
    )


@functools.cache
def model(kind: str) -> PretrainedVlm:
    folder, file = tiny(kind)
    whole = from_pretrained(folder, example_batch(config(kind, Path(file))))
    whole.materialize()
    return whole


def outcome(kind: str, folder: Path, row: dict, token: str) -> str:
    """Return ``"refused"``, ``"accepted"``, or the error of a row's outcome."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"id": "the-row", **row}) + "\n")
    try:
        (step,) = local_steps(config(kind, file, item_of(kind)[0] in row), steps=1)
    except SampleError as error:
        named = "the-row" in str(error) and token in str(error)
        return "refused" if named else f"refused without its token: {error}"
    (microbatch,) = step.microbatches
    whole = model(kind)
    whole.check(microbatch)
    try:
        with torch.no_grad():
            loss = float(whole.loss([dict(microbatch)]))
    except Exception as error:  # noqa: BLE001
        return f"accepted, and the forward fails: {error}"
    return "accepted" if math.isfinite(loss) else f"accepted, with a loss of {loss}"


@pytest.mark.cells(5)
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_passes_the_checks_and_fails_in_the_forward(kind, tmp_path):
    column, items = item_of(kind)
    (part,) = modalities(kind)
    parent = Path(tiny(kind)[1]).parent
    items = [str(parent / item) for item in items]
    outcomes = {}
    for token in tokens(kind):
        for name, form in FORMS.items():
            media = {} if name == "no item" else {column: items}
            row = {"messages": form(token, {"type": part}), **media}
            outcomes[token, name] = outcome(kind, tmp_path, row, token)
        for name, text in TEXTS.items():
            outcomes[token, name] = outcome(kind, tmp_path, text(token), token)
    wrong = {key: what for key, what in outcomes.items() if what not in ("refused", "accepted")}
    assert not wrong
    assert "refused" in outcomes.values()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_prompts_are_refused_before_a_model_starts(kind, tmp_path):
    data = config(kind, Path(tiny(kind)[1]))
    for token in ("<|image_pad|>", "<image_soft_token>", "<|AUDIO|>"):
        if token not in tokens(kind):
            continue
        with pytest.raises(SampleError, match="prompt 0") as error:
            _prompts(data, [f"what is {token}"], {})
        assert token in str(error.value)


MARK = "<image>"
ASKED, RED = [turn("user", "what")], [turn("assistant", "red")]
MARKED = {
    "text": Sample(0, "the-row", None, f"what is {MARK} here", {}),
    "user": Sample(0, "the-row", [turn("user", f"is {MARK}"), *RED], None, {}),
    "assistant": Sample(0, "the-row", [*ASKED, turn("assistant", MARK)], None, {}),
    "system": Sample(0, "the-row", [turn("system", MARK), *ASKED, *RED], None, {}),
    "tool result": Sample(0, "the-row", [*ASKED, *RED, turn("tool", MARK), *RED], None, {}),
    "prompt of a pair": Preference([turn("user", MARK)], RED, [turn("assistant", "blue")]),
    "chosen": Preference(ASKED, [turn("assistant", MARK)], RED),
    "rejected": Preference(ASKED, RED, [turn("assistant", MARK)]),
    "prompt of a pair of texts": Preference(f"what {MARK}", " red", " blue"),
    "rejected text": Preference("what", " red", f" {MARK}"),
}


@pytest.mark.parametrize("repeat", [None, 4])
@pytest.mark.parametrize("name", MARKED)
def test_a_model_by_parts_refuses_placeholders_without_items(name, repeat):
    tokenizer = load_tokenizer(tiny("llava_onevision")[0])
    modality = ModalityDataConfig(
        column="images", processor="package:function", placeholder=MARK, placeholder_tokens=repeat
    )
    encoder = TextEncoder(tokenizer, 256, {"vision": modality})
    row = MARKED[name]
    with pytest.raises(SampleError) as error:
        if isinstance(row, Preference):
            chosen = row.answers[0]
            texts = (None, chosen) if isinstance(chosen, str) else (chosen, None)
            encoder.encode_answers(Sample(0, "the-row", *texts, {}, preference=row))
        else:
            encoder.encode(row)
    assert "the-row" in str(error.value) and MARK in str(error.value)


WRITES_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
VIDEO_KINDS = {"qwen2_5_vl": "<|video_pad|>", "qwen3_vl": "<|video_pad|>"}


def folder_with(kind: str, out: Path, change) -> str:
    """Return a folder of a kind's processor with a changed chat template."""
    processor = AutoProcessor.from_pretrained(tiny(kind)[0])
    processor.chat_template = change(processor.chat_template)
    processor.tokenizer.chat_template = processor.chat_template
    processor.save_pretrained(out)
    return str(out)


def step_of(data: DataConfig, file: Path, row: dict):
    """Return the step of the one row of a data set, or the message that rejects the row."""
    file.write_text(json.dumps({"id": "the-row", **row}) + "\n")
    try:
        (step,) = local_steps(data, steps=1)
    except SampleError as error:
        return str(error)
    return step


def assert_refused_or_computed(step, token, whole):
    """Check that the batch check names row and token, or that the model's loss is finite."""
    if isinstance(step, str):
        assert "the-row" in step and token in step, step
        return
    with torch.no_grad():
        assert math.isfinite(whole.loss([dict(step.microbatches[0])]))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_item_tokens_in_definitions_of_tools(kind, tmp_path):
    column, items = item_of(kind)
    items = [str(Path(tiny(kind)[1]).parent / item) for item in items]
    (part,), whole = modalities(kind), model(kind)
    processor = folder_with(kind, tmp_path / "processor", lambda text: WRITES_TOOLS + text)
    data = config(kind, tmp_path / "rows.jsonl").model_copy(update={"processor": processor})
    for token in tokens(kind):
        tools = [{"type": "function", "function": {"name": "look", "description": f"at {token}"}}]
        row = {"messages": [turn("user", {"type": part}, "what"), turn("assistant", "red")],
               "tools": tools, column: items}  # fmt: skip
        step = step_of(data, tmp_path / "rows.jsonl", row)
        assert_refused_or_computed(step, token, whole)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_item_tokens_in_pairs_of_answers(kind, tmp_path):
    column, items = item_of(kind)
    items = [str(Path(tiny(kind)[1]).parent / item) for item in items]
    (part,), whole = modalities(kind), model(kind)
    data = config(kind, tmp_path / "rows.jsonl").model_copy(update={"preferences": True})
    for token in tokens(kind):
        for texts in ([token, "red", "blue"], ["what", token, "blue"], ["what", "red", token]):
            row = {
                "prompt": [turn("user", {"type": part}, texts[0])],
                "chosen": [turn("assistant", texts[1])], "rejected": [turn("assistant", texts[2])],
                column: items,
            }
            step = step_of(data, tmp_path / "rows.jsonl", row)
            assert_refused_or_computed(step, token, whole)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_reference_prompts_with_item_tokens_run(kind, tmp_path):
    """Check prompts that end before the reference, with the items of the row."""
    column, items = item_of(kind)
    items = [str(Path(tiny(kind)[1]).parent / item) for item in items]
    (part,), whole = modalities(kind), model(kind)
    data = config(kind, tmp_path / "rows.jsonl")
    for token in tokens(kind):
        messages = [turn("user", {"type": part}, "what"), turn("assistant", f"red {token} blue")]
        step = step_of(data, tmp_path / "rows.jsonl", {"messages": messages, column: items})
        if isinstance(step, str):
            assert "the-row" in step and token in step, step
            continue
        (microbatch,), (meta,) = step.microbatches, step.meta
        start, _ = last_answer(microbatch["labels"][0])
        prompt = prompt_before(start, {"text": microbatch}, meta)
        inputs = {name: each for name, each in prompt.parts["text"].items() if name != "labels"}
        with torch.no_grad():
            whole.materialize()(**inputs)


@pytest.mark.parametrize("kind", VIDEO_KINDS)
def test_item_tokens_in_rows_with_videos(kind, tmp_path):
    frames = []
    for number in range(4):
        frames.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", (56, 56), (40 * number, 0, 0)).save(frames[-1])
    image = KINDS[kind].item
    processor = folder_with(
        kind, tmp_path / "processor",
        lambda text: text.replace(image, image.replace("image", "video")),
    )
    videos = {"video": ModalityDataConfig(column="videos", frames=True, fps=2)}
    data = config(kind, tmp_path / "rows.jsonl").model_copy(update={
        "processor": processor, "modalities": videos, "media_folders": [str(tmp_path)],
    })  # fmt: skip
    plain = [turn("user", {"type": "video"}, "what"), turn("assistant", "red")]
    step = step_of(data, tmp_path / "rows.jsonl", {"messages": plain, "videos": [frames]})
    assert not isinstance(step, str), step
    whole = from_pretrained(tiny(kind)[0], dict(step.microbatches[0]))
    whole.materialize()
    outcomes = set()
    for token in tokens(kind):
        for name, form in FORMS.items():
            row = {"messages": form(token, {"type": "video"})}
            if name != "no item":
                row["videos"] = [frames]
            some = data if name != "no item" else data.model_copy(update={"modalities": {}})
            step = step_of(some, tmp_path / "rows.jsonl", row)
            outcomes.add(type(step))
            if isinstance(step, str):
                assert "the-row" in step and token in step, (name, token, step)
                continue
            whole.check(step.microbatches[0])
            with torch.no_grad():
                assert math.isfinite(whole.loss([dict(step.microbatches[0])])), (name, token)
    assert str in outcomes
