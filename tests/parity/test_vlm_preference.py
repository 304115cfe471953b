"""Direct preference optimisation of a VLM on any layout equals the formula in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_vlms_on_ray import check, whole

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.errors import DataError, ModelError, PlanError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, vlm_plan

BETA = 0.3
LORA = LoraConfig(r=4)
ADAPTED = {"vision": "frozen", "projector": "frozen", "language_model": LORA}


def pairs_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a microbatch in which each row is a chosen answer, followed by another answer."""
    rows = len(batch["input_ids"])
    pairs = {
        name: value.repeat_interleave(2, 0) if len(value) == rows else value
        for name, value in batch.items()
    }
    labels, ids = pairs["labels"].clone(), pairs["input_ids"].clone()
    labels[:, :-2] = IGNORE_INDEX
    # The rejected answers have other last tokens, and the first one is shorter.
    ids[1::2, -2:] = labels[1::2, -2:] = torch.tensor([3, 4])
    labels[1, -1] = IGNORE_INDEX
    return {**pairs, "input_ids": ids, "labels": labels}


def model_of(
    train: Any = None, reference: str = "base", **options: Any
) -> tuple[PretrainedVlm, list[dict[str, torch.Tensor]]]:
    model, microbatches = whole("LlavaForConditionalGeneration")
    whole_model = from_pretrained(
        model.source.config, microbatches[0], ADAPTED if train is None else train, seed=4,
        preference=PreferenceLoss(BETA, reference=reference), **options,
    )
    return whole_model, [pairs_of(batch) for batch in microbatches[:2]]


def scores(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logs = module(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (chosen * (labels != IGNORE_INDEX)).sum(1)


def formula(trained: Any, reference: Any, step: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the mean over pairs of TRL's sigmoid loss."""
    margins = []
    for batch in step:
        with torch.no_grad():
            due = scores(reference, batch)
        won = scores(trained, batch) - due
        margins.append(won[0::2] - won[1::2])
    return -torch.nn.functional.logsigmoid(BETA * torch.cat(margins)).mean()


def test_the_loss_in_one_process_is_the_formula():
    model, step = model_of()
    module, base = model.materialize(), model.source.build().eval()
    assert model.loss(step).item() == pytest.approx(0.693147, rel=1e-5)  # adapters are zero
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    due = formula(module, base, step)
    assert abs(due.item() - 0.693147) > 1e-4
    assert model.loss(step).item() == pytest.approx(due.item(), rel=1e-5)


@pytest.mark.cells(2)
@pytest.mark.parametrize(("specs", "options"), [
    ({"llm": ParallelSpec(pp=2)}, {}),
    ({"llm": ParallelSpec(dp=2)}, {}),
    ({"llm": ParallelSpec(pp=2, cp=2)}, {}),
    ({"llm": ParallelSpec(dp=2, sharding="fsdp")}, {"packing": True}),
    ({"vision": ParallelSpec(pp=2)},
     {"train": {"vision": LORA, "projector": LORA, "language_model": LORA}}),
], ids=["pp", "dp", "cp", "fsdp-packing", "adapted-tower"])  # fmt: skip
def test_steps_equal_one_process(ray_cluster, specs, options):
    model, step = model_of(**options)
    check(model, vlm_plan(model, specs, len(step)), step)


def test_the_initial_model_as_reference(ray_cluster):
    model, step = model_of({}, "initial")
    with pytest.raises(ModelError, match="references is None"):
        model.loss(step)
    due = formula(model.materialize(), model.source.build().eval(), step)
    with ParallelModel(model, vlm_plan(model, {"llm": ParallelSpec(pp=2)}, 2)) as parallel:
        inputs, meta = parallel.prepare(step)
        meta = [
            type(m)(**{**vars(m), "sample_ids": tuple(f"{n}.{row}" for row in m.sample_ids)})
            for n, m in enumerate(meta)
        ]
        with pytest.raises(DataError, match=r"reference scores of row '0\.0' are missing"):
            parallel.submit((inputs, meta))
        first = parallel.scores((inputs, meta))
        for batch, own in zip(step, first, strict=True):
            torch.testing.assert_close(own, scores(model.materialize(), batch).detach())
        parallel.set_references({
            row: score for m, own in zip(meta, first, strict=True)
            for row, score in zip(m.sample_ids, own.tolist(), strict=True)
        })
        output = parallel.submit((inputs, meta)).result()
    assert output.loss == pytest.approx(due.item(), rel=1e-5)
    assert output.rewards["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_what_cannot_be_is_refused_before_anything_starts():
    model, _ = model_of({})
    with pytest.raises(PlanError, match="trained parameters are not adapters"):
        ParallelModel(model, vlm_plan(model, {}, 1))
