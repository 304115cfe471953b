"""Content of a schedule's picture: separate ops, separate chunks, readable labels."""

from __future__ import annotations

from collections import Counter

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from raymm.draw import draw_timelines
from raymm.draw.palette import HUES, ink_on, op_looks
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import COMPUTE, Op
from raymm.scheduler.program.timeline import Span, Timeline
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds


def chain(
    ranks: int, microbatches: int, schedule: str = "1f1b", chunks: int = 1, recompute: bool = False
) -> Plan:
    stages = ranks * chunks
    graph = ModuleGraph((ModuleNode("llm", (True,) * stages),), ())
    cost = LayerCost(0.01, 0.01, 0.01, activation_bytes=100, output_bytes=1)
    return Plan(
        graph,
        tuple(Stage("llm", i, (i, i + 1), i % ranks, 0, recompute) for i in range(stages)),
        microbatches, schedule, CostProfile({"llm": (cost,) * stages}),
    )


def timeline(plan: Plan) -> Timeline:
    program = lower(plan, [["llm"]] * plan.num_microbatches)
    return simulate(program, op_seconds(plan), latency=1e-4)


def collections(axes) -> list[PolyCollection]:
    """Return the boxes, without the plain patches behind digits."""
    return [
        c for c in axes.collections if isinstance(c, PolyCollection) and c.get_gid() != "digits"
    ]


def boxes(axes) -> list[tuple[float, float, float, float, tuple]]:
    """Return (left, right, top, bottom, fill) of every box; rows count downwards."""
    found = []
    for sheet in collections(axes):
        for path, fill in zip(sheet.get_paths(), sheet.get_facecolors(), strict=True):
            x, y = path.vertices[:, 0], path.vertices[:, 1]
            found.append((x.min(), x.max(), y.min(), y.max(), tuple(fill[:3])))
    return found


def lightness(colour) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("hue", HUES)
def test_ops_differ_in_lightness_or_have_stripes(hue: str) -> None:
    looks = op_looks(to_rgb(hue))
    assert set(looks) == COMPUTE
    plain = sorted(lightness(look.fill) for look in looks.values() if not look.hatch)
    assert min(b - a for a, b in zip(plain, plain[1:], strict=False)) > 0.06
    assert [op for op, look in looks.items() if look.hatch] == [Op.RECOMPUTE]
    assert lightness(looks[Op.BACKWARD_WEIGHT].fill) == plain[0]
    for look in looks.values():
        ink = lightness(to_rgb(ink_on(look.fill)))
        assert abs(ink - lightness(look.fill)) > 0.4


def test_every_span_is_a_box_in_the_colour_of_its_op(drawn) -> None:
    t = timeline(chain(3, 5, "zero_bubble", recompute=True))
    draw_timelines([("run", t)], "a.png")
    looks = op_looks(to_rgb("#0072B2"))
    counts = Counter(fill for *_, fill in boxes(drawn.figure.axes[0]))
    ops = Counter(span.op for span in t.compute())
    assert {Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} <= set(ops)
    for op, number in ops.items():
        assert counts[looks[op].fill] == number, op
    assert sum(counts.values()) == len(t.spans)
    striped = [c for c in collections(drawn.figure.axes[0]) if c.get_hatch()]
    assert sum(len(c.get_paths()) for c in striped) == ops[Op.RECOMPUTE]


@pytest.mark.parametrize("schedule, recompute, there, absent", [
    ("1f1b", False, ("llm forward", "llm backward"), ("recompute", "B_d", "B_w")),
    ("1f1b", True, ("llm forward, to be recomputed", "llm recompute"), ("B_d", "no grad")),
    ("zero_bubble", False, ("llm backward of inputs (B_d)", "llm backward of weights (B_w)"),
     ("recompute",)),
])
def test_the_legend_has_exactly_the_drawn_ops(drawn, schedule, recompute, there, absent) -> None:
    draw_timelines([("run", timeline(chain(3, 6, schedule, recompute=recompute)))], "a.png")
    legend = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert set(there) <= set(legend)
    assert not [text for text in legend for word in absent if word in text]


