"""Python code on pages runs unchanged, with the described results.

The blocks of a page are one program, in the order of the page. The README's program starts its own
Ray; the others run in the session's cluster. ``test_recipes.py`` runs the recipes.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import raymm
from raymm.actors.optimizer.custom_optimizer import optimizer_traits
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from tests.docs.pages import blocks
from tests.parity.test_pipelined_graphs import check

TINY = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
PROGRAMS: dict[str, list[str]] = defaultdict(list)
for block in blocks("python"):
    if not block.skipped and not Path(block.page).name.startswith("recipe-"):
        PROGRAMS[block.page].append(block.text)


def model_folder(names):
    """Return the inputs of docs/masks.md: a model's folder, and some tokens."""
    LlamaForCausalLM(LlamaConfig(vocab_size=61, **TINY)).save_pretrained("tiny")
    names.update(folder="tiny", input_ids=torch.arange(1000)[None] % 61)


def masks_hide(names):
    """Check that a change of the first document affects its outputs and none of the second's."""
    model, ids, mask = (names[name] for name in ("model", "input_ids", "mask"))
    with torch.no_grad():
        before = model(ids, raymm_mask=mask).logits
        ids[0, 3] += 1
        after = model(ids, raymm_mask=mask).logits
    same = (before == after).all(dim=-1)[0]
    assert same[600:].all() and not same[300:600].any()


def losses_are_those_of_one_process(names):
    """Check that the loss of parts is a number, and train the graph next to one process."""
    model, pictures = names["model"], names["pictures"]
    loss = model(input_ids=names["ids"], labels=names["labels"], vision=pictures)
    assert torch.isfinite(loss)
    batch = names["batch"]
    others = [{**batch, "latents": batch["latents"] * (number + 2)} for number in range(2)]
    check(names["dag"], names["plan"], [[one] for one in (batch, *others)])


def plan_can_be_read(names):
    read = raymm.Plan.from_json(open("plan.json").read())
    assert read == names["planned"].plan and read.num_ranks <= 8


def model_has_taken_a_step(names):
    assert names["parallel"].steps_taken == 1
    names["parallel"].shutdown()


def extensions_are_accepted(names):
    config = OptimizerConfig(name=names["lion"], schedule=names["inverse_sqrt"])
    traits = optimizer_traits("optimizer.name", config)
    assert traits.elementwise and traits.tensors == 1
    config.check_schedule("optimizer.schedule", 1000)
    assert config.rate(99) == config.lr > config.rate(399) == config.lr / 2
    hooked_losses_differ_in_training_only(names["Noise"])


def hooked_losses_differ_in_training_only(hook_class):
    vision = SiglipVisionModel(SiglipVisionConfig(image_size=8, patch_size=4, **TINY))
    language_model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **TINY))
    model = raymm.MultimodalModule({"vision": raymm.ModalityModule(vision, "mlp")}, language_model)
    ids = torch.arange(6)[None]
    batch = {
        "input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids),
        "vision": {"pixel_values": torch.ones(1, 3, 8, 8), "sample_index": torch.tensor([0])},
    }

    def losses():
        return [float(model.train(training)(**batch).detach()) for training in (False, True)]

    before = losses()
    model.add_stage_hook("vision", hook_class(0.5))
    evaluated, trained = losses()
    assert evaluated == before[0] and trained != before[1]


BEFORE = {"docs/masks.md": model_folder}
AFTER = {
    "docs/masks.md": masks_hide, "docs/own-model.md": losses_are_those_of_one_process,
    "docs/planning.md": plan_can_be_read, "docs/notebooks.md": model_has_taken_a_step,
    "docs/extending.md": extensions_are_accepted,
}  # fmt: skip


@pytest.mark.ray
@pytest.mark.system
def test_the_readme_runs_with_its_own_ray(tmp_path):
    (text,) = PROGRAMS["README.md"]
    script = tmp_path / "example.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split()[1]) for line in lines if line[:1].isdigit()]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize("page", sorted(set(PROGRAMS) - {"README.md"}))
def test_code_runs(page, ray_cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    BEFORE.get(page, lambda _: None)(names)
    for text in PROGRAMS[page]:
        exec(compile(text, page, "exec"), names)
    AFTER.get(page, lambda _: None)(names)
    (made,) = {"docs/masks.md": ["mask.png"]}.get(page, ["."])
    assert (tmp_path / made).exists()
