"""Plan: rejections with their messages, and a complete JSON form."""

from __future__ import annotations

import copy
import json
import re

import pytest
from hypothesis import given

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedules.registry import SCHEDULES
from tests.support.random_plans import alignment, chain, plans

GRAPH = ModuleGraph(
    (ModuleNode("vision", (True,) * 2), ModuleNode("llm", (True,) * 4)), (("vision", "llm"),)
)
VISION = Stage("vision", 0, (0, 2), 0)


def llm(*cuts: tuple[int, int]) -> tuple[Stage, ...]:
    return (VISION, *(Stage("llm", i, cut, 1 + i) for i, cut in enumerate(cuts)))


@pytest.mark.parametrize(("stages", "message"), [
    (llm((0, 2), (3, 4)), "stage llm.1: layers [3, 4) would leave a gap; it must start at 2"),
    (llm((1, 4)), "stage llm.0: layers [1, 4) would leave a gap; it must start at 0"),
    (llm((0, 3), (2, 4)), "stage llm.1: layers [2, 4) would overlap; it must start at 3"),
    (llm((0, 2), (2, 2), (2, 4)), "stage llm.1: layers [2, 2) would be empty"),
    (llm((0, 2), (2, 1)), "stage llm.1: layers [2, 1) would be empty"),
    (llm((0, 3)), "stages of 'llm' cover layers [0, 3); the module has 4"),
    (llm((0, 5)), "stages of 'llm' cover layers [0, 5); the module has 4"),
    ((VISION,), "module 'llm' has no stage"),
    ((), "module 'vision' has no stage"),
    ((*llm((0, 4)), Stage("video", 0, (0, 1), 2)), "stage video.0: modules are ['llm', 'vision']"),
    ((VISION, Stage("llm", 0, (0, 4), 2)), "ranks are [0, 2]; they must be 0..1 without gaps"),
    ((VISION, Stage("llm", 0, (0, 4), -1)), "ranks are [-1, 0]"),
    ((VISION, Stage("llm", 1, (0, 4), 1)), "stages of 'llm' must be numbered 0.. in order"),
    ((VISION, Stage("llm", 1, (2, 4), 1), Stage("llm", 0, (0, 2), 2)), "must be numbered"),
], ids=["gap", "gap at start", "overlap", "empty", "backwards", "short", "long", "no stage",
        "no stages", "unknown module", "rank gap", "negative rank", "index", "order"])
