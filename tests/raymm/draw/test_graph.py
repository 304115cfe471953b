"""Content of a plan's picture: every stage separate, its costs, and a limited page width."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from raymm.draw import draw_plan
from raymm.draw.graph import MANY_STAGES, MAX_WIDTH, _size
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId

MIB = 2**20


def chain(ranks: int, chunks: int = 1, recompute: bool = False, costs: bool = True) -> Plan:
    stages = ranks * chunks
    cost = LayerCost(0.004, 0.005, 0.006, 64 * MIB, 100 * MIB, 8 * MIB)
    return Plan(
        ModuleGraph((ModuleNode("llm", (True,) * 2 * stages),), ()),
        tuple(Stage("llm", i, (2 * i, 2 * i + 2), i % ranks, 0, recompute) for i in range(stages)),
        24, profile=CostProfile({"llm": (cost,) * 2 * stages}) if costs else None,
    )


def alignment(copies: int = 1, llm_stages: int = 4, recompute: bool = True) -> Plan:
    """Return frozen encoders with trained projectors into a frozen LLM; vision has replicas."""
    graph = ModuleGraph(
        (
            ModuleNode("vision", (False,) * 4 + (True,), projector=True),
            ModuleNode("audio", (False,) * 2 + (True,), projector=True),
            ModuleNode("llm", (False,) * llm_stages),
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = [
        Stage("vision", i, layers, 2 * copy + i, copy, recompute)
        for copy in range(copies) for i, layers in enumerate([(0, 2), (2, 5)])
    ]
    stages.append(Stage("audio", 0, (0, 3), 2 * copies))
    stages += [Stage("llm", i, (i, i + 1), 2 * copies + 1 + i, 0, recompute)
               for i in range(llm_stages)]
    cost = LayerCost(0.004, 0.005, 0.006, 64 * MIB, 100 * MIB, 8 * MIB)
    counts = {node.name: node.num_layers for node in graph.nodes}
    return Plan(graph, tuple(stages), 6,
                profile=CostProfile({name: (cost,) * n for name, n in counts.items()}))


def stage_boxes(figure) -> list:
    """Return the stages' frames; badges are patches of texts, not of the axes."""
    return [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]


CASES = [
    chain(1), chain(4, recompute=True), chain(24, recompute=True), chain(24, 2),
    chain(30, costs=False), alignment(), alignment(3), alignment(8), alignment(2, 20),
]
IDS = ["1", "4", "24", "24x2", "30 without costs", "alignment", "3 copies", "8 copies", "deep"]


@pytest.mark.parametrize("plan", CASES, ids=IDS)
def test_everything_is_on_the_page_and_apart(drawn, plan: Plan) -> None:
    draw_plan(plan, "a.png")
    figure = drawn.figure
    assert drawn.overlapping_texts() == [] and drawn.outside() == []
    assert figure.get_size_inches()[0] <= MAX_WIDTH + 1
    frames = [box.get_bbox() for box in stage_boxes(figure)]
    shown = [stage for stage in plan.stages if len(plan.stages) <= MANY_STAGES or not stage.replica]
    assert len(frames) == len(shown)
    assert not [1 for a, b in combinations(frames, 2) if a.overlaps(b)]
    texts = drawn.texts()
    for stage in shown:
        copies = 1 if len(plan.stages) <= MANY_STAGES else len(plan.replicas(stage.module))
        assert f"{stage.id}" + (f" x{copies}" if copies > 1 else "") in texts
        assert any(re.match(rf"rank {stage.rank}\b", text) for text in texts)
    pixels = [box.get_window_extent() for box in stage_boxes(figure)]
    for text, extent in drawn.placed():  # texts stay in their boxes
        for box in pixels:
            if box.x0 <= extent.x0 < box.x1 and box.y0 <= extent.y0 < box.y1:
                assert extent.x1 <= box.x1 + 1 and extent.y1 <= box.y1, text


