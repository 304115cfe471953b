"""Planned steps from ``data.batching`` to built microbatches."""

import json
from itertools import islice

import numpy as np
import pytest
import ray
from pydantic import ValidationError

from raymm.data import (
    DataConfig,
    EpochSampler,
    GroupSampler,
    ItemTokens,
    RebalancedSampler,
    StepBuilder,
    StepLoader,
    local_steps,
    open_split,
    scan,
    training_sampler,
)
from raymm.data.sampling import sampler as samplers
from raymm.data.sampling.batching import sample_sizes
from raymm.errors import DataError
from tests.raymm.data.loading.test_loader import assert_same

FIELDS = {"train": "a", "tokenizer": "t", "batch_size": 8, "microbatches": 4}


@pytest.fixture
def planned_config(make_config, tmp_path):
    """Return a configuration of planned steps, with cached scans in ``tmp_path / "scans"``."""

    def make(method="balanced", count=40, batching=None, **overrides):
        chosen = {"method": method, "cache": str(tmp_path / "scans"), **(batching or {})}
        return make_config(count=count, batching=chosen, **overrides)

    return make


def widths(items):
    """Return an image's width in pixels as its units."""
    return items[:, 0]


def broken(items):
    """Return no units."""
    return items


def ids(step):
    return [list(meta.sample_ids) for meta in step.meta]


@pytest.mark.parametrize("method", ["balanced", "length_grouped"])
def test_groups_arrive_as_microbatches(planned_config, method):
    """Check also that an epoch has every sample once."""
    config = planned_config(method)
    sampler = training_sampler(config, open_split(config, "train"))
    seen = []
    for step, (groups, after) in zip(
        local_steps(config, steps=30), sampler.batches(), strict=False
    ):
        assert ids(step) == [[f"s{index}" for index in group] for group in groups]
        assert step.state_after == after and len(groups) <= 3
        seen += [one for group in ids(step) for one in group]
        if after["epoch"]:
            break
    assert sorted(seen) == sorted(f"s{index}" for index in range(40))


def test_workers_equal_the_local_stream_from_any_step(planned_config, ray_cluster):
    config = planned_config(num_workers=2, on_error="skip")
    reference = list(local_steps(config, steps=9))
    with StepLoader(config, steps=9) as loader:
        for step, want in zip(loader, reference, strict=True):
            assert_same(step, want)
            assert all(isinstance(r, ray.ObjectRef) for p in step.microbatches for r in p.values())
    state = json.loads(json.dumps(reference[3].state_after))
    with StepLoader(config, start_state=state, steps=5) as loader:
        assert [(s.state_after, s.meta) for s in loader] == [
            (want.state_after, want.meta) for want in reference[4:]
        ]


def test_heldout_data_keep_their_order(planned_config):
    steps = list(local_steps(planned_config(), "heldout"))
    random = list(local_steps(planned_config().model_copy(
        update={"batching": DataConfig(**FIELDS).batching}), "heldout"))  # fmt: skip
    assert [step.meta for step in steps] == [step.meta for step in random]


def test_unusable_samples_and_empty_groups_are_removed(planned_config, tmp_path):
    config = planned_config(on_error="skip")
    for name in ("i1.png", "i6.png", "a2.wav"):
        (tmp_path / name).write_bytes(b"broken")
    built = StepBuilder(config, open_split(config, "train")).build([[0, 1, 5], [6, 2], [7]])
    assert [meta.sample_ids for meta in built.meta] == [("s0", "s5"), ("s7",)]
    assert [one.id for one in built.skipped] == ["s1", "s6", "s2"]
    with pytest.raises(DataError, match="none of the step's 2 samples is usable"):
        StepBuilder(config, open_split(config, "train")).build([[1], [6]])
    seen = []
    for step in local_steps(config):
        seen += [one for group in ids(step) for one in group] + [s.id for s in step.skipped]
        if step.state_after["epoch"]:
            break
    assert sorted(seen) == sorted(f"s{index}" for index in range(40))


def test_the_scan_is_cached_and_reports_progress(planned_config, tmp_path, monkeypatch):
    config = planned_config()
    seen = []
    training_sampler(config, open_split(config, "train"), progress=lambda *one: seen.append(one))
    assert seen == [(40, 40)] and len(list((tmp_path / "scans").iterdir())) == 1
    # Another scan would raise a TypeError.
    monkeypatch.setattr("raymm.data.sampling.scanner._parts", None)
    training_sampler(config, open_split(config, "train"))


def test_random_steps_are_not_scanned(make_config, monkeypatch):
    monkeypatch.setattr("raymm.data.sampling.batching.scan", None)
    config = make_config()
    assert isinstance(training_sampler(config, open_split(config, "train")), EpochSampler)


