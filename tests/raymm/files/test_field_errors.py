"""Errors about fields name what is accepted, without terms of pydantic."""

from __future__ import annotations

from copy import deepcopy

import pytest

from raymm.config.sections import parse_config
from raymm.errors import ConfigError
from raymm.files.config_file import apply_override

VALID = {
    "run": {"storage_path": "run", "steps": 1}, "model": {"language_model": {"path": "model"}},
    "data": {"train": "rows", "tokenizer": "folder", "batch_size": 1, "microbatches": 1},
}


@pytest.mark.parametrize(("override", "line"), [
    ("run.steps=abc", "run.steps: accepted: a whole number (got 'abc')"),
    ("run.steps=0", "run.steps: accepted: a number greater than 0 (got 0)"),
    ("run.seed=-1", "run.seed: accepted: a number from 0 (got -1)"),
    ("run.log_samples=maybe", "run.log_samples: accepted: true or false (got 'maybe')"),
    ("run.callbacks=[1]", "run.callbacks.0: accepted: a text or a section of keys (got 1)"),
    ("run.device=tpu", "run.device: accepted: 'auto', 'cpu' or 'cuda' (got 'tpu')"),
    ("model.new_tokens=abc", "model.new_tokens: accepted: 'from_processor' or a list (got 'abc')"),
    ("parallel.language_model.dp=x",
     "parallel.language_model.dp: accepted: a whole number or a section of keys (got 'x')"),
    ("parallel.language_model.dp={mn: 1, max: 2}",
     "parallel.language_model.dp.mn: unknown key; did you mean parallel.language_model.dp.min? "
     "accepted: max, min"),
    ("data.modalities.video={frame: true}",
     "data.modalities.video.frame: unknown key; did you mean data.modalities.video.frames? "
     "accepted: column, fps, frames, input, part, placeholder, placeholder_tokens, processor, "
     "video"),
])
def test_a_wrong_value_is_described_in_terms_of_the_file(override, line):
    values = deepcopy(VALID)
    apply_override(values, override)
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    assert line in str(caught.value).splitlines()
