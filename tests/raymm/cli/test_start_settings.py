"""Settings of a run that follow from its model and a few options."""

import argparse
import json

import pytest

from raymm.cli.start_settings import Options, apply_options, is_text_only, settings_without_rows
from raymm.config.sections import parse_config
from raymm.errors import ConfigError

ROWS = {"path": "rows.jsonl"}


def options(lora=None, lr=None, epochs=None, eval_fraction=None):
    return Options.of(
        argparse.Namespace(lora=lora, lr=lr, epochs=epochs, eval_fraction=eval_fraction)
    )


@pytest.mark.parametrize(("given", "expected"), [
    ({"lr": 0.0}, "--lr is 0; accepted: a number above 0"),
    ({"lr": float("inf")}, "--lr is inf"),
    ({"epochs": -1.0}, "--epochs is -1"),
    ({"eval_fraction": 1.0}, "--eval-fraction is 1; accepted: from 0 to below 1"),
    ({"lora": ["rank=8"]}, r"--lora has 'rank=8'; .*keys: r, alpha, dropout"),
    ({"lora": ["r"]}, "--lora has 'r'; did you mean r=...?"),
    ({"lora": ["dropout=2"]}, "--lora: dropout"),
])  # fmt: skip
def test_an_error_names_the_option_and_its_value(given, expected):
    with pytest.raises(ConfigError, match=expected):
        options(**given)


def test_alpha_follows_the_rank_unless_it_is_given():
    assert options(lora=[]).lora == {"r": 16, "alpha": 32.0}
    assert options(lora=["r=4"]).lora == {"r": 4, "alpha": 8.0}
    assert options(lora=["r=4", "alpha=5"]).lora == {"r": 4, "alpha": 5}


@pytest.fixture
def folders(tmp_path):
    """Return folders of a text model and of a model with images."""
    for name, config in (("text", {"model_type": "llama"}), ("whole", {"vision_config": {}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer").mkdir()
    return tmp_path


def test_a_processor_or_a_tower_makes_a_model_multimodal(folders):
    assert is_text_only(str(folders / "text")) and is_text_only(str(folders / "tokenizer"))
    assert not is_text_only(str(folders / "whole"))
    (folders / "text" / "processor_config.json").touch()
    assert not is_text_only(str(folders / "text"))


def test_text_models_have_a_tokenizer_and_others_a_processor(folders):
    text, whole = (
        settings_without_rows(str(folders / name), ROWS, folders / "run", options(lr=0.5))
        for name in ("text", "whole")
    )
    assert text["model"] == {"language_model": {"path": str(folders / "text"), "train": "full"}}
    assert text["data"] == {"train": "rows.jsonl", "tokenizer": str(folders / "text")}
    assert whole["model"] == {"path": str(folders / "whole"), "train": {"language_model": "full"}}
    assert whole["data"]["processor"] == str(folders / "whole")
    assert text["optimizer"] == whole["optimizer"] == {"lr": 0.5}


def test_adapters_freeze_the_projector(folders):
    values = settings_without_rows(
        str(folders / "whole"), ROWS, folders / "run", options(lora=["r=2"])
    )
    assert values["model"]["train"] == {
        "projector": "frozen", "language_model": {"lora": {"r": 2, "alpha": 4.0}},
    }


def test_epochs_and_held_out_rows_give_steps(folders):
    (folders / "rows.jsonl").write_text('{"text": "a"}\n' * 100)
    values = settings_without_rows(
        str(folders / "text"), {"path": str(folders / "rows.jsonl")}, folders / "run", options()
    )
    values["data"] |= {"batch_size": 5, "microbatches": 1}
    apply_options(values, options(epochs=2.0, eval_fraction=0.2))
    config = parse_config(values)
    assert config.run.steps == 2 * 80 // 5 and config.data.heldout_fraction == 0.2
    assert config.run.eval_every == 3  # ten evaluations
    apply_options(values, options(eval_fraction=0.0))
    assert parse_config(values).run.eval_every is None
