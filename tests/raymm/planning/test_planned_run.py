"""Runs under a multiplexed mapping: the numbers of the pipelined run, by the same commands."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, SiglipVisionConfig

import raymm as public
from raymm.monitor.metrics import read_metrics
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.tiny_run import (
    LLAMA,
    SIGLIP,
    STEPS,
    change,
    checkpoint_tensors,
    curve,
    heldout_rows,
    settings,
    write_config,
)

PATIENCE_S = 240.0


def tiny_model():
    """Return modules like those of the runs' configurations."""
    return public.MultimodalModule(
        {"vision": public.ModalityModule(SiglipVisionConfig(**without_type(SIGLIP)), "mlp")},
        LlamaConfig(**without_type(LLAMA)),
    )


MAPPING = Mapping(2, 10, (
    MultiplexStage((Placement("vision", (1,), 6),), 1.0),
    MultiplexStage((Placement("llm", (0, 1), 10),), 1.0),
))


@pytest.fixture
def mapping(tmp_path):
    """Write a plan with the encoder on a share of one GPU and the language model on both."""
    file = tmp_path / "mapped.json"
    file.write_text(public.plan_of_mapping(tiny_model(), MAPPING, 2).to_json())
    return str(file)


def assert_close(run, other, exactly=0):
    """Check losses and learning rates of all steps; the first ones bitwise."""
    steps = list(zip(curve(run), curve(other), strict=True))
    assert len(steps) == STEPS and steps[:exactly] == [(one, one) for one, _ in steps[:exactly]]
    for mine, due in steps:
        assert abs(mine[1] - due[1]) < 1e-4 and mine[3:] == due[3:]


def test_a_multiplexed_run_resumes_and_is_exported(
    finished, raymm, make_config, inputs, tmp_path, mapping
):
    """Interrupt after five steps, and resume without the mapping option."""
    run = tmp_path / "run"
    heldout = str(inputs / "heldout.jsonl")
    config = make_config({"parallel": {}, "data.heldout": heldout, "run.eval_every": STEPS})
    code, text = raymm(
        "train", config, "--set", f"parallel.plan={mapping}", "--set", "run.steps=5"
    )
    assert code == 0 and "3 stages in 2 slots on 2 ranks (cpu)" in text
    assert "data.microbatches is 2, so the mapping runs 2 times per step" in text
    manifest = read_manifest(CheckpointStore(run).latest())
    assert manifest.step == 5 and manifest.plan["schedule"] == "slots"
    code, text = raymm("train", config)
    assert code == 0 and "resuming with the plan of the checkpoint" in text
    assert_close(run, finished.path)
    mine, due = heldout_rows(run), heldout_rows(finished.path)
    assert [row["step"] for row in mine] == [0, 5, STEPS]
    for row, other in ((mine[0], due[0]), (mine[-1], due[-1])):
        for key in ("heldout_loss", "heldout_gap_vision"):
            assert abs(row[key] - other[key]) < 1e-4
    row = [one for one in read_metrics(run / "metrics.jsonl") if "loss" in one][-1]
    assert set(row["stage_busy"]) == {"vision.0", "llm.0", "llm.0@1"}
    assert all(0 < busy <= 1 for busy in row["stage_busy"].values())
    assert len(row["peak_memory_bytes"]) == 2
    assert set(row["balance"]["copies"]) == {"llm"} and row["balance"]["microbatches"] == 2
    for name in ("plan.json", "plan.png", "loss.png", "schedule.png", "trace.json"):
        assert (run / name).is_file()
    code, text = raymm("export", config, "--out", str(tmp_path / "export"))
    assert code == 0
    exported = load_file(tmp_path / "export/language_model/model.safetensors")
    stored = checkpoint_tensors(run)
    assert exported and all(
        torch.equal(stored[f"llm/module.{name}"], tensor) for name, tensor in exported.items()
    )


def test_styles_resume_from_each_others_checkpoints(
    finished, raymm, make_config, tmp_path, mapping
):
    """Train pipelined for eight steps, multiplexed for two, pipelined to the end."""
    run = finished.copy_until(tmp_path / "run", 8)
    multiplexed = make_config({"parallel": {"plan": mapping}}, "multiplexed.yaml")
    code, text = raymm("train", multiplexed, "--set", "run.steps=10")
    assert code == 0 and "resuming from" in text
    manifest = read_manifest(CheckpointStore(run).latest())
    assert manifest.step == 10 and manifest.plan["schedule"] == "slots"
    code, _ = raymm("train", make_config())
    assert code == 0
    assert_close(run, finished.path, exactly=8)
    assert checkpoint_tensors(run).keys() == checkpoint_tensors(finished.path).keys()