def test_sizes_are_tokens_of_the_model(planned_config):
    """Count 13 tokens of an image in its encoder, and 4 prepended ones in the language model."""
    config = planned_config()
    found = scan(open_split(config, "train"), config)
    sizes = sample_sizes(found, config, {"vision": ItemTokens(13, 4)})
    assert sizes.names == ("vision", "audio", "text")
    np.testing.assert_array_equal(sizes.values[:, 0], 13 * found.counts["vision"])
    np.testing.assert_array_equal(sizes.values[:, 1], found.counts["audio"])
    np.testing.assert_array_equal(
        sizes.values[:, 2], found.text_tokens + 4 * found.counts["vision"]
    )
    custom = planned_config(batching={"units": {"vision": f"{__name__}:widths"}})
    sizes = sample_sizes(found, custom, {"vision": ItemTokens(13, 4)})
    np.testing.assert_array_equal(sizes.values[:, 0], 12 * found.counts["vision"])


def test_budgets_limit_every_microbatch(planned_config):
    config = planned_config(batching={"budgets": {"text": 60}})
    lengths = [meta.tokens for step in local_steps(config, steps=12) for meta in step.meta]
    assert max(lengths) <= 60
    largest = [meta.tokens for step in local_steps(planned_config(batch_size=18), steps=12)
               for meta in step.meta]  # fmt: skip
    assert max(largest) > 60


def test_budgets_are_in_tokens_of_items(planned_config):
    """Fit two images of 13 tokens into 38."""
    config = planned_config(batching={"budgets": {"vision": 38}})
    dataset = open_split(config, "train")
    sampler = training_sampler(config, dataset, {"vision": ItemTokens(13)})
    found = [dataset.counts["vision"][group].sum() for groups, _ in islice(sampler.batches(), 12)
             for group in groups]  # fmt: skip
    assert max(found) == 2
    few = planned_config(batching={"budgets": {"vision": 25}})
    with pytest.raises(DataError, match="has 26 units of vision, above the budget of 25"):
        training_sampler(few, dataset, {"vision": ItemTokens(13)})


def test_an_item_of_many_tokens_does_not_shrink_microbatches(planned_config):
    """Check that the budget is not one and a half items of 250 tokens, which would fit one item."""
    config = planned_config(batch_size=9)
    dataset = open_split(config, "train")
    steps = {}
    for tokens in (1, 250):
        sampler = training_sampler(config, dataset, {"vision": ItemTokens(tokens)})
        steps[tokens] = [groups for groups, _ in islice(sampler.batches(), 4)]
    assert steps[1] == steps[250]


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"budgets": {"text": 5}}, r"data\.batching: sample \d+ has \d+ units of text"),
        ({"units": {"vision": "nowhere:fn"}}, r"data\.batching\.units\.vision: cannot import"),
        ({"units": {"vision": f"{__name__}:broken"}}, r"units\.vision: .*32 integers"),
        ({"cache": "/proc/nowhere"}, r"data\.batching\.cache: .*'/proc/nowhere'"),
    ],
)
def test_unplannable_samples_are_found_at_the_start(planned_config, batching, message):
    config = planned_config(batching=batching)
    with pytest.raises(DataError, match=message):
        training_sampler(config, open_split(config, "train"))


def test_a_method_alone_is_enough():
    assert DataConfig(**FIELDS).batching.method == "random"
    assert DataConfig(**FIELDS, batching="balanced").batching.method == "balanced"


def test_rebalancing_is_enabled_in_any_of_three_ways(planned_config):
    for given, every in ((True, 50), (7, 7), ({"every": 9, "gain": 0.1}, 9)):
        config = planned_config(batching={"rebalance": given})
        assert config.batching.rebalance.every == every and config.batching.options == {}
        sampler = training_sampler(config, open_split(config, "train"))
        assert isinstance(sampler, RebalancedSampler)
    config = planned_config(batching={"rebalance": False})
    assert config.batching.rebalance is None
    assert type(training_sampler(config, open_split(config, "train"))) is GroupSampler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batching": "sorted"}, "'random', 'balanced' or 'length_grouped'"),
        ({"batching": {"method": "length_grouped", "alike": 0.1}}, "alike needs method 'balanced'"),
        ({"batching": {"rebalance": True}}, "rebalance needs method 'balanced'"),
        ({"batching": {"method": "balanced", "rebalance": 0}}, "greater than 0"),
        ({"batching": {"method": "balanced", "rebalance": {"often": 3}}}, "Extra inputs"),
        ({"batching": {"cache": "x"}}, "units and cache are not accepted"),
        ({"batching": "balanced", "shuffle": False}, "shuffle must be true"),
        ({"batching": {"method": "balanced", "budgets": {"video": 1}}}, "'video'; accepted: text"),
        ({"batching": {"method": "balanced", "budgets": {"text": 0}}}, "greater than 0"),
    ],
)
def test_invalid_batching_is_named(fields, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**FIELDS | fields)


def test_steps_with_and_without_groups():
    assert samplers.flat([[1, 2], [3]]) == [1, 2, 3] == samplers.flat([1, 2, 3])
    assert samplers.is_grouped([[1]]) and not samplers.is_grouped([np.int64(1)])
    assert list(islice(samplers.flat([]), 1)) == []
