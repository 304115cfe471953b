"""Configuration files: valid YAML that a configuration should not contain."""

from pathlib import Path

import pytest

from raymm.cli.trace import read_events
from raymm.errors import ConfigError
from raymm.files.config_file import apply_override, parse_yaml, read_sections

BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
REFUSED = {
    "a key twice": ("run: {steps: 1}\nmodel: {}\nrun: {steps: 2}\n", "'run' occurs twice"),
    "a key twice below": ("run:\n  steps: 1\n  steps: 2\n", "'steps' occurs twice"),
    "a key twice in a list": ("a: [{b: 1, b: 2}]", "'b' occurs twice"),
    "a key twice in a merged section": ("a: &x {b: 1, b: 2}\nc: {<<: *x}", "'b' occurs twice"),
    "two merges": ("a: &x {b: 1}\nc: {<<: *x, <<: *x}", "'<<' occurs twice"),
    "an alias of what is around it": ("a: &x [*x]", "contains an alias of itself"),
    "aliases of aliases": (BOMB, "more than 100000 values"),
    "deep": ("a: " + "[" * 60 + "]" * 60, "deeper than 50"),
    "very deep": ("[" * 5000, "deeper than 50"),
    "an octal number, or none": ("a: 010", "'010' is read differently"),
    "minutes, or a text": ("a: 1:30", "'1:30' is read differently"),
    "no such day": ("a: 2024-13-45", "month"),
    "an object": ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "two documents": ("a: 1\n---\nb: 2\n", "single document"),
    "no YAML": ("run: [1", "expected ',' or ']'"),
    "a digit too many": ("a: " + "9" * 5000, "digit"),
    "a tag that is wrong": ("a: !!map x", "expected a mapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_yaml_that_is_refused(name):
    text, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    assert "run.yaml" in str(caught.value) and reason in str(caught.value)


def test_valid_yaml():
    assert parse_yaml("lr: 1e-4\nbig: 1_000\nx: [1E3, -2e+2, 0x10, .5, 0]", "f") == {
        "lr": 1e-4, "big": 1000, "x": [1e3, -2e2, 16, 0.5, 0],
    }
    merged = parse_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\ne: {<<: [*x, {f: 1}]}", "f")
    assert merged["d"] == {"b": 3, "c": 2} and merged["e"] == {"b": 1, "c": 2, "f": 1}


@pytest.mark.parametrize(("content", "reason"), [
    ("run: {a: caf\u00e9}".encode("latin-1"), "not UTF-8"),
    (b"", "is empty"),
    (b"# nothing\n", "is empty"),
    (b"- run\n", "holds a list"),
    (b"\0", "not allowed"),
    (b"x" * (2**22 + 1), "more than 4,194,304 bytes"),
])
def test_invalid_files(tmp_path, content, reason):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_sections(file)
    assert str(file) in str(caught.value) and reason in str(caught.value)


def test_paths_that_are_not_files(tmp_path):
    for path, reason in (
        (tmp_path, "a folder"), (tmp_path / "x", "no such file"), ("a\0b", "no such file"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_sections(path)


def test_overrides():
    shared = {"lr": 1}
    data = {"a": shared, "b": shared, "empty": None}
    apply_override(data, "a.lr=1e-3")
    apply_override(data, "empty.x={y: [1]}")
    apply_override(data, "new.deep.key=text")
    assert data == {
        "a": {"lr": 1e-3}, "b": {"lr": 1}, "empty": {"x": {"y": [1]}},
        "new": {"deep": {"key": "text"}},
    }
    for wrong in (
        "", "=", "=1", "a", "a.=1", ".a=1", "a..b=1", "a.lr.x=1", "a.lr=[", "a={x: 1, x: 2}",
    ):
        with pytest.raises(ConfigError, match="--set"):
            apply_override(data, wrong)


@pytest.mark.parametrize("text", [
    "", "[", "3", "null", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [3]}',
    '{"traceEvents": [{"ph": "X"}]}', "[" * 100_000,
    '{"traceEvents": [{"ph": "X", "name": "a", "pid": 0, "ts": NaN}]}',
    '{"traceEvents": [{"ph": "X", "name": "a", "pid": true}]}',
])
def test_invalid_timelines(tmp_path, text):
    file = Path(tmp_path / "trace.json")
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_events(file)
    assert str(file) in str(caught.value)
