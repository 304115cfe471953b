"""Sections: strict types, ranges, and the fields of a dataclass."""

from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from raymm.files.section import (
    MOST_COUNT,
    MOST_SEED,
    Count,
    ImportPath,
    NonNegative,
    Seconds,
    Section,
    Seed,
    Text,
    Tuple,
    section_of,
)


class Example(Section):
    count: Count = 1
    least: NonNegative = 0
    seconds: Seconds = 1.0
    seed: Seed = 0
    text: Text = "a"
    path: ImportPath = "a:b"
    names: Tuple[str] = ()


@pytest.mark.parametrize("values", [
    {"count": MOST_COUNT}, {"least": 0}, {"seed": MOST_SEED}, {"seconds": 1}, {"text": " \u00fc\n"},
    {"path": "a.b:c"}, {"names": ("x", "y")},
])
def test_values_in_range_are_kept(values):
    section = Example.model_validate(values)
    assert section.model_dump(include=values.keys()) == values


def test_lists_become_tuples():
    assert Example.model_validate({"names": ["x", "y"]}).names == ("x", "y")


@pytest.mark.parametrize("values", [
    {"count": 0}, {"count": True}, {"count": "3"}, {"count": 3.0}, {"count": MOST_COUNT + 1},
    {"least": -1}, {"seed": -1}, {"seed": MOST_SEED + 1}, {"seconds": 0.0},
    {"seconds": float("inf")}, {"seconds": float("nan")}, {"text": ""}, {"text": " \t"},
    {"text": "a\0"}, {"text": "\ud800"}, {"text": None}, {"path": "a"}, {"path": "a:"},
    {"names": "xy"}, {"names": [1]},
])
def test_other_values_are_refused_by_field(values):
    with pytest.raises(ValidationError, match=f"(?m)^{next(iter(values))}"):
        Example.model_validate(values)


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError, match="(?s)colour.*not permitted"):
        Example.model_validate({"colour": "red"})


@dataclass
class Options:
    size: Count
    names: list[str] = field(default_factory=list)


def test_a_section_of_a_dataclass_has_its_fields():
    section = section_of(Options)
    first, second = section.model_validate({"size": 2}), section.model_validate({"size": 2})
    assert first.model_dump() == {"size": 2, "names": []}
    assert first.names is not second.names
    with pytest.raises(ValidationError, match="(?s)size.*greater than 0"):
        section.model_validate({"size": 0})


def test_a_field_without_a_default_is_required():
    @dataclass
    class Sized:
        size: int
        names: list[str] = field(default_factory=list)

    section = section_of(Sized)
    assert section.model_validate({"size": 1}).model_dump() == {"size": 1, "names": []}
    with pytest.raises(ValidationError, match="size\n  Field required"):
        section.model_validate({})
