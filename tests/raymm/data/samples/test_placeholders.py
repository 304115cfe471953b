"""List-form messages, placeholder tokens, and samples whose placeholders do not match."""

import json

import pytest
import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.config.sections import parse_config
from raymm.data import Sample, StepBuilder, open_split
from raymm.data.conversations.text import TextEncoder
from raymm.data.samples.config import ModalityDataConfig
from raymm.data.samples.placeholders import check_parts
from raymm.errors import ConfigError, DataError, SampleError
from tests.support.sample_files import CHATML, build_tokenizer, write_image

X = -100
# Templates like those of Llava or SmolVLM: strings unchanged, and parts one by one.
PARTS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image> {% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)


def tokenizer_with_image(template=CHATML):
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    return tokenizer


def modality(**fields):
    return {"vision": ModalityDataConfig(column="images", processor="a:b", **fields)}


def sample(content, images=1, answer="a cat"):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Sample(0, "the-id", turns, None, {"vision": ("x.png",) * images} if images else {})


IMAGE, WHAT = {"type": "image"}, {"type": "text", "text": "what is this"}


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_parts_become_placeholders_in_order(template):
    tokenizer = tokenizer_with_image(template)
    encoder = TextEncoder(tokenizer, 100, modality(placeholder="<image>", placeholder_tokens=3))
    space = {"type": "text", "text": " "}
    parts = [IMAGE, WHAT] if template == PARTS else [IMAGE, space, WHAT]
    input_ids, labels = encoder.encode(sample(parts))
    words = tokenizer.convert_ids_to_tokens(input_ids)
    assert words == (
        ["<|im_start|>", "user", *["<image>"] * 3, *"what is this <|im_end|>".split(), "\n"]
        + ["<|im_start|>", "assistant", "a", "cat", "<|im_end|>", "\n"]
    )
    answer = tokenizer.convert_tokens_to_ids(["a", "cat", "<|im_end|>", "\n"])
    assert labels == [X] * (len(words) - 4) + answer
    # The same as a string.
    assert encoder.encode(sample("<image> what is this")) == (input_ids, labels)


def test_without_placeholders_parts_leave_the_text():
    encoder = TextEncoder(tokenizer_with_image(), 100, modality())
    assert encoder.encode(sample([IMAGE, WHAT])) == encoder.encode(sample("what is this"))
    # datasets gives every part all keys.
    full = [{"type": "image", "text": None}, WHAT]
    assert encoder.encode(sample(full)) == encoder.encode(sample([IMAGE, WHAT]))


def test_placeholders_are_never_labels():
    tokenizer = tokenizer_with_image()
    encoder = TextEncoder(tokenizer, 100, modality(placeholder="<image>", placeholder_tokens=2))
    text = Sample(0, "t", None, "a cat <image> says yes", {"vision": ("x",)})
    input_ids, labels = encoder.encode(text)
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert input_ids[2:4] == [image] * 2 and labels[2:4] == [X] * 2
    assert labels[1] == input_ids[1] and labels[4:] == input_ids[4:]
    _, labels = encoder.encode(sample("what", answer="a <image> cat"))
    assert image not in labels


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("what <image>", 0, "1 placeholders '<image>' for 0 vision items"),
        ("what", 1, "0 placeholders '<image>' for 1 vision items"),
        ("<image> what <image>", 1, "2 placeholders '<image>' for 1 vision items"),
        ([IMAGE, IMAGE, WHAT], 1, "2 vision parts, but the row has 1 vision item;"),
        ([IMAGE, WHAT], 0, "1 vision part, but the row has 0 vision items; .* lack the column"),
        ([{"type": "clip"}, WHAT], 1, r"messages\[0\].*type 'clip'; accepted: \['image', "),
        ([{"type": "image", "path": "x"}, WHAT], 1, "'path'; media belong in a column"),
    ],
)
def test_mismatches_name_the_sample_and_both_numbers(content, images, message):
    encoder = TextEncoder(
        tokenizer_with_image(), 100, modality(placeholder="<image>", placeholder_tokens=3)
    )
    with pytest.raises(SampleError, match=f"'the-id', column 'messages': .*{message}"):
        encoder.encode(sample(content, images))


def test_parts_without_any_column_of_items_are_named():
    with pytest.raises(SampleError, match="has type 'image', but the rows have no column of"):
        check_parts(sample([IMAGE, WHAT], 0), {})


def test_counts_without_repetition_are_left_to_the_merge_policy():
    encoder = TextEncoder(tokenizer_with_image(), 100, modality(placeholder="<image>"))
    assert encoder.encode(sample("<image> <image> what", 1))
    for content, images in (("what", 1), ("what <image>", 0)):
        with pytest.raises(SampleError, match="or both 0"):
            encoder.encode(sample(content, images))


def test_truncation_does_not_cut_placeholders():
    modalities = modality(placeholder="<image>", placeholder_tokens=4)
    text = Sample(0, "t", None, "a cat <image>", {"vision": ("x",)})
    assert TextEncoder(tokenizer_with_image(), 6, modalities).encode(text)
    with pytest.raises(SampleError, match=r"max_length \(5\) cuts off some of its 4 vision tokens"):
        TextEncoder(tokenizer_with_image(), 5, modalities).encode(text)


