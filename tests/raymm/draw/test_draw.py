"""Every picture is a complete PNG or SVG, at small and large sizes, without other files."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from raymm.draw import draw_loss, draw_plan, draw_timelines
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import NO_STAGE, StageId
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op
from raymm.scheduler.program.timeline import Span, Timeline
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"


def chain(ranks: int, microbatches: int) -> Plan:
    graph = ModuleGraph((ModuleNode("llm", (False,) + (True,) * ranks),), ())
    stages = [Stage("llm", i, (i, i + 1), i) for i in range(ranks - 1)]
    stages.append(Stage("llm", ranks - 1, (ranks - 1, ranks + 1), ranks - 1))
    return Plan(graph, tuple(stages), microbatches)


def multimodal() -> Plan:
    """Return a plan with vision and audio into an LLM, a skipping edge, and shared ranks."""
    graph = ModuleGraph(
        (
            ModuleNode("vision", (False,) * 27 + (True,), projector=True),
            ModuleNode("audio", (False,) * 4 + (True,), projector=True),
            ModuleNode("fuser", (True,)),
            ModuleNode("llm", (False,) * 30),
        ),
        (("vision", "fuser"), ("audio", "fuser"), ("vision", "llm"), ("fuser", "llm")),
    )
    stages = (
        Stage("vision", 0, (0, 27), 0),
        Stage("vision", 1, (27, 28), 1),
        Stage("audio", 0, (0, 5), 1),
        Stage("fuser", 0, (0, 1), 1),
        *(Stage("llm", i, (10 * i, 10 * i + 10), 2 + i) for i in range(3)),
    )
    return Plan(graph, stages, 3)


def timeline(plan: Plan, scale: float = 1.0, epilogue: bool = False) -> Timeline:
    program = full_program(plan)
    weight = {Op.FORWARD: 0.01, Op.FORWARD_NO_GRAD: 0.01, Op.BACKWARD: 0.02}
    costs = {(s.id, op): scale * w for s in plan.stages for op, w in weight.items()}
    simulated = simulate(program, costs, latency=0.001)
    end = simulated.makespan
    tail = [
        Span(rank, op, NO_STAGE, -1, end, end + 0.002) for rank in range(plan.num_ranks)
        for op in OPTIMIZER_OPS
    ]
    return Timeline(simulated.spans + tuple(tail if epilogue else ()), plan.num_ranks)


def history(steps: int) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = []
    for step in range(1, steps + 1):
        loss = 2.0 + 2.0 / step
        row: dict[str, float | None] = {"step": step, "loss": loss, "learning_rate": 1e-3}
        if step % 5 == 1:
            row |= {"heldout_loss": loss + 0.1, "heldout_loss_shuffled_vision": loss + 0.4,
                    "heldout_loss_shuffled_audio": loss + 0.3}
        rows.append(row)
    return rows


def check_picture(folder, name: str) -> None:
    """Check that the file is a complete, non-empty picture, and the only file."""
    path = folder / name
    assert [entry.name for entry in folder.iterdir()] == [name]
    if path.suffix == ".svg":
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg"
        assert sum(1 for _ in root.iter(f"{SVG}path")) > 3
    else:
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            assert min(image.size) >= 200 and max(image.size) < 8000
            colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
            assert colours is not None and len(colours) > 10


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("plan", [chain(2, 4), chain(24, 24), multimodal()],
                         ids=["2x4", "24x24", "multimodal"])
def test_timelines(tmp_path, plan: Plan, suffix: str) -> None:
    name = f"schedule.{suffix}"
    draw_timelines(
        [("predicted", timeline(plan)), ("measured", timeline(plan, 1.2, epilogue=True))],
        tmp_path / name, title="1F1B",
    )
    check_picture(tmp_path, name)


def svg_comments(path) -> str:
    """Return the texts of an SVG, which Matplotlib writes as comments before their glyphs."""
    return "\n".join(line for line in path.read_text().splitlines() if "<!--" in line)


def test_timelines_have_their_labels(tmp_path) -> None:
    path = tmp_path / "schedule.svg"
    predicted = Timeline((
        Span(0, Op.FORWARD, StageId("vision", 0), 3, 0.0, 0.010),
        Span(1, Op.RECV, StageId("llm", 0), 3, 0.0, 0.010, StageId("vision", 0)),
        Span(1, Op.FORWARD_NO_GRAD, StageId("llm", 0), 3, 0.010, 0.040),
    ), 2)
    # All spans are late: the panel still begins at 0 and its length excludes the start.
    measured = Timeline(tuple(s._replace(start=5 + 2 * s.start, end=5 + 2 * s.end)
                              for s in predicted.spans), 2)
    draw_timelines([("predicted", predicted), ("measured", measured)], path, title="heading")
    text = svg_comments(path)
    for expected in (
        "heading", "predicted: iteration 40 ms, mean bubble 50%",
        "measured: iteration 80 ms, mean bubble 50%, 100.0% longer than predicted",
        "rank 0: vision.0", "rank 1: llm.0", "75%", "25%", "vision forward",
        "llm forward, no grad", "waiting for a message", "time (ms)", "<!-- 3 -->",
    ):
        assert expected in text, expected
    assert "backward" not in text  # without a backward, the legend has none


def test_rank_names_replace_the_row_labels(tmp_path) -> None:
    path = tmp_path / "schedule.svg"
    draw_timelines([("run", timeline(chain(2, 1)))], path, rank_names={1: "node7 gpu0"})
    text = svg_comments(path)
    assert "node7 gpu0" in text and "rank 0: llm.0" in text and "rank 1" not in text


def test_numbers_are_left_out_where_they_do_not_fit(tmp_path) -> None:
    wide = Span(0, Op.FORWARD, StageId("llm", 0), 77, 0.0, 1.0)
    narrow = Span(0, Op.FORWARD, StageId("llm", 0), 88, 1.0, 1.001)
    draw_timelines([("run", Timeline((wide, narrow, wide._replace(start=2.0, end=3.0)), 1))],
                   tmp_path / "a.svg")
    text = svg_comments(tmp_path / "a.svg")
    assert "<!-- 77 -->" in text and "<!-- 88 -->" not in text


@pytest.mark.parametrize("empty", [Timeline((), 2), Timeline((), 0)], ids=["2 ranks", "no rank"])
def test_a_timeline_without_spans(tmp_path, empty: Timeline) -> None:
    draw_timelines([("nothing", empty)], tmp_path / "empty.svg")
    check_picture(tmp_path, "empty.svg")


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("plan", [chain(2, 4), chain(24, 24), multimodal()],
                         ids=["2x4", "24x24", "multimodal"])
def test_plan(tmp_path, plan: Plan, suffix: str) -> None:
    name = f"plan.{suffix}"
    draw_plan(plan, tmp_path / name)
    check_picture(tmp_path, name)


def test_plan_names_stages_ranks_and_work(tmp_path) -> None:
    draw_plan(multimodal(), tmp_path / "plan.svg")
    text = svg_comments(tmp_path / "plan.svg")
    for expected in (
        "5 ranks, 3 microbatches, 1f1b", "vision.0", "vision.1", "audio.0", "fuser.0", "llm.2",
        "rank 4", "layers 0–26", "layers 0–3 + projector", "frozen: forward only",
        "frozen: passes gradients on", "trained, passes gradients on",
    ):
        assert expected in text, expected


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("steps", [1, 576])
def test_loss(tmp_path, steps: int, suffix: str) -> None:
    name = f"loss.{suffix}"
    draw_loss(history(steps), tmp_path / name)
    check_picture(tmp_path, name)


def test_loss_annotates_the_gaps_at_the_end(tmp_path) -> None:
    draw_loss(history(41), tmp_path / "loss.svg", title="alignment")
    text = svg_comments(tmp_path / "loss.svg")
    for expected in ("alignment", "vision gap +0.300", "audio gap +0.200", "held-out",
                     "vision shuffled", "train"):
        assert expected in text, expected


@pytest.mark.parametrize("rows", [
    [],
    [{"step": 1, "loss": math.nan}, {"step": 2, "loss": None}],
    [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": 1.0}],
    [{"step": 1, "heldout_loss_shuffled_vision": 2.0}],
], ids=["empty", "nothing finite", "one infinite", "shuffled alone"])
def test_the_loss_curve_skips_invalid_values(tmp_path, rows) -> None:
    draw_loss(rows, tmp_path / "loss.svg")
    check_picture(tmp_path, "loss.svg")


def draw_each(path) -> list:
    return [
        lambda: draw_timelines([("run", timeline(chain(2, 2)))], path),
        lambda: draw_plan(chain(2, 2), path),
        lambda: draw_loss(history(3), path),
    ]


@pytest.mark.parametrize("which", range(3))
def test_other_suffixes_are_refused(tmp_path, which: int) -> None:
    with pytest.raises(ValueError, match=r"picture .*a\.pdf.* must end in \.png or \.svg"):
        draw_each(tmp_path / "a.pdf")[which]()
    assert not list(tmp_path.iterdir())


def test_no_timeline_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="timelines is empty"):
        draw_timelines([], tmp_path / "a.png")


@pytest.mark.parametrize("which", range(3))
def test_folders_are_made_and_old_pictures_replaced(tmp_path, which: int) -> None:
    path = tmp_path / "new" / "a.svg"
    for _ in range(2):
        assert draw_each(path)[which]() == path
    check_picture(path.parent, "a.svg")


@pytest.mark.parametrize("which", range(3))
def test_a_failure_leaves_the_old_picture_and_no_temporary_file(
    tmp_path, monkeypatch, which: int
) -> None:
    path = tmp_path / "a.svg"
    path.write_text("old")

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    with pytest.raises(OSError, match="disk full"):
        draw_each(path)[which]()
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.svg"]


def test_pyplot_is_left_alone(tmp_path) -> None:
    """Avoid pyplot, whose figures live until closed, and which selects a display."""
    import subprocess
    import sys

    code = (
        "import sys; from raymm.draw import draw_loss\n"
        f"draw_loss([{{'step': 1, 'loss': 1.0}}], {str(tmp_path / 'a.png')!r})\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
