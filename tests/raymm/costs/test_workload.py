"""Loads of microbatches on the modules of a model, without weights."""

import json

import pytest
import torch

from raymm.actors.modules.merge import ReplaceTokens
from raymm.config.sections import load_config
from raymm.costs.load import Load
from raymm.costs.workload import (
    MOST_TOKENS,
    changed_tokens,
    check_tokens,
    encoder_tokens,
    full_microbatch,
    item_tokens,
    microbatch_workload,
    token_workload,
)
from raymm.data.sampling.batching import ItemTokens
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from tests.raymm.costs.test_step_flops import IMAGE, batch, described

PATCHES = 4  # of an image of the tests' encoder


@pytest.mark.parametrize("replaced", [False, True])
def test_a_microbatchs_load_has_its_rows_items_and_labels(replaced):
    merge = ReplaceTokens({"vision": IMAGE}) if replaced else None
    microbatch = batch([7, 3], [0, 0, 1])
    loads = microbatch_workload(described(merge=merge), microbatch).by_module
    assert (loads["vision"].samples, loads["vision"].tokens) == (3, PATCHES)
    longest = 7 + (0 if replaced else 2 * PATCHES)
    assert (loads["llm"].samples, loads["llm"].tokens) == (2, longest)
    assert loads["llm"].labels == 6 + 2  # a row's first token is no label


def test_unknown_encoders_get_assumed_tokens_and_a_note():
    encoder = ModalityModule(torch.nn.Linear(5, 48), hidden_size=48)
    model = MultimodalModule({"vision": encoder}, described().language_model)
    text = {name: value for name, value in batch([3], [0]).items() if name != "vision"}
    workload = microbatch_workload(model, text)
    assert workload.by_module["vision"] == Load(1, 256)
    assert workload.notes == (
        "tokens per item of encoder 'vision' are unknown; 256 assumed (set planning.tokens.vision)",
    )


def test_tokens_of_an_item_come_from_a_run_or_the_config():
    model, items = described(), batch([3], [0])["vision"]
    assert encoder_tokens(model, "vision", items) == (PATCHES, PATCHES)
    assert encoder_tokens(model, "vision", None) == (PATCHES, PATCHES)
    larger = {"pixel_values": torch.zeros(1, 3, 16, 16)}  # the position embedding does not fit
    assert encoder_tokens(model, "vision", larger) == (PATCHES, PATCHES)


def test_items_lengthen_a_row_only_if_they_are_put_before_it():
    assert item_tokens(described(), {}) == {"vision": ItemTokens(PATCHES, PATCHES)}
    replaced = described(merge=ReplaceTokens({"vision": IMAGE}))
    assert item_tokens(replaced, {}) == {"vision": ItemTokens(PATCHES, 0)}


def test_given_lengths_complete_each_other():
    workload = token_workload(described(), {}, samples=2, text=10)
    assert workload.by_module == {"vision": Load(2, PATCHES), "llm": Load(2, 10 + PATCHES)}
    assert "and all of the encoders' tokens" in workload.notes[0]
    given = token_workload(described(), {"llm": 9, "vision": 3})
    assert given.by_module == {"vision": Load(1, 3), "llm": Load(1, 9)} and given.notes == ()
    with pytest.raises(PlanError, match="tokens of 'llm' are not given; .*e.g. llm=4096"):
        token_workload(described(), {})


def test_changed_lengths_keep_samples_and_drop_labels():
    loads = microbatch_workload(described(), batch([7, 3], [0, 1]))
    changed = changed_tokens(loads, {"llm": 100})
    assert changed.by_module["llm"] == Load(2, 100)
    assert changed.by_module["vision"] == loads.by_module["vision"]


@pytest.mark.parametrize(("tokens", "expected"), [
    ({"audio": 1}, r"tokens name 'audio'; the model's modules are vision, llm"),
    ({"llm": 0}, "tokens of 'llm' is 0; it must be a whole number >= 1"),
    ({"llm": True}, "tokens of 'llm' is True"),
    ({"llm": MOST_TOKENS + 1}, f"at most {MOST_TOKENS}"),
])
def test_wrong_lengths_are_named(tokens, expected):
    with pytest.raises(PlanError, match=expected):
        check_tokens(described(), tokens)


def test_a_microbatch_without_a_modality_is_refused(make_config, inputs, tmp_path):
    found = full_microbatch(load_config(make_config()).data, ("vision",))
    assert len(found["vision"]["sample_index"]) >= 1
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    text_only = tmp_path / "text.jsonl"
    text_only.write_text("".join(json.dumps({**row, "images": []}) + "\n" for row in rows))
    config = load_config(make_config({"data.train": str(text_only)}))
    with pytest.raises(PlanError, match=r"no sample with \['vision'\]; nothing to run"):
        full_microbatch(config.data, ("vision",))
