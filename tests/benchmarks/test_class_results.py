"""A run over classes continues after an interruption, and classes that it left out are listed."""

import json
from argparse import Namespace

import pytest
import transformers

from benchmarks import families
from benchmarks.families import named, run
from benchmarks.shared.family_check import EXACT, Outcome
from benchmarks.shared.family_classes import LANGUAGE, Family

EVERY = [
    Family(LANGUAGE, getattr(transformers, f"{name}Model"), getattr(transformers, f"{name}Config"))
    for name in ("Bert", "GPT2", "Llama")
]


def test_a_second_call_checks_the_classes_without_a_result(tmp_path, monkeypatch):
    checked, interruptions = [], ["LlamaModel"]

    def outcomes(chosen, options, of):
        for family in chosen:
            if family.name in interruptions:
                raise KeyboardInterrupt
            checked.append(family.name)
            yield family, Outcome(EXACT, ""), 0.5

    monkeypatch.setattr(families, "outcomes", outcomes)
    options = Namespace(results=tmp_path / "classes.json", only=None, json=False)
    with pytest.raises(KeyboardInterrupt):
        run(EVERY, EVERY, options)
    found = json.loads(options.results.read_text())
    assert found["counts"][LANGUAGE] | {"exact": 2, "not_tried": 1} == found["counts"][LANGUAGE]
    assert found["classes"]["LlamaModel"] == {"kind": LANGUAGE, "result": "not_tried"}
    interruptions.clear()
    run(EVERY, EVERY, options)
    assert checked == ["BertModel", "GPT2Model", "LlamaModel"]
    options.only = ["GPT2Model"]
    run(EVERY, named(EVERY, options.only), options)
    found = json.loads(options.results.read_text())
    assert {name: one["run"] for name, one in found["classes"].items()} == {
        "BertModel": 0, "GPT2Model": 2, "LlamaModel": 1,
    }  # fmt: skip
    assert all(one["command"] and one["machine"]["date"] for one in found["runs"])


def test_unknown_classes_are_rejected():
    with pytest.raises(SystemExit, match="unknown class: NoModel"):
        named(EVERY, ["NoModel"])
