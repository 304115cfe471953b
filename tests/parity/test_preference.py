"""Direct preference optimisation on any layout equals TRL in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.adapters.lora import plain_copy
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import DataError, ModelError, PlanError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.actors.adapters.test_lora import LORA, _own_name, in_peft, noisy
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, close
from tests.support.parity_oracle import gradient_errors, parameter_errors
from tests.support.tiny_run import save_tokenizer
from tests.support.trainer_groups import trainer_groups

BETA = 0.3
# Prompt, chosen and rejected answer of pairs, by microbatch.
STEP = [
    [([5, 17, 3], [40, 2, 9], [31, 77]), ([11], [25, 26, 27, 28], [70, 3, 8])],
    [([8, 1, 60, 2, 44], [12], [13, 14, 15, 16, 17])],
]


def rows(pairs: Any) -> dict[str, torch.Tensor]:
    """Return a microbatch: the answers of a pair are adjacent rows, with labels for their tokens.
    """
    texts = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(texts):
        stop = len(prompt) + len(answer)
        ids[row, :stop] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : stop] = torch.tensor(answer)
        mask[row, :stop] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def model_of(
    lora: LoraConfig | None = LORA, reference: str = "base", **options: Any
) -> MultimodalModule:
    language = ModalityModule(pm.build(pm.llama(tied=False, layers=4), 3), lora=lora, seed=7)
    language = noisy(language) if lora is not None else language
    loss = PreferenceLoss(BETA, reference=reference)
    return MultimodalModule({}, language, preference=loss, **options)


class Trl:
    """TRL's trainer of a model with adapters from stock ``peft``."""

    def __init__(self, model: MultimodalModule, folder: Any, lora: LoraConfig = LORA) -> None:
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import DPOConfig, DPOTrainer
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        save_tokenizer(folder / "tokenizer")
        module = model.language_model.materialize()
        base = plain_copy(module, merged=False)
        # It creates the adapters: existing ones would become its reference.
        self._trainer = DPOTrainer(
            base, peft_config=in_peft(module, lora).peft_config["default"],
            processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
            train_dataset=Dataset.from_list(
                [{"prompt": "what is", "chosen": "a dog", "rejected": "a cat"}]
            ),
            args=DPOConfig(
                str(folder), beta=BETA, report_to=[], use_cpu=True,
                gradient_checkpointing=False, bf16=False,
            ),
        )
        self.module = self._trainer.model
        adapters = in_peft(module, lora).state_dict()
        own = {n: p for n, p in self.module.state_dict().items() if "lora" in n}
        assert own and all(p.copy_(adapters[n]) is p for n, p in own.items())
        self._collate = DataCollatorForPreference(pad_token_id=0)

    def loss(self, step: Any) -> torch.Tensor:
        pairs = [pair for microbatch in step for pair in microbatch]
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        batch = self._collate([dict(zip(names, pair, strict=True)) for pair in pairs])
        return self._trainer._compute_loss(self.module, batch, False)

    def rewards(self) -> dict[str, float]:
        """Return the metrics of the last loss."""
        metrics = self._trainer._metrics["eval" if not self.module.training else "train"]
        found = {name: values[0] for name, values in metrics.items() if name.startswith("rewards")}
        assert set(found) == {
            f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")
        }
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        start = "language_model.module."
        return {
            _own_name(start + name): p
            for name, p in self.module.named_parameters() if p.requires_grad
        }


