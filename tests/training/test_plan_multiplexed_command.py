"""``raymm plan --style``: mappings and comparisons from the command line."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from raymm.config.build import build_model, build_plan
from raymm.config.sections import load_config
from raymm.errors import ConfigError
from raymm.scheduler.costs.surface import ScalingSurface, surfaces_to_json
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import step_timeline


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def surfaces(seconds: dict[str, float], memory: int = 10**6) -> str:
    quotas = tuple(range(1, 11))
    return surfaces_to_json([
        ScalingSurface(
            name, (1, 2, 4), quotas, 10,
            tuple(tuple(one / d * 10 / q for q in quotas) for d in (1, 2, 4)), (memory,) * 3,
            (0.1,) * 10,
        )
        for name, one in seconds.items()
    ])


MULTIPLEXED = "--style", "multiplexed"


def printed_seconds(text: str) -> float:
    """Return the seconds of "predicted ... per iteration"."""
    number, unit = re.search(r"predicted ([\d.]+) (s|ms|µs) per iteration", text).groups()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_multiplex_prints_draws_and_saves(raymm, make_config, tmp_path, wide, no_ray):
    out = tmp_path / "out"
    code, text = raymm(
        "plan", "--style", "multiplexed", make_config(), "--ranks", "4", "--device", "H100",
        "--out", str(out),
    )
    assert code == 0, text
    plan = Plan.from_json((out / "plan.json").read_text())
    assert plan.num_ranks <= 4 and plan.schedule == "slots" and plan.num_microbatches == 1
    assert plan.replicas("vision")[0][0].slot < plan.replicas("llm")[0][0].slot
    # The file contains the performance model, which gives the printed prediction.
    assert step_timeline(plan, Network()).makespan <= printed_seconds(text) * 1.01
    # The standard run has two microbatches; the message is that of `raymm train`.
    assert "train it with data.microbatches: 1" in text
    for part in ("multiplexed (estimates)", "stage ms", "quota", "found by auto", "not measured",
                 "interference: estimated from shares of the memory bandwidth"):  # fmt: skip
        assert part in text
    assert f"{out / 'plan.png'}" in text
    with Image.open(out / "plan.png") as picture:
        assert picture.width > 800 and len(picture.convert("RGB").getcolors(2**20)) > 20
    assert sorted(p.name for p in out.iterdir()) == ["plan.json", "plan.png", "plan_schedule.png"]


def test_the_documented_plan_is_the_trained_one(
    raymm, make_config, tmp_path, monkeypatch, no_ray
):
    page = (Path(__file__).resolve().parents[2] / "docs" / "sharing-gpus.md").read_text()
    plan, train = (
        shlex.split(line, comments=True)[1:] for line in page.splitlines()
        if line.startswith("raymm") and ("laptop" in line or "raymm train" in line)
    )
    config = make_config({"parallel": {}})
    monkeypatch.chdir(tmp_path)
    code, text = raymm(*(config if word == "CONFIG.yaml" else word for word in plan))
    assert code == 0, text
    settings = [word for before, word in itertools.pairwise(train) if before == "--set"]
    settings = load_config(config, settings)
    assert build_plan(settings, build_model(settings)).schedule == "slots"
    # Options that a mapping ignores are rejected.
    for overrides, words in (
        (["parallel.style=multiplexed", "parallel.schedule=gpipe"],
         "parallel.schedule is 'gpipe', but parallel.style is 'multiplexed'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            build_plan(load_config(config, overrides), build_model(settings))


def test_a_surface_file_is_accepted_as_profile(raymm, make_config, tmp_path, wide, no_ray):
    file = tmp_path / "surfaces.json"
    file.write_text(surfaces({"vision": 0.2, "llm": 0.4}))
    code, text = raymm(
        "plan", "--style", "multiplexed", make_config(), "--ranks", "2", "--profile", str(file),
        "--interference", "blind", "--svg", "--out", str(tmp_path),
    )
    assert code == 0, text
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert step_timeline(plan, Network()).makespan == pytest.approx(0.3) and "300 ms" in text
    assert "surfaces, measured or given" in text and "(estimates)" not in text
    assert "blind: modules side by side" in text and "surfaces do not record" in text
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


def test_auto_compares_styles_and_reports_the_faster(raymm, make_config, tmp_path, wide, no_ray):
    code, text = raymm(
        "plan", "--style", "auto", make_config({"data.microbatches": 2}), "--ranks", "2",
        "--device", "H100", "--out", str(tmp_path / "out"),
    )
    assert code == 0, text
    assert "times as fast" in text and "the same for both: batch" in text
    assert "pipelined: 2 microbatches" in text and "multiplexed: the whole batch" in text
    plan = Plan.from_json((tmp_path / "out" / "plan.json").read_text())
    assert plan.num_ranks <= 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "plan.json", "plan.png", "plan_schedule.png"
    ]
    # One line names the selected style, and one line per module its devices and alternatives.
    found = re.search(r"^auto: .* per step \(all simulated.*plans tried\)$", text, re.M)
    assert found, text
    for module in ("vision", "llm"):
        assert re.search(rf"^{module}: .*; (the fastest plan with|no other way)", text, re.M), text


@pytest.mark.parametrize(("options", "words"), [
    ((), "on 2 GPUs, multiplexed"),  # as many as in the layouts, without an option
    (("--ranks", "8"), "ranks is 8, but the given plan (parallel) is for 2"),
    (("--layouts", "colocated"), "--layouts is for plans that raymm makes"),
    (("--style", "multiplexed", "--ranks", "2"), "(parallel), which are for pipelined plans"),
])  # fmt: skip
def test_styles_are_compared_on_the_devices_of_the_layouts(
    raymm, make_config, tmp_path, wide, no_ray, options, words
):
    config = make_config({"parallel": {"encoders": {"vision": {"pp": 1}},
                                       "language_model": {"pp": 1}}})  # fmt: skip
    code, text = raymm(
        "plan", "--style", "auto", config, "--device", "H100", "--out", str(tmp_path), *options
    )
    assert words in text
    assert code == (2 if words.startswith(("ranks", "--layouts")) else 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((*MULTIPLEXED, "--quota-steps", "30"), "steps is 30"),
        ((*MULTIPLEXED, "--quota-steps", "0"), "--quota-steps is 0"),
        ((*MULTIPLEXED, "--measure", "2"), "--measure is for pipelined plans"),
        ((*MULTIPLEXED, "--layouts", "colocated"), "--layouts is for pipelined plans"),
        (("--interference", "blind"), "--interference requires --style multiplexed"),
        (("--quota-steps", "0"), "--quota-steps requires --style multiplexed"),
        (("--solver", ""), "--solver requires --style multiplexed"),
        ((*MULTIPLEXED, "--solver", ""), "strategy is ''"),
        ((*MULTIPLEXED, "--interference", "no.json"),
         "'no.json', which is not an existing file; accepted: bandwidth, blind, or a file"),
        ((*MULTIPLEXED, "--solver", "best"), "strategy is 'best'"),
        ((*MULTIPLEXED, "--memory-gib", "0.0001"), "fits on no GPU"),
    ],
)
def test_refusals(raymm, make_config, wide, tmp_path, no_ray, options, text):
    code, printed = raymm(
        "plan", make_config(), "--ranks", "2", "--device", "H100", "--out", str(tmp_path / "out"),
        *options,
    )
    assert code == 2 and text in printed
    assert not (tmp_path / "out").exists()


@pytest.fixture
def no_ray(monkeypatch):
    """Fail if Ray is started."""
    import ray

    def refuse(*arguments, **options):
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr(ray, "init", refuse)
