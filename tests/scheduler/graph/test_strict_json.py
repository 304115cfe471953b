"""Files that others wrote or edited: every mistake is an error that names the field."""

from __future__ import annotations

import json

import pytest

from raymm.scheduler.costs.interference import Colocation, Interference
from raymm.scheduler.costs.layer_costs import ProfileError
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.costs.surface import (
    ScalingSurface,
    surfaces_from_json,
    surfaces_to_json,
)
from raymm.scheduler.graph.strict_json import MultiplexError, json_value, read_file
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.plan.plan import Plan, PlanError

SURFACE = ScalingSurface("a", (1, 2), (4,), 4, ((2.0,), (1.0,)), (4, 2), (0.5,))
MAPPING = Mapping(2, 4, (MultiplexStage((Placement("a", (0, 1), 4),), 1.0),), 1.0)
# Values of which only the names are shown.
HUGE, LONG, DEEP = "<400 digits>", "<5000 digits>", "<100000 lists>"
LONG_TEXTS = {HUGE: "1" + "0" * 400, LONG: "1" + "0" * 5000, DEEP: "[" * 100_000 + "]" * 100_000}


def edited(source: str, name: str, value: str) -> str:
    """A file in which the first field of that name has another value, as text."""
    before, after = source.split(f'"{name}":', 1)
    _, end = json.JSONDecoder().raw_decode(after.lstrip())
    for short, meant in LONG_TEXTS.items():
        value = value.replace(short, meant)
    return f'{before}"{name}": {value}{after.lstrip()[end:]}'


@pytest.mark.parametrize(("name", "value", "words"), [
    ("bound", HUGE, "bound is 1000"),
    ("seconds", HUGE, r"stages\[0\].seconds is 1000"),
    ("seconds", LONG, "mapping file is not JSON"),
    ("gpus", str(10**8), "gpus is 100000000; it must be a whole number from 1 to 65536"),
    ("gpus", str(10**30), "gpus is 1000"),
    ("steps", str(10**9), "steps is 1000000000; it must be a whole number from 1 to"),
    ("slices", str(10**30), "slices is 1000"),
    ("bound", "5", "bound is 5, above the 1.0"),
    ("gpus", '2, "gpus": 4', "field 'gpus' more than once"),
    ("stages", DEEP, "nested deeper than 50"),
    ("method", "[" * 60 + "]" * 60, "nested deeper than 50"),
])
def test_mappings(name: str, value: str, words: str) -> None:
    # The first "seconds" of the file is a stage's, the first "gpus" the mapping's.
    assert Mapping.from_json(edited(MAPPING.to_json(), "method", '"x"')).method == "x"
    with pytest.raises(MultiplexError, match=words):
        Mapping.from_json(edited(MAPPING.to_json(), name, value))


@pytest.mark.parametrize(("name", "value", "words"), [
    ("memory_bytes", f"[{10**30}, 1]", r"memory_bytes\[0\] is 1000"),
    ("degrees", f"[1, {10**30}]", r"degrees\[1\] is 1000"),
    ("seconds", f"[[{HUGE}], [1]]", r"seconds\[0\]\[0\] is 1000"),
    ("steps", str(10**9), "steps is 1000000000"),
    ("name", '"a", "name": "b"', "field 'name' more than once"),
])
def test_surfaces(name: str, value: str, words: str) -> None:
    with pytest.raises(MultiplexError, match=words):
        surfaces_from_json(edited(surfaces_to_json([SURFACE]), name, value))


@pytest.mark.parametrize(("value", "words"), [
    (HUGE, "constant is 1000"), ("1e308", "constant is 1e\\+308; .*at most 1e\\+09"),
    ('9, "constant": 0', "field 'constant' more than once"),
])  # fmt: skip
def test_interference(value: str, words: str) -> None:
    with pytest.raises(MultiplexError, match=words):
        Interference.from_json(edited(Interference().to_json(), "constant", value))


def test_encodings_and_files_of_other_planners(tmp_path) -> None:
    file = tmp_path / "mapping.json"
    file.write_bytes(b"\xff\xfe" + MAPPING.to_json().encode("utf-16-le"))
    with pytest.raises(MultiplexError, match="mapping.json is not UTF-8"):
        read_file(file)
    file.write_bytes(b"\xef\xbb\xbf" + MAPPING.to_json().encode())
    assert Mapping.from_json(read_file(file)) == MAPPING
    with pytest.raises(MultiplexError, match="nowhere.json cannot be read: No such file"):
        read_file(tmp_path / "nowhere.json")
    assert json_value("[" * 50 + "]" * 50, "it")
    for source, words in ((DEEP, "nested deeper"), (LONG, "not JSON"), ("[1]", r"plan is \[1\]")):
        with pytest.raises(PlanError, match=words):
            Plan.from_json(LONG_TEXTS.get(source, source))
    with pytest.raises(ProfileError, match="nested deeper"):
        ProfileTable.from_json(LONG_TEXTS[DEEP])


@pytest.mark.parametrize(("make", "words"), [
    (lambda: MappingProblem((SURFACE,), edges=(("a",),)), r"edges\[0\] is \('a',\); .* a pair"),
    (lambda: MappingProblem((SURFACE,), edges=("aa",)), r"edges\[0\] is 'aa'; .* a pair"),
    (lambda: MappingProblem((SURFACE,), edges=3), "edges is 3"),
    (lambda: MappingProblem("a"), "surfaces is 'a'"),
    (lambda: MappingProblem(("a",)), r"surfaces\[0\] is 'a'"),
    (lambda: MappingProblem((SURFACE,), interference="blind"), "interference is 'blind'"),
    (lambda: MappingProblem((SURFACE,), gpus=10**30), "gpus is 1000"),
    (lambda: Colocation(1, (1,), 1), r"colocation.bandwidths\[0\] is 1; it must be a list"),
    (lambda: Colocation(1, 1, 1), "colocation.bandwidths is 1; it must be a list"),
    (lambda: Interference(10**5000), "a number of thousands of digits"),
    (lambda: solve(MappingProblem((SURFACE,)), deadline_seconds="1"), "deadline_seconds is '1'"),
    (lambda: solve(MappingProblem((SURFACE,)), deadline_seconds=float("nan")), "is nan"),
    (lambda: solve("a"), "problem is 'a'; it must be a MappingProblem"),
])  # fmt: skip
def test_arguments(make, words: str) -> None:
    with pytest.raises(MultiplexError, match=words):
        make()
