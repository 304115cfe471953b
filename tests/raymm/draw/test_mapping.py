"""The picture of a mapping: lanes, bars, labels and notes."""

import re

import pytest
from PIL import Image

from raymm.draw.mapping import draw_mapping
from raymm.draw.palette import module_hues
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.mapping import Mapping, Placement, predicted_stage
from raymm.scheduler.multiplex.problem import MappingProblem


def problem(gpus: int = 4) -> MappingProblem:
    quotas = tuple(range(1, 11))
    return MappingProblem(tuple(
        ScalingSurface(
            name, (1, 2, 4), quotas, 10,
            tuple(tuple(seconds / d * 10 / q for q in quotas) for d in (1, 2, 4)), (0, 0, 0),
            (0.0,) * 10,
        )
        for name, seconds in (("vision", 0.2), ("audio", 0.1), ("llm", 1.0))
    ), (("vision", "llm"), ("audio", "llm")), gpus)


def mapping(of: MappingProblem) -> Mapping:
    return Mapping(of.gpus, 10, (
        predicted_stage(of, [Placement("vision", (0, 1), 6), Placement("audio", (0,), 4)]),
        predicted_stage(of, [Placement("llm", (0, 1, 2, 3), 10)]),
    ), 0.3, "by hand")


def test_an_svg_has_a_lane_per_gpu_with_its_modules(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    of = problem()
    path = draw_mapping(
        of, mapping(of), tmp_path / "new" / "m.svg", title="a title", note="estimates",
    )
    texts = re.findall(r">([^<>]+)</text>", path.read_text())
    for gpu in range(4):
        assert f"GPU {gpu}" in texts
    assert {"stage 0", "stage 1", "vision", "audio", "llm", "idle", "a title"} <= set(texts)
    assert texts.count("vision  60%") == 2 and texts.count("llm  100%") == 4
    assert texts.count("audio  40%") == 1
    total = mapping(of).seconds
    said = next(text for text in texts if text.startswith("predicted"))
    assert f"predicted {1e3 * total:.3g} ms (estimates)" in said and "gap at most" in said


def test_bars_are_as_wide_as_times_and_as_high_as_quotas(tmp_path):
    """Count pixels: twice the GPU seconds at full quota are twice the area."""
    of = problem()
    path = draw_mapping(of, mapping(of), tmp_path / "m.png")
    with Image.open(path) as picture:
        pixels = picture.convert("RGB").getcolors(2**24)
    hues = module_hues(of.names)

    def area(name: str) -> int:
        wanted = tuple(round(255 * c) for c in hues[name])
        return sum(
            count for count, rgb in pixels
            if all(abs(a - b) <= 6 for a, b in zip(rgb, wanted, strict=True))
        )

    # vision: two GPUs, 0.6, for 1/6 s; llm: four whole ones for 1/4 s; audio: one, 0.4, 1/4 s.
    seconds = {"vision": 0.2, "audio": 0.1, "llm": 1.0}
    for name in ("vision", "audio"):
        assert area(name) / area("llm") == pytest.approx(
            seconds[name] / seconds["llm"], rel=0.2
        )


def test_many_gpus_and_stages_still_make_a_picture(tmp_path):
    of = problem(64)
    many = Mapping(64, 10, tuple(
        predicted_stage(of, [Placement(name, (g,), 10)])
        for g, name in enumerate(("vision", "audio", "llm"))
    ))
    with Image.open(draw_mapping(of, many, tmp_path / "m.png")) as picture:
        assert picture.height < 6000


def test_other_suffixes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must end in"):
        draw_mapping(problem(), mapping(problem()), tmp_path / "m.gif")
