"""Rows with two answers, in TRL's formats: each becomes two rows, with labels on the answers."""

import json

import pytest
from trl.data_utils import maybe_extract_prompt

from raymm.data import DataConfig, open_split
from raymm.data.loading.builder import StepBuilder
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.rows import RowRules, parse_row
from raymm.errors import SampleError
from tests.support.sample_files import build_tokenizer

USER, CAT, DOG = (
    {"role": role, "content": content}
    for role, content in (("user", "what is it"), ("assistant", "a cat"), ("assistant", "dog says"))
)
ROWS = {
    "text": {"prompt": "what is", "chosen": " a cat", "rejected": " dog"},
    "messages": {"prompt": [USER], "chosen": [CAT], "rejected": [DOG]},
    "a conversation": {"prompt": [USER, DOG, USER], "chosen": [CAT], "rejected": [DOG]},
    "no prompt": {"chosen": [USER, DOG, USER, CAT], "rejected": [USER, DOG, USER, DOG]},
}


def steps_of(tmp_path, rows, **options):
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(**{
        "train": str(tmp_path / "rows.jsonl"), "tokenizer": str(tmp_path / "tokenizer"),
        "batch_size": len(rows), "microbatches": 1, "preferences": True, **options,
    })
    return StepBuilder(config, open_split(config, "train")).build(range(len(rows)))


@pytest.mark.parametrize("kind", ROWS)
def test_tokens_and_labels_are_trls(tmp_path, kind):
    """Ignore text after an answer's end of turn, which has no label here."""
    tokenizer = build_tokenizer()
    row = {**maybe_extract_prompt(ROWS[kind]), "id": "a"}
    step = steps_of(tmp_path, [{**ROWS[kind], "id": "a"}])
    (microbatch,), (meta,) = step.microbatches, step.meta
    assert meta.sample_ids == ("a:chosen", "a:rejected") and meta.num_samples == 2
    for number, name in enumerate(("chosen", "rejected")):
        if isinstance(row["prompt"], str):
            prompt = tokenizer(row["prompt"])["input_ids"]
            whole = tokenizer(row["prompt"] + row[name] + (tokenizer.eos_token or ""))["input_ids"]
        else:
            def render(messages, **more):
                return tokenizer.apply_chat_template(messages, return_dict=False, **more)

            prompt = render(row["prompt"], add_generation_prompt=True)
            whole = render(row["prompt"] + row[name])
        ids = microbatch["input_ids"][number][: meta.lengths[number]].tolist()
        labels = microbatch["labels"][number][: meta.lengths[number]].tolist()
        answer = labels[len(prompt) :]
        assert ids == whole and set(labels[: len(prompt)]) == {-100}
        kept = [label for label in answer if label != -100]
        assert kept and kept == whole[len(prompt) :][: len(kept)]
        assert tokenizer.decode(whole[len(prompt) + len(kept) :]).strip() == ""


def test_pairs_stay_together(tmp_path):
    """Check steps that are cut into microbatches, and media."""
    rows = [{**ROWS["messages"], "id": str(number)} for number in range(4)]
    step = steps_of(tmp_path, rows, microbatches=2)
    assert [meta.sample_ids for meta in step.meta] == [
        ("0:chosen", "0:rejected", "1:chosen", "1:rejected"),
        ("2:chosen", "2:rejected", "3:chosen", "3:rejected"),
    ]


@pytest.mark.parametrize(("row", "says"), [
    ({"prompt": "what", "chosen": "a", "rejected": [CAT]}, "'prompt' is a text"),
    ({"chosen": "a", "rejected": "cat"}, "'chosen' is a text"),
    ({"chosen": [USER, CAT], "rejected": [USER, CAT]}, "must begin with the same messages"),
    ({"chosen": [CAT], "rejected": [DOG]}, "must begin with the same messages"),
    ({"chosen": [CAT]}, "'chosen' and 'rejected'"),
])  # fmt: skip
def test_invalid_rows(tmp_path, row, says):
    with pytest.raises(SampleError) as error:
        parse_row(row, RowRules(), MediaFolders(tmp_path))
    assert says in error.value.reason


@pytest.mark.parametrize(("row", "options", "says"), [
    ({"text": "what is it"}, {}, "accepted: rows with prompt, chosen and rejected"),
    (ROWS["text"], {"preferences": False}, "accepted: rows with messages or text"),
    (ROWS["messages"], {"max_length": 7}, "no label token|no token of an answer"),
])  # fmt: skip
def test_invalid_samples(tmp_path, row, options, says):
    with pytest.raises(SampleError, match=says):
        steps_of(tmp_path, [row], **options)


def test_preferences_require_random_batching():
    with pytest.raises(ValueError, match="batching 'random'"):
        DataConfig(
            train="a", tokenizer="b", batch_size=1, microbatches=1, preferences=True,
            batching="balanced",
        )
