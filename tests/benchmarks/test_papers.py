"""Tables of papers: their summary, and one small table of simulated steps."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.papers import cornstarch_v1, cornstarch_v2, lv_xattn
from benchmarks.papers.tables import Row, Table, paired, relative
from benchmarks.shared.paper_rows import ROWS


@pytest.mark.parametrize("seed", range(5))
def test_summaries_are_those_of_numpy_and_scipy(seed):
    generator = np.random.default_rng(seed)
    paper = generator.integers(1, 8, 12) / 2  # with equal values
    raymm = paper * generator.uniform(0.5, 1.5, 12)
    rows = tuple(Row(str(i), *pair) for i, pair in enumerate(zip(paper, raymm, strict=True)))
    found = Table("t", "§1", "s", rows).to_dict()
    differences = np.abs(raymm / paper - 1)
    assert found["median_difference"] == pytest.approx(np.median(differences), abs=1e-4)
    assert found["worst_difference"] == pytest.approx(differences.max(), abs=1e-4)
    expected = spearmanr(paper, raymm).statistic
    assert found["rank_correlation"] == pytest.approx(expected, rel=1e-4)


def test_a_common_factor_has_no_effect_on_relative_rows():
    rows = [("a", 1.0, 8.0), ("b", 2.0, 16.0), ("c", 4.0, 64.0)]
    scaled = [(name, paper, 3 * raymm) for name, paper, raymm in rows]
    for one, other in zip(relative(rows), relative(scaled), strict=True):
        assert one.ratio == pytest.approx(other.ratio)
    assert np.prod([row.raymm for row in relative(rows)]) == pytest.approx(1)
    pairs = paired(rows[:2], lambda name: name.upper())
    assert pairs == (Row("B", 2.0, 2.0),)


def test_rows_without_a_figure_name_what_is_missing():
    table = Table("t", "§1", "s", (Row("a", 2.0, None, "the batch"), Row("b", 2.0, 3.0)))
    found = table.to_dict()
    assert found["median_difference"] == 0.5
    assert found["rank_correlation"] is None
    assert found["rows"][0] == {
        "name": "a", "paper": 2.0, "raymm": None, "ratio": None, "missing": "the batch"
    }
    with pytest.raises(ValueError, match="either a figure or a missing quantity"):
        Row("c", 1.0, None)


def test_table_2_of_cornstarch_v2_is_simulated():
    iterations, gains, figure_5 = cornstarch_v2.tables()
    assert len(iterations.rows) == 18 and len(gains.rows) == 9
    assert iterations.to_dict()["rank_correlation"] > 0.9
    assert {row.missing for row in figure_5.rows} == {figure_5.missing} != {""}
    by_name = {row.name: row for row in ROWS}
    for row in iterations.rows:
        name, kind = row.name.split(", ")
        times, counts = by_name[name].variant(kind == "aware")
        work = times.bottleneck / 1e3  # of the slowest stage, per microbatch
        steps = by_name[name].microbatches
        assert steps * work <= row.raymm <= (steps + counts.total - 1) * work * (1 + 1e-9)


def test_moving_queries_is_bound_by_compute():
    device, case = lv_xattn.A100, ("mPLUG-Owl3-7b", 8, 4)
    queries, keys = 8 * 1024, 4 * 1024 * 729
    flops = 14 * queries * keys * 28 * 128 * 4 / 16
    seconds = flops / (device.peak("fp32") * device.efficiency)
    assert lv_xattn.attention_seconds(*case, device, 16, "rotate", 1) == pytest.approx(seconds)
    ring = lv_xattn.attention_seconds(*case, device, 16, "ring", 4)
    nbytes = 6 * keys * 28 * 128 * 4 * 15 / 16 * 4
    assert ring == pytest.approx(nbytes * 4 / 25e9)


def test_printed_throughputs_cover_the_models():
    for table in (cornstarch_v1.TABLE_2, cornstarch_v1.TABLE_7, cornstarch_v1.TABLE_8):
        assert len(table) == 9
    assert set(cornstarch_v1.TABLE_3) == {row.name for row in ROWS if row.table_9}
