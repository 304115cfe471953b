"""Direct preference optimisation of a VLM on any layout equals one process, and TRL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from raymm.actors.adapters.lora import is_adapter
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.data import DataConfig, local_steps
from raymm.errors import DataError, ModelError, PlanError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.vlm import PretrainedVlm, from_pretrained
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, vlm_plan
from tests.parity.test_vlms_on_ray import check, whole
from tests.support.parity_check import OPTIMIZER, close
from tests.support.parity_oracle import gradient_errors, parameter_errors
from tests.support.tiny_folders import modalities, tiny

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


@pytest.mark.cells(1)
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


def pair_rows(kind: str) -> list[dict[str, Any]]:
    """Return rows of a tiny folder as pairs, each with another number of images."""
    data = Path(tiny(kind)[1])
    rows = []
    for row in map(json.loads, data.read_text().splitlines()):
        *prompt, chosen = row["messages"]
        rejected = {"role": "assistant", "content": [{"type": "text", "text": "cat cat yes"}]}
        images = [str(data.parent / image) for image in row["images"]]
        rows.append({"id": row["id"], "images": images, "prompt": prompt, "chosen": [chosen],
                     "rejected": [rejected]})  # fmt: skip
    return [row for row in rows if row["images"]][:4]


def name_in_raymm(name: str) -> str:
    """Return the name of one of peft's adapters."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.default(\.weight)?$", "", name)


class Trl:
    """TRL's trainer of a folder, with its processor and adapters from stock ``peft``."""

    def __init__(self, folder: str, model: PretrainedVlm, rows: Any, out: Any) -> None:
        import peft
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        adapters = {
            name: p for name, p in model.materialize().named_parameters() if is_adapter(name)
        }
        layers = {name.rpartition(".")[0] for name in adapters}
        read = [
            {**row, "images": [Image.open(image).convert("RGB") for image in row["images"]]}
            for row in rows
        ]
        self._trainer = DPOTrainer(
            transformers.AutoModelForImageTextToText.from_pretrained(folder),
            peft_config=peft.LoraConfig(
                r=LORA.r, lora_alpha=LORA.alpha, target_modules="|".join(map(re.escape, layers))
            ),
            processing_class=transformers.AutoProcessor.from_pretrained(folder),
            train_dataset=Dataset.from_list(read),
            args=DPOConfig(
                str(out), beta=BETA, report_to=[], use_cpu=True, gradient_checkpointing=False,
                bf16=False, max_length=None,
            ),
        )
        self.module = self._trainer.model
        self.parameters = {
            name_in_raymm(n): p for n, p in self.module.named_parameters() if p.requires_grad
        }
        assert self.parameters.keys() == adapters.keys()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(adapters[name])

    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        """Collate rows by number."""
        return self._trainer.data_collator([self._trainer.train_dataset[row] for row in rows])

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._trainer._compute_loss(self.module, batch, False)


def scored_tokens(ids: torch.Tensor, scored: torch.Tensor) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(ids, scored, strict=True)]


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl"])
def test_a_folder_and_its_rows_train_as_in_trl(ray_cluster, tmp_path, kind):
    folder, rows = tiny(kind)[0], pair_rows(kind)
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        train=str(file), processor=folder, modalities=modalities(kind), preferences=True,
        media_folders=["/"], shuffle=False, batch_size=4, microbatches=2,
    )  # fmt: skip
    (read,) = local_steps(data, steps=1)
    step = read.microbatches
    model = from_pretrained(folder, step[0], ADAPTED, seed=4, preference=PreferenceLoss(BETA))
    trl = Trl(folder, model, rows, tmp_path / "trl")
    numbers = {f"{row['id']}:chosen": number for number, row in enumerate(rows)}
    batch = trl.batch([numbers[sample] for meta in read.meta for sample in meta.sample_ids[::2]])

    # TRL puts all chosen answers first, raymm each next to the rejected one.
    pairs = scored_tokens(batch["input_ids"], batch["completion_mask"].bool())
    here = [
        tokens for microbatch in step
        for tokens in scored_tokens(microbatch["input_ids"], microbatch["labels"] != IGNORE_INDEX)
    ]
    assert here == [tokens for pair in zip(pairs[:4], pairs[4:], strict=True) for tokens in pair]

    due = trl.loss(batch)
    due.backward()
    gradients = {name: p.grad.clone() for name, p in trl.parameters.items()}
    before = {name: p.detach().clone() for name, p in trl.parameters.items()}
    optimizer = torch.optim.AdamW(
        trl.parameters.values(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    plan = vlm_plan(model, {"llm": ParallelSpec(pp=2)}, len(step))
    with ParallelModel(model, plan, optimizer=OPTIMIZER, timeout_s=120) as parallel:
        assert close(parallel.execute(step).loss, due.item(), 1e-5)
        assert gradient_errors(parallel.gradients(), gradients) == []
        parallel.zero_grad()
        for _ in range(3):
            optimizer.zero_grad()
            loss = trl.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trl.parameters.values(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            assert close(parallel.train_step(step).loss, loss.item(), 1e-5)
        after = {name: p.detach() for name, p in trl.parameters.items()}
        assert parameter_errors(parallel.parameters(), after, before, OPTIMIZER.lr) == []
