"""Balanced steps of a VLM: sizes are those of its processor's output."""

from __future__ import annotations

import pytest

from raymm.config.vlm import example_batch
from raymm.data import DataConfig, local_steps, open_split, scan
from raymm.data.loading.processed import ProcessedSizes, measure_of
from raymm.data.sampling.batching import training_sampler
from raymm.monitor.balance import microbatch_loads
from tests.tiny_folders import modalities, tiny

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


def test_measured_costs_are_refused(tmp_path):
    batching = {"method": "balanced", "rebalance": 5}
    with pytest.raises(ValueError, match="rebalance is .*accepted with a processor: none"):
        configured("gemma3", tmp_path, batching=batching)
