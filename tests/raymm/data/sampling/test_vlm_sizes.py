"""Balanced steps of a VLM: sizes are those of its processor's output."""

from __future__ import annotations

import numpy as np
import pytest

from raymm.config.vlm import example_batch
from raymm.data import DataConfig, local_steps, open_split, scan
from raymm.data.loading.processed import ProcessedSizes, measure_of
from raymm.data.sampling.batching import sample_sizes, training_sampler
from raymm.data.sampling.scanner import SampleScan
from raymm.monitor.balance import microbatch_loads
from tests.support.tiny_folders import modalities, tiny

TOWERS = {"vision": {"pixel_values": "pixel_values"}}


def configured(kind, tmp_path, **changes):
    folder, data = tiny(kind)
    return DataConfig.model_validate({
        "train": data, "processor": folder, "modalities": modalities(kind), "towers": TOWERS,
        "batch_size": 6, "microbatches": 2, "seed": 1, **changes,
    })


def test_sample_sizes_equal_a_microbatch_of_it_alone(tmp_path):
    config = configured("gemma3", tmp_path, batch_size=1, microbatches=1)
    dataset = open_split(config, "train")
    scanned = scan(dataset, config, measure=ProcessedSizes)
    sizes = scanned.sizes({"image": lambda items: items[:, 0]}).values
    batch = example_batch(config)
    assert sizes[:, 0].max() == 2 * batch["pixel_values"][0].numel()  # two images
    alone = {
        (meta.sample_ids[0]): meta
        for step in local_steps(config, steps=len(dataset)) for meta in step.meta
    }
    assert len(alone) == len(dataset)
    for index, (pixels, tokens) in enumerate(sizes.tolist()):
        meta = alone[dataset[index].id]
        assert tokens == meta.tokens
        assert pixels == microbatch_loads([meta], ["vision"], True)[0, 0]


def test_microbatches_of_a_balanced_step_are_similar(tmp_path):
    batching = {"method": "balanced", "cache": str(tmp_path)}
    config = configured("gemma3", tmp_path, batching=batching)
    sampler = training_sampler(
        config, open_split(config, "train"), measure=measure_of(config)
    )
    spread = {"random": 0, "balanced": 0}
    for method, chosen in (("balanced", sampler), ("random", None)):
        own = config if chosen is not None else configured("gemma3", tmp_path)
        for step in local_steps(own, steps=6, sampler=chosen):
            loads = microbatch_loads(step.meta, ["vision"], True)
            spread[method] += int((loads.max(0) - loads.min(0)).sum())
    assert spread["balanced"] < spread["random"] / 2


@pytest.mark.parametrize("rebalance", [None, 5])
def test_measured_costs_are_those_of_towers(tmp_path, rebalance):
    config = configured(
        "gemma3", tmp_path, batching={"method": "balanced", "rebalance": rebalance},
        modalities={"image": {"column": "images"}, "video": {"column": "videos"}},
    )
    counts = {"image": np.array([2, 0]), "video": np.array([1, 1])}
    items = {"image": np.array([[7, 1, 1], [9, 1, 1]]), "video": np.array([[30, 1, 1], [50, 1, 1]])}
    scanned = SampleScan(
        np.array([5, 6]), counts, items, np.zeros(2, np.int64), ("one",), np.zeros(0, np.int64), ()
    )
    sizes = sample_sizes(scanned, config, {})
    if rebalance is None:
        assert sizes.names == ("image", "video", "text")
        assert sizes.values.tolist() == [[16, 30, 5], [0, 50, 6]]
    else:
        assert sizes.names == ("vision", "text")
        assert sizes.values.tolist() == [[46, 5], [50, 6]]


def test_budgets_hold_with_measured_costs(tmp_path):
    batching = {"method": "balanced", "cache": str(tmp_path), "rebalance": 5}
    most = 3 * example_batch(configured("gemma3", tmp_path))["pixel_values"][0].numel()
    config = configured(
        "gemma3", tmp_path, batching={**batching, "budgets": {"image": most}}, microbatches=1
    )
    (plain, limited) = (
        training_sampler(c, open_split(c, "train"), measure=measure_of(c))
        for c in (configured("gemma3", tmp_path, batching=batching, microbatches=1), config)
    )
    loads = [
        max(microbatch_loads(step.meta, ["vision"], True)[:, 0].max()
            for step in local_steps(config, steps=6, sampler=sampler))
        for sampler in (plain, limited)
    ]  # fmt: skip
    assert loads[1] <= most < loads[0]
