"""Steps replanned in the middle of epochs: no sample lost or repeated, and reproducible."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.data import Decision
from raymm.data.sampling.group_sampler import GroupSampler
from raymm.data.sampling.rebalanced_sampler import RebalancedSampler
from raymm.data.sampling.sampler import flat
from raymm.errors import DataError
from raymm.scheduler.minibatch.measured_costs import (
    MeasuredCosts,
    ModuleCost,
    efficiency,
    group_units,
)
from tests.raymm.data.sampling.test_group_sampler import epoch_of, sizes_of

COPIES = {"text": 2, "vision": 1}


def costs_of(seed=0, replicas=True):
    rng = np.random.default_rng(seed)
    modules = {name: ModuleCost(*rng.uniform(0, 1, 3).tolist()) for name in ("vision", "text")}
    factor = float(rng.uniform(0.3, 1.0))
    return MeasuredCosts(modules, {"text": (factor, 2 - factor)} if replicas else {})


def sampler_of(count, groups=4, decisions=(), replicas=COPIES, samples=2, **options):
    sampler = RebalancedSampler(sizes_of(count), groups, samples, **options)
    sampler.follow(replicas, decisions)
    return sampler


def steered(sampler, state, steps, looks):
    """Return (steps, decisions) with costs adopted after some of the steps."""
    found, decisions = [], []
    batches = sampler.batches(state)
    for number in range(steps):
        found.append(next(batches))
        if number in looks:
            costs = costs_of(number)
            decisions.append(Decision(*sampler.place, costs.to_dict()))
            sampler.adopt(costs)
    return found, decisions


def assert_epochs(steps, count):
    """Check that every finished epoch had every sample once."""
    seen, epoch = [], 0
    for groups, after in steps:
        assert all(groups)
        seen += flat(groups)
        if after["epoch"] > epoch:
            assert sorted(seen) == list(range(count))
            seen, epoch = [], after["epoch"]
    assert len(seen) == len(set(seen))
    return epoch


LOOKS = st.sets(st.integers(0, 24), max_size=6)


@settings(max_examples=8)
@given(st.integers(10, 90), st.integers(1, 5), LOOKS)
def test_every_sample_once_whenever_plans_change(count, groups, looks):
    steps, decisions = steered(sampler_of(count, groups), None, 25, looks)
    assert_epochs(steps, count)
    assert len(decisions) == len(looks)
    for (_, after), earlier in zip(steps[1:], steps, strict=False):
        assert json.loads(json.dumps(after)) == after and after != earlier[1]


@settings(max_examples=8)
@given(st.integers(10, 90), LOOKS, st.integers(0, 24))
def test_from_any_state_the_decisions_repeat_the_steps(count, looks, stop):
    """Simulate a kill: earlier decisions are in the state, later ones in the log."""
    whole, decisions = steered(sampler_of(count), None, 25, looks)
    state = json.loads(json.dumps(whole[stop][1]))
    decisions = [Decision(*json.loads(json.dumps(one))) for one in decisions]
    again = sampler_of(count, decisions=decisions)
    assert list(islice(again.batches(state), 24 - stop)) == whole[stop + 1 :]
    assert list(islice(sampler_of(count, decisions=decisions).batches(), 25)) == whole


@settings(max_examples=8)
@given(st.integers(20, 90), LOOKS, st.integers(0, 12), st.integers(1, 6), st.integers(1, 4))
def test_other_groups_or_replicas_take_the_rest(
    count, looks, stop, groups, replicas
):
    first, decisions = steered(sampler_of(count), None, stop + 1, looks)
    state = first[-1][1]
    other = sampler_of(count, groups, decisions, {"text": replicas}, samples=3)
    more, _ = steered(other, state, 40, {0, 3})
    assert_epochs([*first, *more], count) or pytest.fail("no epoch was finished")
    costs = [
        one["costs"] for one in more[0][1]["taken"][-1:]
        if "costs" in one and one["groups"] == groups
    ]
    assert all(len(f) == replicas for one in costs for f in one["copies"].values())


@settings(max_examples=8)
@given(st.integers(20, 90), LOOKS, st.integers(0, 12))
def test_without_rebalancing_the_rest_is_planned_by_units(count, looks, stop):
    first, _ = steered(sampler_of(count), None, stop + 1, looks)
    plain = GroupSampler(sizes_of(count), 4, 2)
    more = list(islice(plain.batches(first[-1][1]), 40))
    assert_epochs([*first, *more], count)
    assert all("costs" not in more[-1][1]["taken"][-1] for _ in more[-1][1]["taken"])


def test_costs_hold_for_the_epochs_after():
    steps, _ = steered(sampler_of(60), None, 30, {2})
    ends = [after for groups, after in steps if after["epoch"] and not after["taken"][0]["steps"]]
    assert ends and all(one["taken"] == [{
        "method": "balanced", "groups": 4, "samples": 2, "seed": 0, "options": {}, "steps": 0,
        "costs": costs_of(2).to_dict(),
    }] for one in ends)  # fmt: skip
    plain = epoch_of(GroupSampler(sizes_of(60), 4, 2), {"epoch": 1, "sizes": "", "taken": []})
    of_one = [groups for groups, after in steps if 1 in (after["epoch"], after["epoch"] - 1)]
    assert of_one[: len(plain)] != [groups for groups, _ in plain]


def test_a_new_epoch_may_have_other_samples():
    steps, _ = steered(sampler_of(60), None, 30, {2})
    end = next(a for _, a in steps if a["epoch"] and not a["taken"][0]["steps"])
    position = sampler_of(61).open(end)
    assert "costs" not in position.how and position.epoch == end["epoch"]
    middle = next(a for _, a in steps if a["taken"] and a["taken"][0]["steps"])
    with pytest.raises(DataError, match="does not fit these 61 samples"):
        sampler_of(61).open(middle)


@pytest.mark.parametrize("costs", [3, {"modules": {}}, {"modules": {"text": [-1]}, "copies": {}}])
def test_invalid_costs_are_not_a_position(costs):
    sampler = sampler_of(30)
    _, state = next(sampler.batches())
    state["taken"][0]["costs"] = costs
    with pytest.raises(DataError, match="does not fit these 30 samples"):
        sampler.open(state)


def test_planned_by_costs_microbatches_take_equally_long():
    """Use costs that units do not express: a slow replica, and quadratic seconds."""
    costs = MeasuredCosts(
        {"vision": ModuleCost(0, 1.0), "text": ModuleCost(0, 0.0, 0.05)}, {"text": (0.75, 1.25)}
    )
    sampler = sampler_of(2000, samples=6)
    found = {}
    batches = sampler.batches()
    next(batches)
    for name, steps in (
        ("units", sampler.upcoming(30)), ("trial", sampler.trial(costs, 30)),
        ("adopted", sampler.adopt(costs) or [groups for groups, _ in islice(batches, 30)]),
    ):
        seconds = [
            costs.seconds(sampler.sizes.names, *group_units(sampler.sizes, groups, True))
            for groups in steps
        ]
        found[name] = float(np.mean([efficiency(one[:, 1:].T) for one in seconds]))
    assert found["units"] < 0.8 and found["trial"] > 0.93 and found["adopted"] > 0.93


def test_trial_plans_use_a_part_of_many_samples(monkeypatch):
    monkeypatch.setattr("raymm.data.sampling.rebalanced_sampler.TRIAL_SAMPLES", 100)
    sampler = sampler_of(900)
    batches = sampler.batches()
    taken = flat(next(batches)[0])
    steps = sampler.trial(costs_of(), 30)
    samples = [one for groups in steps for one in flat(groups)]
    assert len(set(samples)) == len(samples) == 100 or len(steps) == 30
    assert not set(samples) & set(taken)
    assert sampler.trial(costs_of(), 30) == steps


def test_steps_must_be_requested_in_order():
    sampler = sampler_of(60)
    steps = list(islice(sampler.batches(), 5))
    assert sampler.groups_of(steps[0][1]) == steps[0][0]
    assert sampler.groups_of(steps[2][1]) == steps[2][0]  # one that was not requested
    assert sampler.groups_of(steps[1][1]) is None
    assert sampler.groups_of(steps[4][1]) is None  # that request ended all others