@pytest.mark.cells(1)
@pytest.mark.parametrize("layout", [
    {"pp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}, {"dp": 2, "sharding": "fsdp"}, {"pp": 2, "cp": 2},
    {"pp": 2, "packing": True}, {"cp": 2, "dp": 2, "sharding": "fsdp", "packing": True},
], ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))  # fmt: skip
def test_loss_gradients_and_steps_equal_trl(ray_cluster, tmp_path, layout):
    layout = dict(layout)
    model = model_of(packing=layout.pop("packing", False))
    trl = Trl(model, tmp_path)
    named = trl.parameters()
    step = [rows(pairs) for pairs in STEP]
    due = trl.loss(STEP)
    due.backward()
    gradients = {name: p.grad for name, p in named.items()}
    pairs = sum(map(len, STEP))
    here = sum(model(**microbatch, label_tokens=pairs) for microbatch in step)
    assert close(here.item(), due.item(), 1e-5)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = torch.optim.AdamW(
        named.values(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay)
    spec = MultimodalParallelSpec({}, ParallelSpec(**layout), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert close(parallel.evaluate(step).loss, due.item(), 1e-5)
        output = parallel.execute(step)
        assert close(output.loss, due.item(), 1e-5) and output.label_tokens == pairs
        for name, value in trl.rewards().items():
            assert output.rewards[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert gradient_errors(parallel.gradients(), gradients) == []
        parallel.optimizer.zero_grad()
        optimizer.zero_grad()
        for number in range(3):
            own = STEP if number % 2 else STEP[::-1]
            loss = trl.loss(own)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(named.values(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            taken = parallel.train_step([rows(pairs) for pairs in own])
            assert close(taken.loss, loss.item(), 1e-5)
        after = {name: p.detach() for name, p in named.items()}
        assert parameter_errors(parallel.parameters(), after, before, OPTIMIZER.lr) == []


def test_dropout_is_off_as_in_trl(ray_cluster, tmp_path):
    """Check TRL's default, which disables the dropout of adapters and of all dropout layers."""
    lora = replace(LORA, dropout=0.4)
    model = model_of(lora)
    trl = Trl(model, tmp_path, lora)
    due = trl.loss(STEP)
    due.backward()
    gradients = {name: p.grad for name, p in trl.parameters().items()}
    step, pairs = [rows(own) for own in STEP], sum(map(len, STEP))
    here = sum(model(**microbatch, label_tokens=pairs) for microbatch in step)
    assert close(here.item(), due.item(), 1e-5)
    with MultimodalParallelSpec({}, ParallelSpec(pp=2), 2).apply(
        model_of(lora), optimizer=OPTIMIZER
    ) as parallel:
        assert close(parallel.execute(step).loss, due.item(), 1e-5)
        assert gradient_errors(parallel.gradients(), gradients) == []


def test_dropout_can_be_left_on():
    model = model_of(replace(LORA, dropout=0.4))
    assert model.preference is not None
    model.preference = replace(model.preference, disable_dropout=False)
    losses = {model.train()(**rows(STEP[0])).item() for _ in range(2)}
    assert len(losses) == 2


@given(
    st.lists(st.tuples(*[st.floats(-30, 0)] * 4), min_size=1, max_size=4), st.floats(0.01, 2),
    st.floats(0, 0.49),
)
def test_the_loss_is_equation_7_of_the_paper(pairs, beta, smoothing):
    """Compute Equation 7, a pair at a time, in float64."""
    values = torch.tensor(pairs, dtype=torch.float64)
    due = torch.zeros((), dtype=torch.float64)
    for chosen, rejected, of_chosen, of_rejected in values:
        margin = beta * ((chosen - of_chosen) - (rejected - of_rejected))
        due += -(1 - smoothing) * torch.log(1 / (1 + torch.exp(-margin)))
        due += -smoothing * torch.log(1 / (1 + torch.exp(margin)))
    loss = PreferenceLoss(beta, smoothing)
    own = loss(values[:, :2].flatten(), values[:, 2:].flatten())
    torch.testing.assert_close(own, due)


@pytest.mark.parametrize(("layout", "options", "says"), [
    ({}, {"lora": None}, "trained parameters are not adapters"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(layout, options, says):
    model = model_of(**options)
    with pytest.raises(PlanError, match=says):
        MultimodalParallelSpec({}, ParallelSpec(**layout), 1).apply(model)


def test_a_fully_trained_model(ray_cluster):
    """Use the initial model as reference; the oracle is two models in one process."""
    model = model_of(lora=None, reference="initial")
    reference, trained = (pm.build(pm.llama(tied=False, layers=4), 3) for _ in range(2))

    def scores(module: Any) -> torch.Tensor:
        answers = [(p, a) for pairs in STEP for p, *both in pairs for a in both]
        return torch.stack([_score(module, prompt, answer) for prompt, answer in answers])

    optimizer = torch.optim.AdamW(
        trainer_groups(trained, OPTIMIZER.weight_decay), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps)
    due = scores(reference).detach()
    step, pairs = [rows(own) for own in STEP], sum(map(len, STEP))
    with pytest.raises(ModelError, match="reference is None"):
        model(**step[0])
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        prepared = parallel.prepare(step)
        prepared = (prepared[0], [
            replace(meta, sample_ids=tuple(f"{number}.{row}" for row in meta.sample_ids))
            for number, meta in enumerate(prepared[1])
        ])
        with pytest.raises(DataError, match="reference scores of row '0.0' are missing"):
            parallel.submit(prepared)
        first = parallel.scores(prepared)
        torch.testing.assert_close(torch.cat(first), due, rtol=1e-5, atol=1e-6)
        parallel.set_references({
            row: score for meta, own in zip(prepared[1], first, strict=True)
            for row, score in zip(meta.sample_ids, own.tolist(), strict=True)
        })
        for _ in range(3):
            loss = PreferenceLoss(BETA)(scores(trained), due) / pairs
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), OPTIMIZER.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            assert close(parallel.submit(prepared, update=True).result().loss, loss.item(), 1e-5)


def _score(module: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer])
    logs = module(input_ids=ids).logits[0].log_softmax(-1)
    return sum(logs[len(prompt) + n - 1, token] for n, token in enumerate(answer))


def test_rows_that_are_not_pairs(ray_cluster):
    with MultimodalParallelSpec({}, ParallelSpec(), 1).apply(model_of()) as parallel:
        with pytest.raises(DataError, match="has 3 rows; accepted: an even number"):
            parallel.train_step([{k: v[:3] for k, v in rows(STEP[0]).items()}])


@pytest.mark.parametrize(("values", "says"), [
    ({"reference": "none"}, "reference is 'none'"),
    ({"beta": 0.0}, "beta is 0.0"), ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
])  # fmt: skip
def test_invalid_values(values, says):
    with pytest.raises(ValueError, match=says):
        PreferenceLoss(**values)
