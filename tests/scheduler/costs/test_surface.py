"""Scaling surfaces: exact at samples, monotone between them, strict about files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.roofline import roofline_surface
from raymm.errors import PlanError
from raymm.scheduler.costs.surface import (
    ScalingSurface,
    surfaces_from_json,
    surfaces_to_json,
)
from raymm.scheduler.multiplex.roofline import ModuleWork

SURFACE = ScalingSurface(
    "vision", (1, 2, 8), (1, 5, 10), 10, ((9.0, 2.0, 1.5), (5.0, 1.1, 0.9), (2.0, 0.6, 0.4)),
    (300, 200, 100), (0.1, 0.4, 0.7),
)


@st.composite
def falling(draw) -> ScalingSurface:
    """Draw samples that fall with degree and quota."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    degrees = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=5)))
    steps = draw(st.integers(1, 12))
    quotas = sorted(draw(st.sets(st.integers(1, steps), min_size=1, max_size=6)))
    drops = rng.exponential(size=(len(degrees), len(quotas))) * rng.integers(0, 2, len(quotas))
    logs = -np.cumsum(np.cumsum(drops, 0), 1)
    return ScalingSurface(
        "m", tuple(degrees), tuple(quotas), steps,
        tuple(tuple(float(x) for x in row) for row in np.exp(logs)),
        (0,) * len(degrees), (0.5,) * len(quotas),
    )


@given(falling())
def test_exact_at_samples(surface: ScalingSurface) -> None:
    assert falls(surface)
    for i, degree in enumerate(surface.degrees):
        for j, quota in enumerate(surface.quotas):
            assert surface.seconds_at(degree, quota) == surface.seconds[i][j]
            assert surface.seconds_at(degree, 3 * quota, 3 * surface.steps) == surface.seconds[i][j]


@given(falling(), st.integers(1, 4))
def test_monotone_in_degree_and_quota(surface: ScalingSurface, finer: int) -> None:
    steps = surface.steps * finer
    quotas = range(surface.quotas[0] * finer, surface.quotas[-1] * finer + 1)
    degrees = range(surface.degrees[0], surface.degrees[-1] + 1)
    table = np.array([[surface.seconds_at(d, q, steps) for q in quotas] for d in degrees])
    assert (np.diff(table, axis=0) <= 1e-12 * table[1:]).all()
    assert (np.diff(table, axis=1) <= 1e-12 * table[:, 1:]).all()


def falls(surface: ScalingSurface) -> bool:
    """Return True if no sample takes longer than one with less quota or a lower degree."""
    table = np.array(surface.seconds)
    return bool((np.diff(table, axis=0) <= 0).all() and (np.diff(table, axis=1) <= 0).all())


def test_ideal_scaling_is_met_between_samples() -> None:
    surface = ScalingSurface(
        "m", (1, 16), (1, 10), 10, ((10.0, 1.0), (0.625, 0.0625)), (1, 1), (0.1, 1.0)
    )
    assert surface.seconds_at(4, 5) == pytest.approx(1 / (4 * 0.5))
    assert surface.bandwidth_at(5) == pytest.approx(0.5)


def test_values_outside_the_samples_are_refused() -> None:
    for degree, quota, words in (
        (16, 5, "degree of vision is 16.*from 1 to 8"), (1, 11, "quota of vision is 11"),
    ):
        with pytest.raises(PlanError, match=words):
            SURFACE.seconds_at(degree, quota)
    with pytest.raises(PlanError, match="1/20; sampled quotas are 1 to 10 of 10"):
        SURFACE.seconds_at(1, 1, 20)


def test_roofline_falls_and_saturates() -> None:
    work = ModuleWork("m", 1.0, 0.5, parallel=2.0, state_bytes=10, activation_bytes=80)
    surface = roofline_surface(work, (1, 2, 4, 8))
    assert falls(surface)
    # Four GPUs have work for half of their multiprocessors each: more quota does not help.
    assert surface.seconds_at(4, 5) == pytest.approx(surface.seconds_at(4, 10))
    assert surface.seconds_at(1, 5) > 1.5 * surface.seconds_at(1, 10)
    assert surface.memory_bytes == (90, 50, 30, 20)


def test_file_round_trip() -> None:
    assert surfaces_from_json(surfaces_to_json([SURFACE])) == (SURFACE,)


def changed(**fields) -> str:
    data = json.loads(surfaces_to_json([SURFACE]))
    data["surfaces"][0].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(("source", "words"), [
    ("[]", "surfaces file is .*must be an object"),
    ("{", "surfaces file is not JSON"),
    ("[" * 100_000, "surfaces file has .*nested deeper"),
    ('{"format": 2, "surfaces": []}', "format is 2; accepted: 1"),
    ('{"format": true, "surfaces": []}', "format is True; accepted: 1"),
    (json.dumps({"format": 1}), "has no field 'surfaces'"),
    (changed(extra=1), r"surfaces\[0\] has unknown fields \['extra'\]"),
    (changed(name=""), "surface.name is ''"),
    (changed(steps=0), "vision.steps is 0.*from 1 to"),
    (changed(degrees=[2, 1, 8]), r"vision.degrees is \[2, 1, 8\].*increasing"),
    (changed(degrees=[1, 2.0, 8]), r"vision.degrees\[1\] is 2.0.*whole number"),
    (changed(quotas=[1, 5, 11]), r"vision.quotas\[2\] is 11.*from 1 to 10"),
    (changed(seconds=[[1, 1, 1]]), "vision.seconds has 1 entries.*3 degrees"),
    (changed(seconds=[[1, 1, 1], [1, 1], [1, 1, 1]]), r"vision.seconds\[1\] has 2 entries"),
    (changed(seconds=[[1, 1, 1], [1, 0, 1], [1, 1, 1]]), r"vision.seconds\[1\]\[1\] is 0.*above 0"),
    (changed(memory_bytes=[1, -1, 1]), r"vision.memory_bytes\[1\] is -1"),
    (changed(bandwidth=[0.1, 1.1, 0.2]), r"vision.bandwidth\[1\] is 1.1.*at most 1"),
])
def test_files_that_do_not_fit_are_refused(source: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        surfaces_from_json(source)


def test_values_that_are_not_numbers_are_refused() -> None:
    source = surfaces_to_json([SURFACE]).replace("0.9", "NaN")
    with pytest.raises(PlanError, match=r"vision.seconds\[1\]\[2\] is nan.*finite"):
        surfaces_from_json(source)
    twice = surfaces_to_json([SURFACE, SURFACE])
    with pytest.raises(PlanError, match="name must differ"):
        surfaces_from_json(twice)


def test_sequential_kernels_lose_less_speed_on_quotas() -> None:
    overlapped = ModuleWork("m", 1.0, 0.5)
    serial = ModuleWork("m", 1.0, 0.5, ridge=1.0)
    assert serial.seconds(1, 1.0) == pytest.approx(1.5)
    assert serial.seconds(1, 0.5) == pytest.approx(2.5)  # traffic still at full speed
    assert serial.bandwidth(1.0) == pytest.approx(1 / 3)
    lost = [work.seconds(1, 0.5) / work.seconds(1, 1.0) for work in (overlapped, serial)]
    assert lost[1] < 1.7 < 1.9 < lost[0]
    with pytest.raises(PlanError, match="m.ridge is 0.5"):
        ModuleWork("m", 1.0, 0.5, ridge=0.5)