def test_stages_that_cannot_run(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan(GRAPH, stages, 4)


@pytest.mark.parametrize("number", [0, -3])
def test_microbatches(number: int) -> None:
    with pytest.raises(PlanError, match=f"num_microbatches is {number}; .* at least 1"):
        Plan(GRAPH, llm((0, 4)), number)


def test_schedule() -> None:
    accepted = ", ".join(SCHEDULES)
    with pytest.raises(PlanError, match=f"schedule is 'dualpipe'; accepted: {accepted}"):
        Plan(GRAPH, llm((0, 4)), 1, "dualpipe")


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert Plan.from_dict(plan.to_dict()) == plan


def changed(path: str, value: object) -> dict:
    """Return the alignment plan's data with one value set, or removed if it is ``...``."""
    data = json.loads(alignment(2).to_json())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = data
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


@pytest.mark.parametrize(("path", "value", "message"), [
    ("format", 2, "format is 2; accepted: 1"),
    ("format", ..., "plan lacks the key 'format'"),
    ("stages", ..., "plan lacks the key 'stages'"),
    ("graph.edges", ..., "plan lacks the key 'edges'"),
    ("graph.nodes.0.trainable", ..., "plan lacks the key 'trainable'"),
    ("stages.1.rank", ..., "plan lacks the key 'rank'"),
    ("microbatches", 3, "plan: unknown keys ['microbatches']; accepted: ['activation_limits', "),
    ("graph.sinks", 3,
     "graph: unknown keys ['sinks']; accepted: ['edges', 'every', 'nodes', 'ports']"),
    ("graph.nodes.0.frozen", True, "node: unknown keys ['frozen']"),
    ("stages.0.gpu", 0, "stage: unknown keys ['gpu']"),
    ("num_microbatches", 2.5, "num_microbatches is 2.5; it must be of type int"),
    ("num_microbatches", True, "num_microbatches is True; it must be of type int"),
    ("num_microbatches", "4", "num_microbatches is '4'; it must be of type int"),
    ("num_microbatches", 0, "num_microbatches is 0; it must be a whole number, at least 1"),
    ("schedule", None, "schedule is None; it must be of type str"),
    ("schedule", "zb", "schedule is 'zb'; accepted: 1f1b"),
    ("stages.0.rank", 0.0, "rank is 0.0; it must be of type int"),
    ("stages.0.index", "0", "index is '0'; it must be of type int"),
    ("stages.0.replica", "1", "replica is '1'; it must be of type int"),
    ("stages.0.replica", 1, "stages of 'vision' must be numbered 0.. in order"),
    ("stages.0.recompute", 1, "recompute is 1; it must be of type bool"),
    ("stages.4.rank", 2, "rank 2 is used by stages llm.0, llm.1"),
    ("memory_limit", 1.5, "memory_limit is 1.5; it must be of type int"),
    ("activation_limits", ["1"], "activation_limits is ['1']; it must be a list of whole numbers"),
    ("activation_limits", [1], "activation_limits has 1 entries; it needs one per rank"),
    ("policy", {"priority": [0, 1]}, "policy: priority is (0, 1)"),
    ("policy", {"priority": [0, 1, 1, 2], "patience": 2}, "policy: patience is 2"),
    ("policy", {"hops": 2}, "plan lacks the key 'priority'"),
    ("profile", {"format": 1, "modules": {}}, "profile: the profile lacks module"),
    ("stages.0.module", 7, "module is 7; it must be of type str"),
    ("stages.0.layers", [0], "layers is [0]; it must be [first, one past the last]"),
    ("stages.0.layers", [0, 1.5], "layers is [0, 1.5]; it must be [first, one past the last]"),
    ("stages.0.layers", 3, "plan has a value of the wrong kind"),
    ("stages.0", "vision", "stage: unknown keys"),
    ("stages", 5, "plan has a value of the wrong kind"),
    ("graph.nodes.0.trainable", ["yes"], "trainable is ['yes']; it must be a list of true and"),
    ("graph.nodes.0.projector", 1, "projector is 1; it must be of type bool"),
    ("graph.edges.0", ["vision"], "edge is ['vision']; it must be [producer, consumer]"),
    ("graph.edges.0", ["vision", "lm"], "graph: edge ('vision', 'lm') names module 'lm'"),
    ("graph.edges.0", ["llm", "vision"], "graph: the module graph has a cycle"),
])
def test_edited_json(path: str, value: object, message: str) -> None:
    data = changed(path, value)
    if message.startswith("graph: the module graph has a cycle"):
        data["graph"]["edges"].append(["vision", "llm"])
    before = copy.deepcopy(data)
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_dict(data)
    assert data == before


@pytest.mark.parametrize("text", ["", "{", "format: 1"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(PlanError, match="plan is not JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"'])
def test_json_of_another_kind(text: str) -> None:
    with pytest.raises(PlanError, match="plan is .* it must be an object"):
        Plan.from_json(text)


def test_edges_depth_and_ranks() -> None:
    plan = alignment(2)
    assert set(plan.stage_edges) == {
        (StageId("vision", 0), StageId("vision", 1)),
        (StageId("vision", 1), StageId("llm", 0)),
        (StageId("audio", 0), StageId("llm", 0)),
        (StageId("llm", 0), StageId("llm", 1)),
        (StageId("llm", 1), StageId("llm", 2)),
    }
    assert plan.depth == {
        StageId("vision", 0): 5,
        StageId("vision", 1): 4,
        StageId("audio", 0): 4,
        StageId("llm", 0): 3,
        StageId("llm", 1): 2,
        StageId("llm", 2): 1,
    }
    assert plan.num_ranks == 5
    assert [s.id for s in plan.rank_stages(0)] == [StageId("vision", 0), StageId("audio", 0)]
    assert [plan.trainable(s) for s in plan.stages] == [False, True, True, False, False, False]
    assert [s.id for s in chain(3, 1).topological_stages] == [
        StageId("llm", 0),
        StageId("llm", 1),
        StageId("llm", 2),
    ]


def longest_path(plan: Plan, stage: str) -> int:
    """Return the longest path by trying every path."""
    after = [dst for src, dst in plan.stage_edges if src == stage]
    return 1 + max((longest_path(plan, dst) for dst in after), default=0)


@given(plans())
def test_depth_is_the_longest_path_to_the_loss(plan: Plan) -> None:
    assert plan.depth == {s.id: longest_path(plan, s.id) for s in plan.stages}
    order = [s.id for s in plan.topological_stages]
    assert sorted(order) == sorted(s.id for s in plan.stages)
    assert all(order.index(src) < order.index(dst) for src, dst in plan.stage_edges)
