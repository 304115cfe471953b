"""Tiny mixtures of experts with a router loss, and single-process training as reference.

The reference trains on the whole batch of a step with transformers' own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from tests.support.trainer_groups import trainer_groups

Batch = Mapping[str, torch.Tensor]
Sizes = list[tuple[int, int]]

_SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts_per_tok=2,
    output_router_logits=True, router_aux_loss_coef=0.2,
)  # fmt: skip


def mixtral(**more: Any) -> hf.PretrainedConfig:
    return hf.MixtralConfig(**(_SIZES | dict(num_local_experts=4) | more))


def qwen3_moe(**more: Any) -> hf.PretrainedConfig:
    """Return a model whose first layer has no experts."""
    sizes = dict(num_experts=6, moe_intermediate_size=16, mlp_only_layers=[0])
    return hf.Qwen3MoeConfig(**(_SIZES | sizes | more))


def gpt_oss(**more: Any) -> hf.PretrainedConfig:
    sizes = dict(num_local_experts=4, sliding_window=6)
    return hf.GptOssConfig(**(_SIZES | sizes | more))


def step(seed: int, sizes: Sequence[tuple[int, int]], vocabulary: int = 64) -> list[Batch]:
    """Return microbatches of these numbers of rows and tokens.

    All rows but the first are padded on the right, and prompts have no labels.
    """
    generator = torch.Generator().manual_seed(seed)
    microbatches = []
    for rows, tokens in sizes:
        ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
        lengths = torch.randint(4, tokens + 1, (rows, 1), generator=generator)
        lengths[0] = tokens
        real = torch.arange(tokens) < lengths
        labels = torch.where(real & (torch.arange(tokens) > 2), ids, -100)
        microbatches.append({"input_ids": ids, "labels": labels, "attention_mask": real.long()})
    return microbatches


def one_batch(microbatches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Return all rows of a step, padded to its longest."""
    longest = max(batch["input_ids"].shape[1] for batch in microbatches)
    fill = {"labels": -100}
    return {
        name: torch.cat([
            F.pad(batch[name], (0, longest - batch[name].shape[1]), value=fill.get(name, 0))
            for batch in microbatches
        ])
        for name in ("input_ids", "labels", "attention_mask")
    }  # fmt: skip


class OneProcess:
    """transformers' own forward of a whole step's batch, with AdamW.

    Args:
        model: copied.
        weight_decay: for the parameters that a Trainer decays.
        optimizer: additional arguments of AdamW.
    """

    def __init__(self, model: nn.Module, weight_decay: float, **optimizer: Any) -> None:
        self.model = copy.deepcopy(model).train()
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            trainer_groups(self.model, weight_decay), **optimizer
        )

    def loss(self, microbatches: Sequence[Batch]) -> torch.Tensor:
        """Return the step's loss; afterwards all parameters have gradients."""
        self.optimizer.zero_grad()
        model: Any = self.model
        self.output = output = model(**one_batch(microbatches), use_cache=False)
        assert output.aux_loss.item() > 0
        output.loss.backward()
        return output.loss.detach()

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in self.trained.items() if p.grad is not None}