def test_a_deep_plan_continues_in_bands_with_arrows(drawn) -> None:
    plan = chain(24)
    draw_plan(plan, "a.png")
    frames = stage_boxes(drawn.figure)
    tops = sorted({round(box.get_y(), 6) for box in frames}, reverse=True)
    assert len(tops) > 1
    bands = [[i for i, box in enumerate(frames) if round(box.get_y(), 6) == top] for top in tops]
    assert [i for band in bands for i in band] == list(range(24))
    lefts = [[frames[i].get_x() for i in band] for band in bands]
    assert all(left == sorted(left) and left[0] == lefts[0][0] for left in lefts)
    cut = [t for t in drawn.figure.axes[0].texts if (t.get_gid() or "").startswith("cut")]
    expected = [str(stage) for above, below in zip(bands, bands[1:], strict=False)
                for stage in (StageId("llm", below[0]), StageId("llm", above[-1]))]
    assert [text.get_text() for text in cut] == expected
    arrows = [p for p in drawn.figure.axes[0].patches if isinstance(p, FancyArrowPatch)]
    assert len(arrows) == 2 * (23 + len(bands) - 1)  # activation and gradient; cut ones twice


def test_costs_are_those_the_stage_has(drawn) -> None:
    draw_plan(alignment(), "a.png")
    texts = drawn.texts()
    for expected in (
        "F 8 ms",  # vision.0: frozen, nothing trained before it
        "F 12 + B_w 6 ms",  # its projector is trained
        "F 4 + R 4 + B_d 5 ms",  # the LLM sends gradients back
        "state 200 MiB, keeps 0 B", "state 600 MiB, keeps 72.0 MiB",  # with its output
        "state 100 MiB, keeps 16.0 MiB",  # inputs from both encoders
    ):
        assert any(expected in text for text in texts), expected


def test_recompute_is_marked_on_stages_with_a_backward(drawn) -> None:
    draw_plan(alignment(), "a.png")
    assert drawn.texts().count("recompute") == 5  # vision.1 and four of the LLM; not vision.0
    draw_plan(alignment(recompute=False), "a.png")
    assert "recompute" not in drawn.texts()


def test_without_a_profile_no_cost_is_claimed(drawn) -> None:
    draw_plan(chain(4, costs=False), "a.png")
    assert not [text for text in drawn.texts() if "ms" in text or "state" in text]


def test_shared_ranks_and_the_legend(drawn) -> None:
    def legend() -> list[str]:
        return [text.get_text() for text in drawn.figure.axes[0].get_legend().get_texts()]

    draw_plan(chain(2, 2), "a.png")
    assert legend() == ["trained layer", "activations", "gradients", "rank of several stages"]
    inks = {t.get_color() for t in drawn.figure.axes[0].texts if t.get_text() == "rank 1"}
    assert inks == {"white"}
    draw_plan(alignment(), "a.png")
    assert legend() == ["trained layer", "frozen layer", "projector", "activations", "gradients"]
    draw_plan(chain(1), "a.png")
    assert legend() == ["trained layer"]


def test_replicas_share_a_box_with_all_their_ranks(drawn) -> None:
    """The encoder's copies are on ranks 0, 2 .. 10 and 1, 3 .. 11 of 17; costs are those of the
    whole plan."""
    plan = alignment(6)
    draw_plan(plan, "a.png")
    texts = drawn.texts()
    for name, ranks in (("vision.0 x6", "rank 0, 2 .. 10"), ("vision.1 x6", "rank 1, 3 .. 11"),
                        ("audio.0", "rank 12"), ("llm.3", "rank 16")):
        assert name in texts and ranks in texts
    assert "17 ranks, 6 microbatches, 1f1b" in texts
    assert not [text for text in texts if "@" in text]


@pytest.mark.parametrize("number, text", [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * MIB, "200 MiB"),
    (3 * 2**30 + 2**29, "3.5 GiB"),
])
def test_sizes(number: int, text: str) -> None:
    assert _size(number) == text
