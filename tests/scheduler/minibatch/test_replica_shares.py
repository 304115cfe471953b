"""Distribution of samples over replicas of different speeds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.minibatch.balanced import plan_balanced
from raymm.scheduler.minibatch.measured_costs import MeasuredCosts, ModuleCost, group_units
from raymm.scheduler.minibatch.problem import SampleSizes
from raymm.scheduler.minibatch.replica_shares import EVEN_WEIGHT, split_over_replicas

MODULES = {"vision": ModuleCost(0.0, 0.3), "text": ModuleCost(0.2, 0.01)}


def sizes_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return SampleSizes(
        ("vision", "text"), np.stack([rng.integers(0, 3, count), rng.integers(5, 60, count)], 1)
    )


def text_seconds(plan, sizes, costs):
    """Return (steps, groups) seconds of the text's module."""
    steps = []
    for step in range(plan.steps):
        groups = [plan.group(step, rank) for rank in range(plan.ranks)]
        steps.append(costs.seconds(sizes.names, *group_units(sizes, groups, True))[:, 1])
    return np.array(steps)


def test_slow_replicas_get_less_and_take_as_long():
    sizes = sizes_of(600)
    costs = MeasuredCosts(MODULES, {"text": (0.75, 1.25)})
    before = plan_balanced(sizes, 4, measured=MeasuredCosts(MODULES))
    after = plan_balanced(sizes, 4, measured=costs)
    assert before.steps == after.steps
    lost = {}
    for name, plan in (("before", before), ("after", after)):
        seconds = text_seconds(plan, sizes, costs)
        lost[name] = float((1 - seconds.mean(1) / seconds.max(1)).mean())
    assert lost["before"] > 0.18 and lost["after"] < 0.06
    # The distribution does not change which samples share a step.
    for step in range(before.steps):
        ids = [
            sorted(np.concatenate([p.group(step, r) for r in range(4)])) for p in (before, after)
        ]
        assert ids[0] == ids[1]


def objective(groups, sizes, costs):
    units, squares = group_units(sizes, groups, True)
    even = MeasuredCosts(costs.modules).seconds(sizes.names, units, squares)
    # Cost of a group for the module if it had any units, as the distribution counts it.
    even[:, 1] += 0.2 * (units[:, 1] == 0)
    weights = costs.factors(sizes.names, len(groups)).T * [EVEN_WEIGHT, 1]
    return float((weights * even**2).sum())


@given(st.integers(0, 10**6))
def test_distribution_is_near_the_optimum(seed):
    """Try all assignments of seven samples to two groups."""
    sizes = sizes_of(7, seed)
    costs = MeasuredCosts(MODULES, {"text": (0.7, 1.3)})
    samples, offsets = split_over_replicas(
        np.arange(7), np.array([0, 4, 7]), 2, sizes, costs, np.full(2, np.inf)
    )
    assert sorted(samples) == list(range(7)) and 0 < offsets[1] < 7
    found = objective([samples[: offsets[1]], samples[offsets[1] :]], sizes, costs)
    best = min(
        objective([[i for i in range(7) if not bits >> i & 1],
                   [i for i in range(7) if bits >> i & 1]], sizes, costs)
        for bits in range(1, 2**7 - 1)
    )  # fmt: skip
    assert found <= 1.05 * best


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(6, 40))
def test_budgets_hold_and_nothing_is_lost(seed, ranks, count):
    sizes = sizes_of(count, seed)
    costs = MeasuredCosts(MODULES, {"text": (0.5, 1.5), "vision": (1.4, 0.8, 0.8)})
    plan = plan_balanced(sizes, ranks, (8, 150), measured=costs)
    assert sorted(plan.samples) == list(range(count)) and len(plan.left_out) == 0
    for group in range(plan.groups):
        mine = plan.samples[plan.offsets[group] : plan.offsets[group + 1]]
        assert (sizes.values[mine].sum(0) <= (8, 150)).all()


def test_a_step_without_another_way_keeps_its_groups():
    sizes = SampleSizes(("text",), np.array([[6], [4], [5], [5]]))
    costs = MeasuredCosts({"text": ModuleCost(0, 1.0)}, {"text": (0.5, 1.5)})
    groups = np.array([0, 1, 2, 3]), np.array([0, 2, 4])
    samples, offsets = split_over_replicas(*groups, 2, sizes, costs, np.array([10.0]))
    assert sorted(sizes.values[samples[: offsets[1]], 0].tolist()) in ([4, 6], [5, 5])
    samples, offsets = split_over_replicas(*groups, 2, sizes, costs, np.array([9.0]))
    assert samples.tolist() == [0, 1, 2, 3] and offsets.tolist() == [0, 2, 4]
