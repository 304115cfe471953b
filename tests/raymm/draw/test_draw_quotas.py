"""Pictures of concurrent modules on one rank."""

from pytest import approx

from raymm.draw import draw_timelines
from raymm.draw.schedule import BOX_ROWS, places_on_quotas
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.timeline import Span, Timeline

TIMELINE = Timeline(
    (
        Span(0, "forward", StageId("vision", 0), 0, 0.0, 2.0, quota=0.5),
        Span(0, "forward", StageId("audio", 0), 0, 0.0, 1.0, quota=0.25),
        Span(0, "forward", StageId("vision", 0), 1, 2.0, 3.0),
        Span(1, "forward", StageId("llm", 0), 0, 2.0, 4.0),
    ),
    2,
)


def test_modules_of_different_slots_fill_the_gaps():
    slots = (("a", 0.75, 0.0), ("b", 0.25, 0.0), ("c", 0.5, 2.0), ("d", 0.5, 2.5))
    timeline = Timeline(tuple(
        Span(0, "forward", StageId(module, 0), 0, start, start + 2.0, quota=quota)
        for module, quota, start in slots
    ), 1)  # fmt: skip
    boxes = {stage.module: box for (_, stage, _), box in places_on_quotas(timeline).items()}
    for upper, lower in ("ab", "cd"):
        assert boxes[upper].rise + boxes[upper].half == approx(BOX_ROWS / 2)
        assert boxes[lower].rise - boxes[lower].half == approx(-BOX_ROWS / 2)


def test_boxes_are_stacked_as_high_as_their_quota(tmp_path):
    found = places_on_quotas(TIMELINE)
    assert set(found) == {(0, StageId("vision", 0), 0.5), (0, StageId("audio", 0), 0.25)}
    vision, audio = found[0, StageId("vision", 0), 0.5], found[0, StageId("audio", 0), 0.25]
    assert (vision.half, audio.half) == approx((BOX_ROWS / 4, BOX_ROWS / 8))
    assert vision.rise + vision.half == approx(BOX_ROWS / 2)  # the top of the row
    assert vision.rise - vision.half == approx(audio.rise + audio.half)  # then the next
    file = draw_timelines([("measured", TIMELINE)], tmp_path / "t.svg")
    assert file.stat().st_size > 1000