def test_later_chunks_of_a_rank_stand_lower(drawn) -> None:
    t = timeline(chain(2, 4, chunks=2))
    draw_timelines([("run", t)], "a.png")
    tops = {(span.rank, span.stage): set() for span in t.compute()}
    found = boxes(drawn.figure.axes[0])
    for span in t.compute():
        (top,) = [
            box[2] for box in found
            if abs(box[0] - span.start * 1e3) < 1e-6 and abs(box[1] - span.end * 1e3) < 1e-6
            and abs((box[2] + box[3]) / 2 - span.rank) < 0.5 and box[3] - box[2] > 0.5
        ]
        tops[span.rank, span.stage].add(round(top, 6))
    assert all(len(of_stage) == 1 for of_stage in tops.values())
    assert tops[0, StageId("llm", 0)].pop() < tops[0, StageId("llm", 2)].pop()
    assert tops[1, StageId("llm", 1)].pop() < tops[1, StageId("llm", 3)].pop()
    assert all(rank - 0.5 < top and bottom < rank + 0.5
               for *_, top, bottom, _ in found for rank in [round((top + bottom) / 2)])
    assert any("lower boxes" in text for text in drawn.texts())


def test_stages_of_different_modules_and_ranks_stand_level(drawn) -> None:
    spans = tuple(
        Span(rank, Op.FORWARD, stage, 0, start, start + 1.0)
        for rank, stage, start in (
            (0, StageId("vision", 0), 0.0),
            (0, StageId("audio", 0), 1.0),
            (1, StageId("vision", 0, 1), 0.0),
            (2, StageId("llm", 0), 2.0),
        )
    )
    draw_timelines([("run", Timeline(spans, 3))], "a.png")
    found = boxes(drawn.figure.axes[0])
    assert {round((top + bottom) / 2, 9) for *_, top, bottom, _ in found} == {0.0, 1.0, 2.0}
    by_start = {(round(left), round(top + bottom) // 2): fill
                for left, _, top, bottom, fill in found}
    assert by_start[0, 0] == by_start[0, 1] != by_start[1, 0]  # a replica has its module's colour
    assert not any("lower boxes" in text for text in drawn.texts())


@pytest.mark.parametrize("stages", [2, 7])
def test_replicas_on_one_rank_stay_in_its_row(drawn, stages: int) -> None:
    names = [StageId("vision", 0), *(StageId("vision", 0, i) for i in range(1, stages))]
    spans = tuple(Span(0, Op.FORWARD, name, i, i, i + 1.0) for i, name in enumerate(names))
    draw_timelines([("run", Timeline(spans, 1))], "a.png")
    found = sorted(boxes(drawn.figure.axes[0]))
    tops = [top for _, _, top, _, _ in found]
    assert tops == sorted(tops) and len(set(tops)) == stages
    assert min(tops) > -0.5 and max(bottom for *_, bottom, _ in found) < 0.5


@pytest.mark.parametrize("plan", [
    chain(24, 24, recompute=True), chain(24, 8, "zero_bubble"), chain(8, 8, "zero_bubble", 2),
    chain(100, 2),
], ids=["24 recompute", "24 zero bubble", "8 chunks", "100 ranks"])
def test_no_text_lies_on_another(drawn, plan: Plan) -> None:
    t = timeline(plan)
    later = Timeline(tuple(s._replace(start=1.1 * s.start, end=1.1 * s.end) for s in t.spans),
                     t.num_ranks)
    draw_timelines([("predicted", t), ("measured", later)], "a.png", title="heading")
    assert drawn.overlapping_texts() == []
    assert drawn.outside() == []


def test_panels_share_the_axis_and_mark_the_first_ones_end(drawn) -> None:
    slow, fast = timeline(chain(4, 8)), timeline(chain(4, 8, "zero_bubble"))
    assert fast.makespan < slow.makespan
    draw_timelines([("1f1b", slow), ("zero_bubble", fast)], "a.png")
    first, second = drawn.figure.axes
    assert first.get_xlim() == second.get_xlim() == (0.0, slow.makespan * 1e3)
    dashed = [line for line in second.lines if line.is_dashed()]
    assert [line.get_xdata()[0] for line in dashed] == [slow.makespan * 1e3]
    assert "end of 1f1b" in drawn.texts()
    gain = 1 - fast.makespan / slow.makespan
    assert second.get_title(loc="left").endswith(f", {gain:.1%} shorter than 1f1b")
    assert not [line for line in first.lines if line.is_dashed()]


@pytest.mark.parametrize("seconds, unit, number", [
    (90.0, "s", "90 s"), (1.25, "s", "1.25 s"), (0.5, "ms", "500 ms"), (3e-5, "µs", "30 µs"),
])
def test_units_fit_the_length(drawn, seconds: float, unit: str, number: str) -> None:
    draw_timelines(
        [("run", Timeline((Span(0, Op.FORWARD, StageId("llm", 0), 0, 0.0, seconds),), 1))], "a.png"
    )
    assert drawn.figure.axes[0].get_xlabel() == f"time ({unit})"
    assert f"run: iteration {number}, mean bubble 0%" in drawn.texts()


def test_stages_are_named_in_the_order_of_their_numbers(drawn) -> None:
    spans = tuple(Span(0, Op.FORWARD, StageId("llm", i), 0, i, i + 1.0) for i in (10, 2, 0))
    draw_timelines([("run", Timeline(spans, 1))], "a.png")
    assert "rank 0: llm.0 llm.2 llm.10" in drawn.texts()


def test_a_png_of_24_ranks_is_small(tmp_path) -> None:
    plan = chain(24, 24, recompute=True)
    path = draw_timelines([("1f1b", timeline(plan))], tmp_path / "a.png")
    assert path.stat().st_size < 400_000


def test_panels_have_numbers_of_one_size_if_they_fit(drawn) -> None:
    wide = tuple(Span(0, Op.FORWARD, StageId("llm", 0), i, i, i + 1.0) for i in range(10))
    narrow = (
        Span(0, Op.FORWARD, StageId("llm", 0), 11, 10.0, 10.15),
        Span(0, Op.FORWARD, StageId("llm", 0), 12, 10.15, 10.16),
    )
    draw_timelines([("a", Timeline(wide, 1)), ("b", Timeline(wide + narrow, 1))], "a.png")
    sizes = [
        {text.get_text(): text.get_fontsize() for text in axes.texts if text.get_text().isdigit()}
        for axes in drawn.figure.axes
    ]
    assert len(sizes[0]) == 10 and len(set(sizes[0].values())) == 1
    assert {sizes[1][key] for key in sizes[0]} == set(sizes[0].values())
    assert "12" not in sizes[1] and sizes[1]["11"] < sizes[1]["1"]


@pytest.mark.parametrize("slower", [None, 11])
def test_ranks_that_do_the_same_share_a_row(drawn, slower: int | None) -> None:
    """Six replicas of a pipeline of two stages are on twelve ranks."""
    spans = tuple(
        Span(2 * replica + index, op, StageId("llm", index, replica), replica + 6 * n,
             start, start + (1.5 if 2 * replica + index == slower else 1.0))
        for replica in range(6) for index in range(2) for n in range(3)
        for op, start in ((Op.FORWARD, 4.0 * n + index), (Op.BACKWARD, 4.0 * n + 3 - index))
    )
    draw_timelines([("run", Timeline(spans, 12))], "a.png")
    counts = [6, 6] if slower is None else [6, 5, 1]
    rows = {0.0, 1.0, 2.0} if slower else {0.0, 1.0}
    found = boxes(drawn.figure.axes[0])
    assert {round((top + bottom) / 2, 9) for _, _, top, bottom, _ in found} == rows
    names = dict.fromkeys(text for text in drawn.texts() if text.startswith("rank "))
    assert list(names) == [
        "rank 0: llm.0 (x6)", f"rank 1: llm.1 (x{counts[1]})", "rank 11: llm.1@5"
    ][: len(counts)]
    mean = f"{Timeline(spans, 12).mean_bubble:.0%}"
    assert any(text.endswith(f"mean bubble {mean}") for text in drawn.texts())
