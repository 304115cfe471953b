"""Figures of plans equal their definitions, written as loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.transformer_cost import transformer_cost
from raymm.errors import PlanError
from raymm.scheduler.minibatch.costs import CostModel, UnitCost
from raymm.scheduler.minibatch.metrics import balance, dist_ratio, loads, step_efficiency
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes
from tests.support.minibatch_data import groups_of, sizes


@st.composite
def plans(draw: st.DrawFn) -> tuple[MiniBatchPlan, SampleSizes]:
    """Draw any partition of some of the samples, packed or not; groups may be empty."""
    of = draw(sizes(most=30))
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    order = np.array(draw(st.permutations(range(len(of)))))
    planned = draw(st.integers(1, len(of)))
    cuts = draw(st.lists(
        st.integers(0, planned), min_size=ranks * steps - 1, max_size=ranks * steps - 1,
    ))
    return MiniBatchPlan(
        method="any", ranks=ranks, samples=order[:planned],
        offsets=np.array([0, *sorted(cuts), planned]), left_out=np.sort(order[planned:]),
        packed=draw(st.booleans()), budgets=None, seed=0, epoch=0,
    ), of


def brute(
    plan: MiniBatchPlan, of: SampleSizes, model: CostModel, depth: int
) -> dict[str, object]:
    """Return OmniBal's eq. 1 and 2 and the efficiencies, sample by sample."""
    groups = groups_of(plan)
    last = len(of.names) - 1  # the padded modality
    pad = padded = 0
    paid, cost = [], []
    for step in groups:
        paid.append([])
        cost.append([])
        for group in step:
            units, its_cost = [], 0.0
            for column, unit in enumerate(model.modalities):
                sizes_of = [int(of.values[sample, column]) for sample in group]
                if column == last and not plan.packed and group:
                    longest = max(sizes_of)
                    pad += sum(longest - x for x in sizes_of)
                    padded += longest * len(group)
                    sizes_of = [longest] * len(group)
                units.append(sum(sizes_of))
                its_cost += sum(unit.linear * x + unit.quadratic * x * x for x in sizes_of)
            paid[-1].append(units)
            cost[-1].append(its_cost)

    def dist(rows: list[list[float]]) -> float:
        ratios = [
            sum(max(row) - x for x in row) / (max(row) * len(row)) if max(row) else 0.0
            for row in rows
        ]
        return sum(ratios) / len(ratios)

    slowest = [max(row) for row in cost]
    slots = [max(slowest[at : at + depth]) for at in range(len(slowest))]
    flat = [x for row in cost for x in row]
    share = np.bincount(of.sources[plan.samples], minlength=3) / len(plan.samples)
    distances = []
    for step in groups:
        mine = [int(of.sources[sample]) for group in step for sample in group]
        counts = [mine.count(kind) / max(len(mine), 1) for kind in range(3)]
        distances.append(sum(abs(a - b) for a, b in zip(counts, share, strict=True)) / 2)
    return {
        "loads": paid,
        "pad": pad / padded if padded else 0.0,
        "dist": {
            name: dist([[units[m] for units in row] for row in paid])
            for m, name in enumerate(of.names)
        },
        "efficiency": 1.0 - dist(cost),
        "step_efficiency": sum(flat) / len(flat) / (sum(slots) / len(slots)) if sum(flat) else 1.0,
        "mixing": sum(distances) / len(distances),
    }


@given(plans(), st.integers(1, 6), st.integers(0, 3))
def test_figures_are_as_defined(case, depth: int, quadratic: int) -> None:
    plan, of = case
    model = CostModel(tuple(
        UnitCost(1.0 + m, 0.01 * quadratic * (m + 1)) for m in range(len(of.names))
    ))
    found, expected = balance(plan, of, model, depth=depth), brute(plan, of, model, depth)
    assert loads(plan, of).tolist() == expected["loads"]
    assert found.pad == pytest.approx({of.names[-1]: expected["pad"]})
    assert found.dist == pytest.approx(expected["dist"])
    assert found.efficiency == pytest.approx(expected["efficiency"])
    assert found.step_efficiency == pytest.approx(expected["step_efficiency"])
    assert found.mixing == pytest.approx(expected["mixing"])
    assert found.average_batch == len(plan.samples) / plan.groups
    assert found.left_out == len(of) - len(plan.samples)
    assert 0.0 <= found.random_mixing <= 1.0


def test_ratios_of_a_case_worked_by_hand() -> None:
    assert dist_ratio(np.array([[4, 2], [3, 3]])) == (1 / 4 + 0) / 2
    assert step_efficiency(np.array([[2.0], [1.0], [1.0]]), 1) == 1.0
    # Slots of two in flight: max(2, 1), max(1, 1), and the last one alone.
    assert step_efficiency(np.array([[2.0], [1.0], [1.0]]), 2) == 1.0
    assert step_efficiency(np.array([[1.0], [2.0], [1.0]]), 2) == pytest.approx(4 / 5)


def test_cost_of_a_transformer() -> None:
    # 1 layer of width 8 has 12 * 8 * 8 parameters (Kaplan et al. 2020, Table 1).
    model = transformer_cost(768, 1, 8, causal=True)
    assert (model.linear, model.quadratic) == (1536.0, 16.0)
    tiles = transformer_cost(768, 1, 8, tokens_per_unit=10, units_attend=False)
    assert (tiles.linear, tiles.quadratic) == (15360.0 + 4 * 8 * 100, 0.0)
    with pytest.raises(PlanError, match="1 modalities, the sizes have 2"):
        CostModel((model,)).of_units(np.ones((3, 2)))
