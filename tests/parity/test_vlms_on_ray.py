"""VLMs on Ray actors equal their own forward in one process.

Compares loss, gradients and updates.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.experts.router_loss import RouterLoss
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.probe import small_model
from raymm.actors.probe.vlm.cut import cut_tower
from raymm.errors import DataError, ModelError
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, vlm_plan
from tests.support.multiplex_models import gradient_problems
from tests.support.trainer_groups import trainer_groups

# eps keeps elements whose gradient is rounding error from moving at the full rate; the norm makes
# clipping take effect.
MAX_NORM = 0.02
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=MAX_NORM)
PARAMETER_TOLERANCE = 1e-3  # relative to the change of a parameter
ROUNDING = 1e-8  # for gradients that a softmax cancels
STEPS = 3
TWO = ParallelSpec(pp=2)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def whole(name, train=None):
    model = getattr(transformers, name)
    config, microbatches = runnable(Family(KIND, model, model.config_class))
    config.architectures = [name]
    return from_pretrained(config, microbatches[0], train, seed=4), microbatches


def check(model: PretrainedVlm, plan, microbatches):
    reference = model.materialize()
    trained = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    with ParallelModel(model, plan, optimizer=OPTIMIZER, timeout_s=120) as running:
        loss = model.loss(microbatches)
        loss.backward()
        output = running.execute(microbatches)
        assert abs(output.loss - loss.item()) <= 1e-6 * abs(loss.item())
        due = {name: p.grad for name, p in trained.items()}
        assert gradient_problems(running.gradients(), due) == []
        running.zero_grad()
        optimizer = torch.optim.AdamW(
            trainer_groups(reference, OPTIMIZER.weight_decay), lr=OPTIMIZER.lr,
            betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model.loss(microbatches)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
            optimizer.step()
            output = running.train_step(microbatches)
            assert abs(output.loss - loss.item()) <= 1e-5 * abs(loss.item())
        after = running.parameters()
    assert after.keys() == trained.keys()
    for name, parameter in trained.items():
        moved = (parameter.detach() - before[name]).norm()
        difference = (after[name] - parameter.detach()).norm()
        assert difference <= PARAMETER_TOLERANCE * moved + ROUNDING, name


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "name, specs, train",
    [
        ("Qwen2_5_VLForConditionalGeneration", {"vision": TWO, "llm": TWO}, None),
        ("Qwen3VLForConditionalGeneration", {"vision": TWO, "llm": TWO}, None),
        (
            "LlavaForConditionalGeneration", {"vision": ParallelSpec(dp=2), "llm": TWO},
            {"vision": "frozen"},
        ),
    ],
)  # fmt: skip
def test_steps_equal_the_models_own_forward(name, specs, train):
    model, microbatches = whole(name, train)
    microbatches = [*microbatches, microbatches[0]]
    check(model, vlm_plan(model, specs, len(microbatches)), microbatches)


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "llm", [ParallelSpec(pp=2, cp=2), ParallelSpec(pp=2, dp=2, sharding="fsdp", ep=2)]
)
def test_a_vlms_router_loss_is_that_of_the_whole_step(llm):
    model, microbatches = whole("Qwen3VLMoeForConditionalGeneration")
    text = model.source.config.text_config
    text.output_router_logits, text.router_aux_loss_coef = True, 0.1
    model = from_pretrained(model.source.config, microbatches[0])
    assert model.mixture.loss == RouterLoss(text.num_experts, text.num_experts_per_tok, 0.1)
    for batch in microbatches:
        own = model.materialize()(**batch, use_cache=False)
        assert model.loss([batch]).item() == pytest.approx(own.loss.item(), rel=1e-5)
        assert own.aux_loss.item() > 0
    check(model, vlm_plan(model, {"llm": llm}, len(microbatches)), microbatches)


def test_a_folder_is_trained_from_its_weights(tmp_path):
    model, microbatches = whole("LlavaForConditionalGeneration")
    model.materialize().save_pretrained(tmp_path / "folder")
    read = from_pretrained(tmp_path / "folder", microbatches[0])
    check(read, vlm_plan(read, {"vision": TWO, "llm": TWO}, 3), microbatches)


def test_a_model_is_probed_on_small_replicas(monkeypatch):
    model, microbatches = whole("Qwen3VLForConditionalGeneration")
    config, text = model.source.config, model.source.config.text_config
    token, text.vocab_size = config.image_token_id, 5000
    config.image_token_id = 4000
    for part, names in ((text, ("num_hidden_layers",)), (config.vision_config, ("depth",))):
        for name in names:
            setattr(part, name, 7)
    config.vision_config.deepstack_visual_indexes = [1, 4, 5]
    for batch in microbatches:
        ids = batch["input_ids"] * 10
        batch["input_ids"] = torch.where(batch["input_ids"] == token, 4000, ids)
    # the model itself is too large for a trial
    monkeypatch.setattr(small_model, "_MOST_PARAMETERS", 0)
    model = from_pretrained(config, microbatches[0])
    cut = cut_tower(model.tower_spec("vision"), model.towers[0].inputs(microbatches[0]))
    assert cut.cut.relayed == (1, 4, 5)  # numbered as in the model, not in the small replica
    check(model, vlm_plan(model, {"vision": TWO, "llm": TWO}, 3), microbatches)


def test_unfit_batches_are_rejected_before_the_ranks():
    with pytest.raises(ModelError, match="train has 'ears'"):
        whole("LlavaForConditionalGeneration", {"ears": "full"})
    model, (first, *_) = whole("LlavaForConditionalGeneration")
    for name, value, why in (
        ("pixel_values", first["pixel_values"].long(), "as in the example"),
        ("pixels", first["pixel_values"], "which the example does not have"),
        ("labels", first["labels"][:, 1:], "accepted: an int64 tensor"),
    ):
        with pytest.raises(DataError, match=why):
            model.check({**first, name: value})
    model, (first, *_) = whole("Qwen2_5_VLForConditionalGeneration")
    model.check(first)
    with pytest.raises(DataError, match="image_grid_thw gives"):
        model.check({**first, "pixel_values": first["pixel_values"][1:]})


def test_a_batch_is_split_by_rows_with_their_items():
    model, (first, _, third) = whole("Qwen2_5_VLForConditionalGeneration")
    batch = {
        n: torch.cat([first[n], third[n]]) for n in first
        if n in ("pixel_values", "image_grid_thw")
    }
    length = max(len(first["input_ids"][0]), len(third["input_ids"][0]))
    for name in first:
        if name not in batch:
            fill = -100 if name == "labels" else 0
            batch[name] = torch.cat([
                F.pad(part[name], (0, length - part[name].shape[1]), value=fill)
                for part in (first, third)
            ])  # fmt: skip
    batch["sample_index"] = {"vision": torch.tensor([0, 1, 3, 3])}
    with ParallelModel(
        model, vlm_plan(model, {}, 2), optimizer=OPTIMIZER, timeout_s=120
    ) as running:
        output = running.execute(batch)
    loss = model.loss([first, third]).item()
    assert abs(output.loss - loss) <= 1e-6 * abs(loss)
