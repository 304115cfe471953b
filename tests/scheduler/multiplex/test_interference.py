"""Interference: eq. 7 and 8 by hand, fits that find what made the data, and one that cannot."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._mapping_instances import random_colocations
from raymm.scheduler.multiplex.interference import (
    COUPLINGS,
    UNITS,
    Colocation,
    Interference,
    colocations_from_json,
    colocations_to_json,
    compare_models,
    fit_interference,
    predict,
    report,
)
from raymm.scheduler.multiplex.strict_json import MultiplexError


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
    assert predict(law, sample) == pytest.approx(2.0 + 0.38)
    assert predict(Interference(0.1, 0.2, 0.5), sample) == pytest.approx(2.0 * 1.38)


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
        sample = Colocation(float(rng.uniform(0.1, 1.0)), groups, 1.0)
        samples.append(Colocation(sample.alone, groups, predict(law, sample)))
    fit = fit_interference(samples, "full", unit, coupling)
    # Which GPU of several is worst depends on the coefficients; with one the fit is exact.
    single = [Colocation(s.alone, s.bandwidths[:1], 0.5) for s in samples]
    single = [Colocation(s.alone, s.bandwidths, predict(law, s)) for s in single]
    exact = fit_interference(single, "full", unit, coupling)
    assert exact.error < 1e-9 and exact.r2 == pytest.approx(1.0)
    assert fit.error < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_models_on_contention_that_is_not_eq_8(seed: int) -> None:
    """Waiting for the memory bus, with 5 % noise, tested on what was not fitted."""
    noisy, true = random_colocations(seed, 1200, 2, 0.05)
    fits = compare_models(noisy[:600], noisy[600:])
    clean = {form: report(fit.model, true[600:], form) for form, fit in fits.items()}
    assert fits["full"].error < 0.05  # the noise alone makes 0.04
    assert fits["blind"].error > 3 * fits["full"].error
    assert fits["additive"].error > 1.2 * fits["full"].error
    # Against the time without noise, which is what a plan needs to know.
    assert clean["additive"].error > 5 * clean["full"].error
    assert fits["full"].r2 > fits["additive"].r2 > 0 > fits["blind"].r2
    # Three modules on a GPU: the product of eq. 8 falls where the delay rises.
    noisy, true = random_colocations(seed, 1200, 3, 0.05)
    product = compare_models(noisy[:600], true[600:])["full"]
    own = compare_models(noisy[:600], true[600:], coupling="own")["full"]
    assert own.error < 0.8 * product.error


def test_file_round_trips() -> None:
    law = Interference(0.1, -0.2, 0.3, "seconds", "own")
    assert Interference.from_json(law.to_json()) == law
    samples = tuple(random_colocations(0, 5, 3, 0.1)[0])
    assert colocations_from_json(colocations_to_json(samples)) == samples


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
    with pytest.raises(MultiplexError, match=words):
        Interference.from_json(json.dumps(data))


def test_too_few_or_wrong_samples_are_refused() -> None:
    alone = Colocation(1.0, ((0.5,),), 1.0)
    with pytest.raises(MultiplexError, match="has 0 colocations.*at least 3"):
        fit_interference([alone] * 10)
    with pytest.raises(MultiplexError, match="form is 'best'"):
        fit_interference([alone], "best")
    with pytest.raises(MultiplexError, match="colocation.seconds is 0"):
        Colocation(1.0, ((0.5,),), 0.0)
    with pytest.raises(MultiplexError, match=r"colocation.bandwidths\[0\] is 2.0"):
        Colocation(1.0, ((2.0,),), 1.0)
    with pytest.raises(MultiplexError, match="at least one GPU"):
        Colocation(1.0, (), 1.0)
