"""Files written or edited by others: every mistake is an error that names the field."""

from __future__ import annotations

import json

import pytest

from raymm.errors import PlanError
from raymm.scheduler.costs.interference import Colocation, Interference
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.costs.surface import (
    ScalingSurface,
    surfaces_from_json,
    surfaces_to_json,
)
from raymm.scheduler.graph.strict_json import json_value, read_file
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.multiplex.problem import MappingProblem
from raymm.scheduler.multiplex.solver.solve import solve
from raymm.scheduler.plan.plan import Plan
from tests.support.random_mappings import clip, mapping_of

SURFACE = ScalingSurface("a", (1, 2), (4,), 4, ((2.0,), (1.0,)), (4, 2), (0.5,))
PLAN = mapped_plan(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}))
# Values that are displayed in a short form.
HUGE, LONG, DEEP = "<400 digits>", "<5000 digits>", "<100000 lists>"
LONG_TEXTS = {HUGE: "1" + "0" * 400, LONG: "1" + "0" * 5000, DEEP: "[" * 100_000 + "]" * 100_000}


def edited(source: str, name: str, value: str) -> str:
    """Return a file with another value for the first field of that name, as text."""
    before, after = source.split(f'"{name}":', 1)
    _, end = json.JSONDecoder().raw_decode(after.lstrip())
    for short, meant in LONG_TEXTS.items():
        value = value.replace(short, meant)
    return f'{before}"{name}": {value}{after.lstrip()[end:]}'


@pytest.mark.parametrize(("name", "value", "words"), [
    ("num_microbatches", HUGE, "num_microbatches is 1000"),
    ("num_microbatches", LONG, "plan is not JSON"),
    ("num_microbatches", str(10**9), "num_microbatches is 1000000000; it must be at most 65536"),
    ("num_microbatches", '2, "num_microbatches": 4', "field 'num_microbatches' more than once"),
    ("rank", HUGE, r"ranks are \[0, 1, 1000"),
    ("rank", str(10**8), r"ranks are \[0, 1, 100000000\]; they must be 0..2 without gaps"),
    ("quota", HUGE, "quota of stage image.0 is 1000"),
    ("quota", "5", "quota of stage image.0 is 5; accepted: a share of the multiprocessors"),
    ("quota", "1e-400", "quota of stage image.0 is 0.0"),
    ("stages", DEEP, "nested deeper than 50"),
    ("schedule", "[" * 60 + "]" * 60, "nested deeper than 50"),
])
def test_plans(name: str, value: str, words: str) -> None:
    # The first "rank" and "quota" of the file are the first stage's.
    assert Plan.from_json(PLAN.to_json()) == PLAN
    with pytest.raises(PlanError, match=words):
        Plan.from_json(edited(PLAN.to_json(), name, value))


@pytest.mark.parametrize(("name", "value", "words"), [
    ("memory_bytes", f"[{10**30}, 1]", r"memory_bytes\[0\] is 1000"),
    ("degrees", f"[1, {10**30}]", r"degrees\[1\] is 1000"),
    ("seconds", f"[[{HUGE}], [1]]", r"seconds\[0\]\[0\] is 1000"),
    ("steps", str(10**9), "steps is 1000000000"),
    ("name", '"a", "name": "b"', "field 'name' more than once"),
])
def test_surfaces(name: str, value: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        surfaces_from_json(edited(surfaces_to_json([SURFACE]), name, value))


@pytest.mark.parametrize(("value", "words"), [
    (HUGE, "constant is 1000"), ("1e308", "constant is 1e\\+308; .*at most 1e\\+09"),
    ('9, "constant": 0', "field 'constant' more than once"),
])  # fmt: skip
def test_interference(value: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Interference.from_json(edited(Interference().to_json(), "constant", value))


def test_encodings_and_files_of_other_planners(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xff\xfe" + PLAN.to_json().encode("utf-16-le"))
    with pytest.raises(PlanError, match="plan.json is not UTF-8"):
        read_file(file)
    file.write_bytes(b"\xef\xbb\xbf" + PLAN.to_json().encode())
    assert Plan.from_json(read_file(file)) == PLAN
    with pytest.raises(PlanError, match="nowhere.json cannot be read: No such file"):
        read_file(tmp_path / "nowhere.json")
    assert json_value("[" * 50 + "]" * 50, "it")
    for source, words in ((DEEP, "nested deeper"), (LONG, "not JSON"), ("[1]", r"plan is \[1\]")):
        with pytest.raises(PlanError, match=words):
            Plan.from_json(LONG_TEXTS.get(source, source))
    with pytest.raises(PlanError, match="nested deeper"):
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
    with pytest.raises(PlanError, match=words):
        make()
