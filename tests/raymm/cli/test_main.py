"""``raymm train``: errors come before slow imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from raymm.cli.main import main
from tests.support import REPOSITORY

SLOW = ("torch", "transformers", "ray", "numba")
# Arguments of a command in a folder with good.yaml, list.yaml, tabs.yaml and rows.jsonl, and
# required parts of its error.
EARLY = {
    "no configuration": (["nothing.yaml"], ["'nothing.yaml'; there is no such file"]),
    "a list": (["list.yaml"], ["holds a list", "--data list.yaml"]),
    "rows": (["rows.jsonl"], ["--data rows.jsonl"]),
    "a folder": (["."], ["which is a folder", "--model ."]),
    "tabs": (["tabs.yaml"], ["tabs.yaml", "line 2", "indent with spaces, not tabs"]),
    "a broken line": (["broken.yaml"], ["line 2", "steps: 3: 4", "in quotes"]),
    "a misspelt key": (["good.yaml", "--set", "run.step=3"], ["did you mean run.steps?"]),
    "a key of another section": (["good.yaml", "--set", "steps=3"], ["did you mean run.steps?"]),
    "a misspelt section": (["good.yaml", "--set", "optimiser.lr=1"], ["did you mean optimizer?"]),
    "no data of a configuration": (["good.yaml"], ["data.train", "no.jsonl", "does not exist"]),
    "no model": (["--model", "/no/model", "--data", "rows.jsonl"], ["--model is '/no/model'"]),
    "no rows": (["--model", ".", "--data", "no.jsonl"], ["--data is 'no.jsonl'", "no such file"]),
    "model alone": (["--model", "."], ["--data DATA"]),
    "both": (["good.yaml", "--lr", "1"], ["--lr", "'good.yaml'", "optimizer.lr"]),
    "a rate of nothing": (["--model", ".", "--data", "rows.jsonl", "--lr", "0"], ["--lr is 0"]),
    "a rank that is misspelt": (
        ["--model", ".", "--data", "rows.jsonl", "--lora", "rnk=8"], ["'rnk=8'", "KEY=VALUE"],
    ),
    "a rank that is none": (
        ["--model", ".", "--data", "rows.jsonl", "--lora", "r=0"], ["--lora: r", "greater than 0"],
    ),
    "a rank that is no number": (
        ["--model", ".", "--data", "rows.jsonl", "--lora", "r=abc"], ["--lora: r", "'abc'"],
    ),
    "a misspelt column": (
        ["--model", ".", "--data", "typo.jsonl"], ["typo.jsonl:1", "it has ['mesages']"],
    ),
    "a page": (["--model", ".", "--data", "page.html"], ["page.html:1: the line is not JSON"]),
    "an empty file": (["--model", ".", "--data", "empty.jsonl"], ["empty.jsonl has no samples"]),
    "an empty folder": (["--model", ".", "--data", "tokens"], ["contains no data files; "]),
    "a split of a file": (
        ["--model", ".", "--data", "rows.jsonl", "--split", "test"], ["--split", "a file"],
    ),
    "a misspelt key next to rows": (
        ["--model", ".", "--data", "typo.jsonl", "--set", "run.stepps=3"],
        ["did you mean run.steps?"],
    ),
    "a misspelt section next to rows": (
        ["--model", ".", "--data", "typo.jsonl", "--set", "optimiser.lr=1"],
        ["did you mean optimizer?"],
    ),
    "a text for a number next to rows": (
        ["--model", ".", "--data", "typo.jsonl", "--set", "data.max_length=abc"],
        ["data.max_length", "'abc'"],
    ),
    "settings that contradict each other": (
        ["--model", ".", "--data", "typo.jsonl", "--set", "run.replace_stragglers=true"],
        ["replace_stragglers is true, but spares is 0"],
    ),
    "all rows held out": (
        ["--model", ".", "--data", "rows.jsonl", "--eval-fraction", "1"], ["--eval-fraction is 1"],
    ),
}
SCRIPT = """
import json, sys
from raymm.cli.main import _check_model, _parsed, main
codes = [main(["train", *arguments]) for arguments in json.loads(sys.argv[1])]
print(json.dumps([codes, [name for name in sys.argv[2].split() if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """Return exit codes, errors and slow modules of all commands, which run in one process."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "list.yaml").write_text("- run\n")
    (folder / "tabs.yaml").write_text("run:\n\tsteps: 3\n")
    (folder / "broken.yaml").write_text("run:\n  steps: 3: 4\n")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "typo.jsonl").write_text('{"mesages": []}\n')
    (folder / "page.html").write_text("<!DOCTYPE html>\n<html></html>\n")
    (folder / "empty.jsonl").touch()
    (folder / "config.json").write_text("{}")
    (folder / "tokens").mkdir()
    (folder / "good.yaml").write_text(yaml.safe_dump({
        "run": {"storage_path": "run", "steps": 1},
        "model": {"language_model": {"config": {"model_type": "llama"}}},
        "data": {"train": "no.jsonl", "tokenizer": "tokens", "batch_size": 1, "microbatches": 1},
    }))
    commands = json.dumps([arguments for arguments, _ in EARLY.values()])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, commands, " ".join(SLOW)], cwd=folder, text=True,
        env={"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "HOME": "/tmp"},
        capture_output=True, check=True, timeout=120,
    )
    codes, slow = json.loads(done.stdout.splitlines()[-1])
    texts = done.stderr.split("error:")[1:]
    return dict(zip(EARLY, zip(codes, texts, strict=True), strict=True)), slow


@pytest.mark.parametrize("name", EARLY)
def test_an_early_error_names_a_remedy(early, name):
    code, text = early[0][name]
    flat = " ".join(text.split())
    assert code == 2 and not [part for part in EARLY[name][1] if part not in flat], text


def test_errors_come_before_slow_imports(early):
    assert early[1] == []


def test_an_unknown_option_suggests_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--modle", "x", "--data", "y"])
    assert end.value.code == 2 and "did you mean --model?" in capsys.readouterr().err