def test_part_types_by_modality_column_or_setting():
    sound = {"audio": ModalityDataConfig(column="clips", processor="a:b", part="noise")}
    encoder = TextEncoder(tokenizer_with_image(), 100, sound)
    turns = [{"role": "user", "content": [{"type": "noise"}, WHAT]},
             {"role": "assistant", "content": "yes"}]
    assert encoder.encode(Sample(0, "s", turns, None, {"audio": ("a.wav",)}))
    with pytest.raises(SampleError, match="type 'noise'; accepted: "):
        TextEncoder(tokenizer_with_image(), 100, modality()).encode(
            Sample(0, "s", turns, None, {})
        )


def test_a_placeholder_is_one_known_token():
    for fields, message in (
        ({"placeholder": "<picture>"}, "placeholder is '<picture>'"),
        ({"placeholder": "a cat"}, "which is 2 tokens"),
        ({"placeholder_tokens": 3}, "no placeholder to repeat"),
    ):
        with pytest.raises(DataError, match=f"data.modalities.vision.*{message}"):
            TextEncoder(build_tokenizer(), 100, modality(**fields))


def test_a_mismatch_is_skipped_and_counted(make_config, tmp_path):
    tokenizer_with_image().save_pretrained(tmp_path / "tokenizer")
    write_image(tmp_path / "i.png", 0)
    modalities = {
        "vision": {"column": "images", "processor": "tests.support.media_processors:image",
                   "placeholder": "<image>", "placeholder_tokens": 2}
    }
    config = make_config(
        tokenizer=str(tmp_path / "tokenizer"), modalities=modalities, on_error="skip"
    )
    rows = [{"id": "good", "text": "a cat <image>", "images": "i.png"},
            {"id": "none", "text": "a cat <image>"}, {"id": "empty", "text": ""},
            {"id": "twice", "text": "a cat <image>", "images": ["i.png"] * 2}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = StepBuilder(config, open_split(config, "train")).build(range(4))
    assert [meta.sample_ids for meta in built.meta] == [("good",)]
    assert {one.id: one.column for one in built.skipped} == dict.fromkeys(
        ("none", "empty", "twice"), "text"
    )
    reason = {one.id: one.reason for one in built.skipped}
    assert "the text is empty" in reason["empty"]
    assert "1 placeholders '<image>' for 2 vision items" in reason["twice"]
    strict = make_config(tokenizer=config.tokenizer, modalities=modalities)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SampleError, match=r"'none' \(.*train.jsonl:2\), column 'text': "):
        StepBuilder(strict, open_split(strict, "train")).build([1])


def test_merge_and_data_have_the_same_placeholder():
    values = {
        "run": {"storage_path": "x", "steps": 1},
        "model": {"language_model": {"path": "x"}, "merge": {"vision": "<image>"},
                  "encoders": {"vision": {"path": "x"}}},
        "data": {"train": "t", "tokenizer": "x", "batch_size": 1, "microbatches": 1,
                 "modalities": {"vision": {"column": "images", "processor": "a:b"}}},
    }
    assert parse_config(values).data.modalities["vision"].placeholder == "<image>"
    values["data"]["modalities"]["vision"]["placeholder"] = "<picture>"
    with pytest.raises(ConfigError, match="'<picture>'.*model.merge.vision is '<image>'"):
        parse_config(values)


def test_a_template_that_supports_parts_gets_them():
    marked = PARTS.replace("<image> ", "red <image> ")
    for template, expected in ((marked, True), (marked.replace("<image>", "dog"), False)):
        tokenizer = tokenizer_with_image(template)
        encoder = TextEncoder(tokenizer, 100, modality(placeholder="<image>", placeholder_tokens=2))
        words = tokenizer.convert_ids_to_tokens(encoder.encode(sample([IMAGE, WHAT]))[0])
        written = ["red", "<image>", "<image>"] if expected else ["<image>", "<image>", "what"]
        assert words[2:5] == written


def test_data_placeholders_fit_the_merge_policy(make_config, tmp_path):
    tokenizer = tokenizer_with_image()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    modalities = {
        "vision": {"column": "images", "processor": "tests.support.media_processors:image",
                   "placeholder": "<image>", "placeholder_tokens": 2}
    }
    config = make_config(tokenizer=str(tmp_path / "tokenizer"), modalities=modalities)
    rows = [{"text": "a cat <image> says yes", "images": "i.png"},
            {"text": "<image> a dog <image> it is", "images": ["i.png", "j.png"]}]
    for seed, name in enumerate(("i.png", "j.png")):
        write_image(tmp_path / name, seed)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = StepBuilder(config, open_split(config, "train")).build([0, 1])
    policy = ReplaceTokens({"vision": tokenizer.convert_tokens_to_ids("<image>")})
    for microbatch, meta in zip(built.microbatches, built.meta, strict=True):
        items = len(meta.items["vision"])
        features = torch.arange(items * 2.0).reshape(items, 2, 1) + 100
        inputs = {**microbatch, "inputs_embeds": microbatch["input_ids"][..., None].float(),
                  "sample_index": {"vision": microbatch["vision"]["sample_index"]}}
        merged = policy({"vision": features}, inputs)
        places = microbatch["input_ids"] == policy.token_ids["vision"]
        placed = merged["inputs_embeds"][..., 0][places]
        assert placed.tolist() == features.flatten().tolist()
        # The loss's denominator is counted before the merge.
        assert int((merged["labels"][:, 1:] != X).sum()) == meta.label_tokens > 0


def test_errors_name_the_sources_own_column(make_config, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"caption": ""}\n')
    config = make_config(
        train={"path": str(tmp_path / "other.jsonl"),
               "columns": {"text": "caption", "vision": None, "audio": None}}
    )
    with pytest.raises(SampleError, match=r"other.jsonl:1', column 'caption': .*text is empty"):
        StepBuilder(config, open_split(config, "train")).build([0])
