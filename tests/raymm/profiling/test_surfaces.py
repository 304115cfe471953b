"""``raymm profile --multiplex`` on a CPU: real modules in a real actor, and rejected input."""

import re

import pytest
import torch

from raymm.actors.rank.module_profiler import ProfileRequest
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.surface_profiler import (
    ColocatedTimes,
    SurfaceRequest,
    SurfaceTimes,
)
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.costs.scaling_estimates import shapes_of
from raymm.errors import PlanError
from raymm.profiling.surfaces import SurfaceMeasurement, resized_microbatch
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.surface import conditions_from_json, surfaces_from_json
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.process_costs import all_reduce_seconds


def test_whole_devices_are_measured_for_the_plan(
    raymm, make_config, tmp_path, ray_cluster, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    config = make_config({"model.encoders.vision.train": "frozen"})
    target = tmp_path / "new" / "surfaces.json"
    code, text = raymm(
        "profile", "--multiplex", config, "--out", str(target), "--gpus", "2", "--repeats", "1"
    )
    assert code == 0, text
    batch = load_config(config).data.batch_size
    surfaces = surfaces_from_json(target.read_text())
    measured = conditions_from_json(target.read_text())
    assert (measured.batch, measured.precision) == (batch, "fp32") and measured.device
    assert set(measured.tokens) == {"vision", "llm"}
    assert [s.name for s in surfaces] == ["vision", "llm"]
    for surface in surfaces:
        assert surface.degrees == (1, 2)
        # The file itself records that no share of a device was measured.
        assert surface.quotas == (10,) and surface.bandwidth == (0.0,)
        assert all(row[0] > 0 for row in surface.seconds)
        assert list(surface.memory_bytes) == sorted(surface.memory_bytes, reverse=True)
    model = build_model(load_config(config))
    for shape, surface in zip(shapes_of(model), surfaces, strict=True):
        held = sum(p.numel() for p in shape.module.parameters()) * 4
        if shape.name == "llm":  # weights, gradients and two moments; its embedding is tied
            assert surface.memory_bytes[-1] > 4 * held
        else:
            assert surface.memory_bytes[-1] > held
    assert "CPUs have no quotas" in text
    assert "gradient all-reduces are estimated from cpu's links" in text
    assert sorted(p.name for p in target.parent.iterdir()) == ["surfaces.json"]

    code, text = raymm(
        "plan", "--style", "multiplexed", config, "--ranks", "2", "--profile", str(target),
        "--out", str(tmp_path / "plan"),
    )
    assert code == 0, text
    plan = Plan.from_json((tmp_path / "plan" / "plan.json").read_text())
    assert plan.schedule == "slots" and all(stage.quota in (None, 1.0) for stage in plan.stages)
    assert "no quotas below a full device" in text and "blind: the surfaces have no" in text
    assert f"per iteration of {batch} samples" in text and "do not record" not in text
    code, text = raymm(
        "plan", "--style", "multiplexed", config, "--ranks", "2", "--profile", str(target),
        "--out", str(tmp_path / "plan"), "--microbatches", "64",
    )
    assert code == 2 and f"the surfaces were measured with {batch} and are not valid" in text


def test_what_is_refused(raymm, make_config, tmp_path, no_new_actors):
    out = str(tmp_path / "s.json")
    for options, said in (
        (("--gpus", "2"), "--gpus requires --multiplex"),
        (("--multiplex", "--lengths", "16"), "--lengths cannot be used"),
        (("--multiplex", "--gpus", "0"), "gpus is 0"),
    ):
        code, text = raymm("profile", make_config(), "--out", out, *options)
        assert code == 2 and said in text
    assert not (tmp_path / "s.json").exists()


def test_a_microbatch_without_a_modality_is_refused(make_config):
    model = build_model(load_config(make_config()))
    text = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    with pytest.raises(PlanError, match="no items for encoder 'vision'"):
        SurfaceMeasurement(model, text, batch=2, gpus=1).run()


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 6])
def test_resized_microbatches_keep_items_with_their_rows(samples):
    given = {
        "input_ids": torch.arange(3)[:, None].expand(3, 4),
        "vision": {"pixels": torch.tensor([10, 11, 12, 30]),
                   "sample_index": torch.tensor([0, 0, 1, 2])},  # fmt: skip
    }
    found = resized_microbatch(given, samples)
    assert found["input_ids"][:, 0].tolist() == [i % 3 for i in range(samples)]
    pairs = list(zip(found["vision"]["sample_index"].tolist(),
                     found["vision"]["pixels"].tolist(), strict=True))  # fmt: skip
    items = {0: [10, 11], 1: [12], 2: [30]}
    assert sorted(pairs) == sorted((row, p) for row in range(samples) for p in items[row % 3])