def test_a_killed_multiplexed_run_resumes_bitwise(inputs, raymm, tmp_path, mapping, ray_cluster):
    """Kill the process of a GPU; the resumed run equals an undisturbed one bitwise.

    The message names the rank. It resumes from a checkpoint, and in place from a snapshot.
    """
    values = settings(inputs, tmp_path / "run", 6)
    change(values, "parallel", {"plan": mapping})
    config = write_config(values, tmp_path / "whole.yaml")
    code, _ = raymm("train", config, "--set", f"run.storage_path={tmp_path / 'whole'}")
    assert code == 0
    kill = {"after": [3], "rank": 1}
    change(values, "run.callbacks", [{"tests.support.killing_callbacks:KillRanks": kill}])
    code, text = raymm("train", write_config(values, tmp_path / "killed.yaml"))
    # Process numbers are not in the order of ranks: they wrap around, and starts are concurrent.
    assert code == 0 and re.search(r"rank [01]\b.* died", text), text
    assert "restarting with new processes" in text
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    mine, due = checkpoint_tensors(tmp_path / "run"), checkpoint_tensors(tmp_path / "whole")
    assert mine.keys() == due.keys() and all(torch.equal(mine[n], due[n]) for n in mine)
    change(values, "run.snapshot_every", 1)
    change(values, "run.storage_path", str(tmp_path / "in place"))
    code, text = raymm("train", write_config(values, tmp_path / "in_place.yaml"))
    assert code == 0 and text.count("recovering in place") == 1, text
    assert curve(tmp_path / "in place") == curve(tmp_path / "whole")


def test_options_of_pipelines_are_refused(raymm, make_config, tmp_path, mapping, no_new_actors):
    config = make_config({"parallel": {"plan": mapping, "schedule": "gpipe"}})
    code, printed = raymm("train", config)
    assert code == 2 and "parallel.schedule is 'gpipe', but parallel.plan is given" in printed
    code, printed = raymm("plan", make_config({"parallel": {"plan": mapping}}))
    assert code == 2 and "multiplexed mapping" in printed


@pytest.mark.cells(1)
@pytest.mark.parametrize(("style", "said"), [("multiplexed", "mapping: "), ("auto", "times as")])
def test_raymm_plans_in_the_requested_style(
    raymm, make_config, tmp_path, ray_cluster, style, said
):
    """Use CPUs, which have no quotas, so modules take turns on whole devices."""
    config = make_config({
        "parallel": {"style": style}, "planning.ranks": 2, "planning.degrees": "none",
        "run.steps": 1,
    })
    code, text = raymm("train", config)
    assert code == 0 and said in text
    plan = read_manifest(CheckpointStore(tmp_path / "run").latest()).plan
    assert style == "auto" or plan["schedule"] == "slots"


def test_a_trainer_takes_a_mapping_and_batches_in_memory(ray_cluster, tmp_path):
    """Train on batches with one microbatch without an image; the first losses are the model's."""
    model = tiny_model()
    torch.manual_seed(0)
    ids = torch.randint(5, 20, (3, 6))
    text = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    images = {"pixel_values": torch.randn(2, 3, 8, 8), "sample_index": torch.tensor([0, 2])}
    batches = [{**text, "vision": images}, [{**text, "vision": images}, text]]
    trainer = public.Trainer(
        model, MAPPING, batches,
        public.RunConfig(storage_path=str(tmp_path / "run"), steps=2, device="cpu"),
        optimizer=public.OptimizerConfig(lr=0.0), resources=public.RankResources(cpus=0.25),
    )
    history = trainer.fit().history
    assert trainer.plan.schedule == "slots" and [row["label_tokens"] for row in history] == [15, 30]
    for row, batch in zip(history, batches, strict=True):
        parts = batch if isinstance(batch, list) else [batch]
        due = sum(model(**part, label_tokens=row["label_tokens"]).item() for part in parts)
        assert row["loss"] == pytest.approx(due, rel=1e-5)


def without_type(values):
    """Return the arguments of a section's class."""
    return {name: value for name, value in values.items() if name != "model_type"}


def test_a_style_option_requires_automatic_planning(
    raymm, make_config, tmp_path, mapping, no_new_actors
):
    config = make_config({"parallel": {"plan": mapping, "style": "auto"}})
    code, printed = raymm("train", config)
    assert code == 2 and "parallel.style is 'auto', but parallel.plan is given" in printed
    config = make_config({"parallel": {"style": "side_by_side"}})
    code, printed = raymm("train", config)
    assert code == 2 and "parallel.style" in printed and "'multiplexed'" in printed
