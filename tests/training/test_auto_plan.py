"""Runs without a layout: raymm plans them, and a resumed run keeps its plan."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig

import raymm as public
from raymm.costs.named_devices import device_called
from raymm.errors import ConfigError
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.tiny_run import checkpoint_tensors, curve, remove_checkpoints


@pytest.fixture
def planned_config(make_config):
    """Return a configuration of the standard run without layouts, for two ranks."""
    def make(**changes):
        return make_config({"parallel": None, "planning": {"ranks": 2}, **changes})

    return make


def test_train_plans_saves_and_plans_again_if_needed(raymm, planned_config, tmp_path, ray_cluster):
    code, text = raymm("train", planned_config(), "--set", "run.steps=2")
    assert code == 0, text
    assert "plan: vision" in text and "per step" in text and "costs of cpu, fp32" in text
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.num_ranks <= 2 and plan.num_microbatches == 2
    assert plan.profile is not None and plan.profile.source == "analytic"
    # Token counts are those of the data: four patches per image, two samples per microbatch.
    assert plan.profile.tokens["vision"] % 4 == 0
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2]

    # A resumed run whose plan no longer fits is planned again.
    config = planned_config(**{"data.microbatches": 4})
    code, text = raymm("train", config, "--set", "run.steps=3")
    assert code == 0, text
    assert "planning again: the checkpoint's plan has 2 microbatches, but data" in text
    assert Plan.from_json((tmp_path / "run" / "plan.json").read_text()).num_microbatches == 4


def test_a_resumed_run_keeps_its_plan_bit_for_bit(raymm, planned_config, tmp_path, ray_cluster):
    assert raymm("train", planned_config(), "--set", "run.steps=3")[0] == 0
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "run", whole)
    remove_checkpoints(tmp_path / "run", after=2)
    first = read_manifest(CheckpointStore(tmp_path / "run").latest()).plan
    # A new plan would differ: there are more ranks now.
    more = planned_config(planning={"ranks": 3})
    code, text = raymm("train", more, "--set", "run.steps=3")
    assert code == 0 and "resuming with the plan of the checkpoint" in text
    assert read_manifest(CheckpointStore(tmp_path / "run").latest()).plan == first
    assert curve(tmp_path / "run") == curve(whole)
    mine, theirs = checkpoint_tensors(tmp_path / "run"), checkpoint_tensors(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def tiny_model():
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)
    vision = public.ModalityModule(
        SiglipVisionConfig(image_size=16, patch_size=8, num_hidden_layers=2, **sizes), "mlp",
        frozen=True,
    )
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    return public.MultimodalModule({"vision": vision}, config)


def batch(rows=4):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (rows, 6), generator=generator)
    images = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "labels": ids, "vision": {"pixel_values": images}}


def test_a_trainer_without_specs_plans(tmp_path, ray_cluster):
    run = public.RunConfig(storage_path=str(tmp_path / "run"), steps=2, device="cpu")
    trainer = public.Trainer(
        tiny_model(), data=[batch()], run_config=run,
        resources=public.RankResources(cpus=3.0),  # of 8 CPUs, which leaves room for two ranks
    )
    assert trainer.plan is None
    result = trainer.fit()
    assert 1 <= trainer.plan.num_ranks <= 2
    assert len(result.history) == 2
    saved = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert Plan.from_dict(saved) == trainer.plan
    # Four rows of six text tokens and four image tokens, in as many microbatches.
    samples = 4 // trainer.plan.num_microbatches
    assert trainer.plan.profile.tokens == {"vision": 4 * samples, "llm": 10 * samples}


def test_a_trainer_needs_data(tmp_path):
    run = public.RunConfig(storage_path=str(tmp_path / "run"), steps=2)
    with pytest.raises(ConfigError, match="data is None"):
        public.Trainer(tiny_model(), run_config=run)


def test_plan_is_a_function_for_notebooks(tmp_path):
    planned = public.plan(
        tiny_model(), ranks=4, microbatches=4, device="H100", tokens={"llm": 64}
    )
    assert planned.plan.num_ranks <= 4 and planned.plan.num_microbatches == 4
    assert planned.table().row_count == len(planned.plan.stages)
    assert "<table>" in planned._repr_html_() and "per step" in planned._repr_html_()
    assert "chosen" in planned.explain()
    assert planned.draw(tmp_path / "step.svg").read_text().lstrip().startswith("<?xml")
    assert planned.seconds == pytest.approx(planned.proposal.best.seconds)
    assert planned.seconds >= planned.proposal.bound * (1 - 1e-9)


def test_fewer_ranks_than_modules():
    for ranks in (1, 2):
        planned = public.plan(tiny_model(), ranks=ranks, microbatches=4, tokens={"llm": 64})
        assert planned.plan.num_ranks <= ranks
        assert planned.unfit is None


class SkipEncoder(torch.nn.Module):
    """Encoder whose last block needs the first one's output, so that no cut is possible."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def forward(self, x):
        first = hidden = self.blocks[0](x)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden + first


def test_a_module_that_cannot_be_cut_stays_whole():
    encoder = public.ModalityModule(
        SkipEncoder(), "linear", hidden_size=256, example_inputs={"x": torch.randn(1, 4, 256)}
    )
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=2, hidden_size=16, intermediate_size=16,
        num_attention_heads=2,
    )
    model = public.MultimodalModule({"vision": encoder}, config)
    planned = public.plan(
        model, ranks=5, microbatches=8, tokens={"vision": 4096, "llm": 8},
        layouts=("modality_parallel",), degrees="none",
    )
    stages = planned.plan.module_stages("vision")
    assert stages[0].layers[0] == 0 and stages[0].layers[1] >= 4 and len(stages) <= 2
    (note,) = [note for note in planned.notes if "vision is not cut into stages" in note]
    assert "SkipEncoder" in note and note in planned.explain()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-40G", "A100-40GB"), ("A100-80G", "A100-80GB"), ("A100", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA L4", "L4"), ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA H100 NVL", "H100-NVL"), ("H100", "H100"),
        ("NVIDIA H200 NVL", "H200-NVL"), ("NVIDIA H20", "H20"), ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"), ("NVIDIA L40S", "L40S"), ("NVIDIA GB200", None),
        ("AMD EPYC", None), ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_device_names_of_drivers_are_recognized(name, expected):
    found = device_called(name)
    assert (found and found.name) == expected
