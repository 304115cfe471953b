"""Digests of functions change with their code and values, and with nothing else."""


import functools
import importlib
import sys

import numpy as np
import pytest
import torch

from raymm.errors import ModelError
from raymm.storage.code_digest import MOST_DEPTH, ValueDigest, code_digest, reached_code


def digest(value, strict=False):
    (made := ValueDigest(strict)).feed(value)
    return made.hashed.hexdigest()


def scaled(factor):
    return lambda value: factor * value


def test_a_function_of_the_same_code_and_values_is_equal():
    assert code_digest(scaled(2)) == code_digest(scaled(2)) != code_digest(scaled(3))
    assert code_digest(functools.partial(scaled, 2)) != code_digest(functools.partial(scaled, 3))
    assert code_digest(lambda x: x + 1) != code_digest(lambda x: x + 2)
    assert code_digest(lambda x, y=1: x) != code_digest(lambda x, y=2: x)


@pytest.mark.parametrize(("one", "other"), [
    (1, 1.0), (1, True), ("1", 1), (b"a", "a"), ([1], (1,)), (None, "None"),
    ([[1], 2], [1, [2]]), ([[1], 2], [[1, 2]]), ({"a": 1}, {"a": 2}),
    ("\ud800", "\ud801"), (0.0, -0.0), ({1, 2}, {1, 3}),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2, 3), torch.zeros(3, 2)),
    (np.array([1.0]), torch.tensor([1.0], dtype=torch.float64)),
])
def test_different_values_have_different_digests(one, other):
    assert digest(one) == digest(one) != digest(other)


def test_the_order_of_keys_and_elements_does_not_count():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"x", "y", "z"}) == digest({"z", "y", "x"})
    assert digest(torch.arange(6).view(2, 3).T) == digest(torch.arange(6).view(2, 3).T.contiguous())


def test_values_that_cannot_be_hashed_are_reported():
    made = ValueDigest(strict=True)
    made.feed(number for number in ())
    assert made.unseen == ["holds a builtins.generator, which cannot be pickled (TypeError)"]
    nested = []
    for _ in range(MOST_DEPTH + 1):
        nested = [nested]
    (made := ValueDigest()).feed(nested)
    assert made.unseen == [f"nests values more than {MOST_DEPTH} deep"]


def test_a_cycle_ends():
    cycle = []
    cycle.append(cycle)
    assert len(digest(cycle)) == 64


FILES = {
    "own_processor": """
import os
from own_helpers import scaled as used

SIZE = {size}
FROM_OUTSIDE = int(os.environ.get("OWN_SIZE", 1))

class Settings:
    mean = {mean}

def helper(x):
    return x + {added}

shift = lambda x, by={default}: x + by

def process(item):
    import own_late.inner
    return shift(helper(used(item) * SIZE - Settings.mean)) + own_late.inner.NUMBER
""",
    "own_helpers": "from own_deep import *\n\ndef scaled(x):\n    return deep(x)\n",
    "own_deep": "def deep(x):\n    return x * {deep}\n",
    "own_late/__init__": "",
    "own_late/inner": "from . import beside\nNUMBER = {late} + beside.NUMBER\n",
    "own_late/beside": "NUMBER = {beside}\n",
}
VALUES = ("size", "mean", "added", "default", "deep", "late", "beside")


@pytest.fixture
def key(tmp_path, monkeypatch):
    """Return a function that returns the key of a user's function in another run."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]

    def of(after="", code_version=None, **values):
        for name, text in FILES.items():
            file = tmp_path / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            for value in VALUES:
                text = text.replace("{" + value + "}", str(values.get(value, 1)))
            file.write_text(text + (after if name == "own_processor" else ""))
        forget()
        importlib.invalidate_caches()
        process = importlib.import_module("own_processor").process
        return reached_code([process], code_version, strict=True)

    yield of
    forget()


@pytest.mark.parametrize("value", VALUES)
def test_an_edit_of_anything_reached_changes_the_key(key, value) -> None:
    assert key() == key() == key(after="# a comment\n")
    assert key() != key(**{value: 2})


def test_variables_derived_from_the_environment_count(key, monkeypatch) -> None:
    before = key()
    monkeypatch.setenv("OWN_SIZE", "2")
    assert key() != before


@pytest.mark.parametrize(("after", "why"), [
    ("import importlib\nother = importlib.import_module('json')\n", "runs code by name"),
    ("exec('NUMBER = 1')\n", "runs code by name"),
    ("import threading\nLOCK = threading.Lock()\n", "own_processor.LOCK"),
])
def test_invisible_code_needs_a_version(key, after, why) -> None:
    with pytest.raises(ModelError, match=rf"cache.version is not set.*{why}"):
        key(after=after)
    assert key(after, "1") != key(after, "2")


def test_code_without_a_file_is_refused() -> None:
    space = {"__name__": "own_unwritten"}
    exec("def process(item):\n    return item", space)
    sys.modules["own_unwritten"] = type(sys)("own_unwritten")
    try:
        with pytest.raises(ModelError, match="has no source file"):
            reached_code([space["process"]], None, strict=True)
    finally:
        del sys.modules["own_unwritten"]


def test_arguments_of_a_partial_count() -> None:
    keys = [reached_code([functools.partial(max, n)], None, True)["values"] for n in (1, 2)]
    assert keys[0] != keys[1]


def test_libraries_count_by_version() -> None:
    from PIL import Image

    found = reached_code([Image.open], None, True)
    assert found["sources"] == {} and found["libraries"]["PIL"].startswith("pillow ")
