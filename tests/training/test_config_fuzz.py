"""Slightly wrong configuration files: each runs, or fails with the file and a field.

Tests run ``raymm train`` up to the start of ranks.
"""

import copy
import datetime
import io
import re
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.cli.main import main
from raymm.config.sections import TrainConfig
from raymm.data import check_data
from raymm.training.result import Result
from raymm.training.trainer import Trainer
from tests.support.tiny_run import settings as tiny_settings

# Plausible wrong values of a field.
ODD = [
    None, True, False, 0, 1, 2, 3, -1, 4.0, 0.5, -0.5, 1e-4, 1e300, 2**31, 2**63, 10**30,
    float("inf"), float("-inf"), float("nan"), "", " ", "x", "null", "3", "a b", "\0", "a" * 5000,
    "a:b", "math:sqrt", "math:pi", "tests.support.run_processors:image", ":", "a:", "../..", "/",
    "/dev/null",
    "/proc/x", "~nobody-here", "${RAYMM_NOT_SET}", "${RAYMM_NOT_SET:-x}", "${", "prepend", "auto",
    [], [[]], [None], [1], [1, 2], ["a", "b"], [{}], {}, {"": 1}, {"a": 1}, {"a": {"b": []}},
    {1: 2}, {"path": 3}, datetime.date(2024, 1, 1), b"bytes", {"a", "b"},
]
# Sections and keys that the standard run does not have.
MORE = {
    "planning": {
        "ranks": 2, "tokens": {"llm": 8}, "degrees": ["tp"], "memory_gib": 1.0, "profile": "x",
        "device": "H100", "ranks_per_node": 2, "time_limit": 60.0,
    },
    "run": {
        "eval_every": 2, "timeout_s": 10.0, "precision": "bf16", "keep_checkpoints": 2,
        "steps_in_flight": 2,
    },
    "model": {"merge": {"vision": "<image>"}, "mask": "causal", "packing": True},
    "data": {
        "heldout": "x.jsonl", "batching": {"method": "balanced", "budgets": {"text": 64}},
        "seed": 1, "on_error": "skip", "shuffle": False, "worker_cpus": 0.1,
    },
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-8, "max_grad_norm": 1.0, "weight_decay": 0.1},
    "resources": {"custom": {"disk": 1.0}, "threads": 1, "gpus": 0},
    "parallel": {"schedule": "gpipe", "recompute": True, "style": "auto"},
}
WORDS = {
    name for model in TrainConfig.__subclasses__() or [TrainConfig]
    for name in re.findall(r"[a-z_]+", str(model.model_json_schema()))
}


def merged(base: dict, more: dict) -> dict:
    result = copy.deepcopy(base)
    for key, value in more.items():
        deeper = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if deeper else copy.deepcopy(value)
    return result


def places(values: Any, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values in a configuration."""
    found = [path] if path else []
    inner = values.items() if isinstance(values, dict) else ()
    inner = enumerate(values) if isinstance(values, list) else inner
    return found + [one for key, value in inner for one in places(value, (*path, key))]


def mutate(values: Any, draw: Any) -> None:
    """Change one value."""
    path = draw(st.sampled_from(places(values)))
    for key in path[:-1]:
        values = values[key]
    key, action = path[-1], draw(st.sampled_from(["set", "set", "set", "drop", "rename", "wrap"]))
    if action == "drop":
        del values[key]
    elif action == "rename" and isinstance(values, dict):
        value = values.pop(key)
        values[draw(st.sampled_from([f"{key}s", str(key)[:-1], str(key).upper(), 1, True]))] = value
    elif action == "wrap":
        values[key] = draw(st.sampled_from([[values[key]], {"path": values[key]}]))
    else:
        values[key] = copy.deepcopy(draw(st.sampled_from(ODD)))


@st.composite
def files(draw, base: dict) -> bytes:
    """Return the bytes of a configuration file."""
    values = copy.deepcopy(base)
    for section in draw(st.lists(st.sampled_from(sorted(MORE)), max_size=2, unique=True)):
        names = draw(st.lists(st.sampled_from(sorted(MORE[section])), min_size=1, max_size=2))
        values = merged(values, {section: {name: MORE[section][name] for name in names}})
    for _ in range(draw(st.integers(1, 3))):
        if places(values):
            mutate(values, draw)
    text = yaml.safe_dump(values).encode()
    damage = draw(st.sampled_from(["none"] * 8 + ["twice", "cut", "byte"]))
    at = draw(st.integers(0, len(text)))
    if damage == "twice":
        return text + b"\nrun: {steps: 3}\n"
    if damage == "cut":
        return text[:at]
    if damage == "byte":
        byte = draw(st.sampled_from([b"\xff", b"\0", b"{", b"&a ", b"*a", b"\t", b":"]))
        return text[:at] + byte + text[at:]
    return text


@pytest.fixture(scope="module")
def run_up_to_ranks(inputs, tmp_path_factory):
    """Return a function that runs ``raymm train`` on a file's bytes.

    The function returns the path, the exit code and the output.
    """
    folder = tmp_path_factory.mktemp("fuzz")
    file = folder / "config.yaml"

    def run(content: bytes) -> tuple[str, int, str]:
        file.write_bytes(content)
        output = io.StringIO()
        with redirect_stderr(output), redirect_stdout(output):
            code = main(["train", str(file)])
        return str(file), code, output.getvalue()

    def fit(trainer: Trainer) -> Result:
        check_data(trainer.data)
        return Result({}, [], None, trainer.path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", fit)
        patch.setenv("COLUMNS", "200")
        patch.chdir(folder)
        patch.delenv("RAYMM_NOT_SET", raising=False)
        yield run


@pytest.fixture(scope="module")
def base(inputs, tmp_path_factory) -> dict:
    return tiny_settings(inputs, tmp_path_factory.mktemp("run") / "run", 4)


def test_the_standard_run_is_accepted(base, run_up_to_ranks):
    _, code, text = run_up_to_ranks(yaml.safe_dump(base).encode())
    assert code == 0, text


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_config_runs_or_is_rejected_by_file_and_field(base, run_up_to_ranks, data):
    file, code, text = run_up_to_ranks(data.draw(files(base)))
    assert code in (0, 2), text
    assert "Traceback" not in text
    if code:
        assert file in text, text
        said = text.replace(file, "")
        assert "YAML" in said or WORDS & set(re.findall(r"[a-z_]+", said)), text