def made_up(model, monkeypatch):
    """Return a profile of an H100 with synthetic times, to process it without a GPU."""
    import raymm.profiling.surfaces as subject

    work = SurfaceMeasurement(model, {}, 4, 2, 10, 1, "bf16", "cuda", RankResources(gpus=1.0))
    requests, times = {}, {}
    for shape in shapes_of(model):
        rows = torch.ones(4, 16, dtype=torch.long)
        inputs = {"input_ids": rows} if shape.name == "llm" else {}
        for degree in (1, 2):
            requests[shape.name, degree] = SurfaceRequest(ProfileRequest(inputs, {}), False)
            times[shape.name, degree] = SurfaceTimes(
                {q / 10: 1e-3 / q / degree for q in range(2, 11)},  # 0.1 is not granted
                (1000 // degree,) * len(shape.trainable), (4, 5, 32),
            )

    class Actor:
        def __init__(self, *_):
            pass

        def __enter__(self):
            # On the multiprocessors of a group a module is 1.1 times as slow as by its surface.
            return lambda _, wanted, groups, expected: [
                {name: ColocatedTimes(1.1 * about[name], 1.65 * about[name]) for name in group}
                for group, about in zip(groups, expected, strict=True)
            ]

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(subject, "ProfilingActor", Actor)
    return work, requests, times


def test_measured_quotas_become_surfaces(make_config, monkeypatch):
    model = build_model(load_config(make_config()))
    work, requests, times = made_up(model, monkeypatch)
    h100 = find_device("H100")
    for shape in shapes_of(model):
        found = work._surface(shape, requests, times, h100)
        assert found.quotas == tuple(range(2, 11)) and found.degrees == (1, 2)
        assert found.seconds_at(1, 5) == pytest.approx(2e-4)
        trained = sum(p.numel() * 4 for p in shape.module.parameters() if p.requires_grad)
        assert found.seconds_at(2, 5) >= 1e-4 + all_reduce_seconds(trained, 2, h100.within_node)
        layers = len(shape.trainable)
        assert found.memory_bytes[0] - found.memory_bytes[1] == 500 * layers
        # The same bytes in less time.
        assert 0 < found.bandwidth[0] < found.bandwidth[-1] <= 1
        assert found.bandwidth[-1] == pytest.approx(5 * found.bandwidth[0])


def test_colocations_are_measured_at_every_division(make_config, monkeypatch):
    model = build_model(load_config(make_config()))
    work, requests, times = made_up(model, monkeypatch)
    surfaces = tuple(
        work._surface(s, requests, times, find_device("H100")) for s in shapes_of(model)
    )
    found = work._colocations({}, requests, times, surfaces)
    assert len(found) == 2 * 3  # two modules at three divisions
    assert all(one.seconds == pytest.approx(1.5 * one.alone) for one in found)
    assert {round(1.1e-3 / one.alone / 2) for one in found} == {3, 5, 7}
    for one in found:
        ((own, other),) = one.bandwidths
        assert own > 0 and other > 0


def test_a_profile_of_layers_serves_both_styles(
    raymm, make_config, tmp_path, ray_cluster, monkeypatch
):
    """Estimate surfaces by scaling to the layers.

    On one device with one microbatch, both styles take as long as the layers.
    """
    monkeypatch.setenv("COLUMNS", "200")
    config = make_config({"data.microbatches": 1, "parallel": {}})
    profile = tmp_path / "profile.json"
    assert raymm("profile", config, "--out", str(profile), "--repeats", "1")[0] == 0
    code, text = raymm(
        "plan", "--style", "auto", config, "--ranks", "1", "--profile", str(profile),
        "--out", str(tmp_path / "plan"),
    )
    assert code == 0, text
    assert "scaled to layers measured on" in text and "times as fast" in text
    assert "is not in raymm's table" in text
    times = [float(x) for x in re.findall(r"predicted ([0-9.]+) ms per", text)]
    assert len(times) == 2 and times[0] == pytest.approx(times[1], rel=0.02)
