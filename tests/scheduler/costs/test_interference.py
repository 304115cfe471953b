"""Interference: eq. 7 and 8 by hand, and fits that recover the data's model, or cannot."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.shared.colocations import bus_slowdowns, random_colocations
from raymm.errors import PlanError
from raymm.scheduler.costs.interference import (
    COUPLINGS,
    FORMS,
    UNITS,
    Colocation,
    Interference,
    colocations_to_json,
    fit_interference,
    report,
)


def test_delay_by_hand() -> None:
    law = Interference(0.1, 0.2, 0.5, "seconds")
    assert law.delay(0.5, []) == 0.0
    assert law.delay(0.5, [0.4]) == pytest.approx(0.1 + 0.2 * 0.9 + 0.5 * 0.2)
    assert law.delay(0.5, [0.4, 0.5]) == pytest.approx(0.1 + 0.2 * 1.4 + 0.5 * 0.1)
    own = Interference(0.1, 0.2, 0.5, "seconds", "own")
    assert own.delay(0.5, [0.4]) == law.delay(0.5, [0.4])
    assert own.delay(0.5, [0.4, 0.5]) == pytest.approx(0.1 + 0.2 * 1.4 + 0.5 * 0.5 * 0.9)
    assert Interference(-1.0).delay(0.5, [0.5]) == 0.0
    # Eq. 7: the worst GPU counts; seconds are added, or a share of the time alone.
    sample = Colocation(2.0, ((0.5,), (0.5, 0.4), (0.5, 0.1)), 3.0)
    assert law.colocated(sample.alone, sample.bandwidths) == pytest.approx(2.0 + 0.38)
    relative = Interference(0.1, 0.2, 0.5)
    assert relative.colocated(sample.alone, sample.bandwidths) == pytest.approx(2.0 * 1.38)


# Fits that begin with the largest sums alone miss these: one cycles, the other ends with a
# coefficient of the wrong sign.
@example(1629112511, "seconds", "product", (0.01, 1e-5, 0.1))
@example(1130359058, "seconds", "product", (1e-5, 1e-5, 0.1))
@given(
    st.integers(0, 2**32), st.sampled_from(UNITS), st.sampled_from(COUPLINGS),
    st.tuples(st.floats(0.0, 0.2), st.floats(0.0, 0.5), st.floats(0.1, 1.0)),
)
def test_fit_finds_the_coefficients(seed, unit, coupling, coefficients) -> None:
    law, rng = Interference(*coefficients, unit, coupling), np.random.default_rng(seed)
    samples = []
    for _ in range(40):
        own = rng.uniform(0.1, 0.9)
        groups = tuple(
            (own, *rng.uniform(0.1, 0.9, rng.integers(1, 4))) for _ in range(rng.integers(1, 4))
        )
        alone = float(rng.uniform(0.1, 1.0))
        samples.append(Colocation(alone, groups, law.colocated(alone, groups)))
    fit = fit_interference(samples, "full", unit, coupling)
    # The worst of several GPUs depends on the coefficients; with one GPU it does not.
    single = []
    for sample in samples:
        alone, worst = sample.alone, sample.bandwidths[:1]
        single.append(Colocation(alone, worst, law.colocated(alone, worst)))
    exact = fit_interference(single, "full", unit, coupling)
    assert exact.error < 1e-9 and exact.r2 == pytest.approx(1.0)
    assert fit.error < 1e-6


def test_bus_by_hand_and_by_simulation() -> None:
    """Compare two modules with the product, and three with a simulated bus."""
    assert bus_slowdowns((0.4,)) == (1.0,)
    assert bus_slowdowns((0.4, 0.9)) == pytest.approx((1.36, 1.36))
    use = (0.2, 0.5, 0.8)
    rng = np.random.default_rng(0)
    cycles, moving = np.zeros(3), np.zeros(3, bool)
    left = rng.exponential([1 - u for u in use])
    now = 0.0
    while cycles.min() < 20_000:
        rate = np.where(moving, 1.0 / max(1, moving.sum()), 1.0)
        i = int(np.argmin(left / rate))
        step = left[i] / rate[i]
        left -= step * rate
        now += step
        cycles[i] += moving[i]
        moving[i] = not moving[i]
        left[i] = rng.exponential(use[i] if moving[i] else 1 - use[i])
    assert now / cycles == pytest.approx(bus_slowdowns(use), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_models_on_contention_that_is_not_eq_8(seed: int) -> None:
    """Use a shared memory bus with 5 % noise, tested on plans and modules that were not fitted."""
    fitted = [s for n in (2, 4, 6, 8) for s in random_colocations(seed, 30, n, 0.05)[0]]
    models = {form: fit_interference(fitted, form, coupling="own").model for form in FORMS}
    eq8 = fit_interference(fitted, "full").model
    for modules in (2, 4, 6, 8):
        noisy, true = random_colocations(seed + 10, 60, modules, 0.05)
        error = {form: report(model, true, form).error for form, model in models.items()}
        assert report(models["full"], noisy, "full").error < 0.05  # the noise alone makes 0.04
        assert error["full"] < 0.025
        assert error["additive"] > 2 * error["full"] and error["blind"] > 4 * error["full"]
        assert report(models["full"], true, "full").r2 > 0.93
        if modules > 2:  # with three modules on a GPU the product falls when the delay rises
            assert report(eq8, true, "full").error > 2 * error["full"]
    # Two modules on a GPU are delayed by exactly the product.
    pairs = [s for s in fitted if all(len(group) < 3 for group in s.bandwidths)]
    alone = fit_interference(pairs, "full").model
    tested = [
        s for s in random_colocations(seed + 20, 100, 4, 0.0)[0]
        if all(len(group) < 3 for group in s.bandwidths)
    ]
    assert report(alone, tested, "full").error < 0.02


def test_noise_averages_out_under_the_right_law() -> None:
    """Use eq. 8 with 5 % noise: the fit is far closer than the noise, for any module length."""
    for unit, coupling in itertools.product(UNITS, COUPLINGS):
        law, rng = Interference(0.05, 0.1, 0.6, unit, coupling), np.random.default_rng(1)
        noisy, true = [], []
        for one in [s for n in (2, 4) for s in random_colocations(3, 60, n, 0.0)[0]]:
            seconds = law.colocated(one.alone, one.bandwidths)
            noise = 1 + 0.05 * rng.standard_normal()
            noisy.append(Colocation(one.alone, one.bandwidths, seconds * noise))
            true.append(Colocation(one.alone, one.bandwidths, seconds))
        model = fit_interference(noisy, "full", unit, coupling).model
        assert report(model, true, "full").error < 0.012


def test_file_round_trips() -> None:
    law = Interference(0.1, -0.2, 0.3, "seconds", "own")
    assert Interference.from_json(law.to_json()) == law


def test_measurements_are_written_in_full() -> None:
    samples = tuple(random_colocations(0, 5, 3, 0.1)[0])
    entries = json.loads(colocations_to_json(samples))["colocations"]
    assert samples == tuple(
        Colocation(e["alone"], tuple(map(tuple, e["bandwidths"])), e["seconds"]) for e in entries
    )


@pytest.mark.parametrize(("field", "value", "words"), [
    ("constant", "x", "interference.constant is 'x'"),
    ("additive", None, "interference.additive is None"),
    ("product", float("inf"), "interference.product is inf.*finite"),
    ("unit", "ms", "interference.unit is 'ms'; accepted: relative, seconds"),
    ("coupling", "sum", "interference.coupling is 'sum'; accepted: product, own"),
    ("format", 7, "format is 7; accepted: 1"),
])
def test_files_that_do_not_fit_are_refused(field: str, value: object, words: str) -> None:
    data = json.loads(Interference().to_json()) | {field: value}
    with pytest.raises(PlanError, match=words):
        Interference.from_json(json.dumps(data))


def test_too_few_or_wrong_samples_are_refused() -> None:
    alone = Colocation(1.0, ((0.5,),), 1.0)
    with pytest.raises(PlanError, match="has 0 colocations.*at least 3"):
        fit_interference([alone] * 10)
    with pytest.raises(PlanError, match="form is 'best'"):
        fit_interference([alone], "best")
    with pytest.raises(PlanError, match="colocation.seconds is 0"):
        Colocation(1.0, ((0.5,),), 0.0)
    with pytest.raises(PlanError, match=r"colocation.bandwidths\[0\] is 2.0"):
        Colocation(1.0, ((2.0,),), 1.0)
    with pytest.raises(PlanError, match="at least one GPU"):
        Colocation(1.0, (), 1.0)
