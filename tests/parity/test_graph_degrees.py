"""Graphs of modules with tensor, token and sample sharding within ranks."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as hf
from torch import nn

from raymm.errors import PlanError, ProbeError
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, dag_plan
from tests.parity.test_pipelined_graphs import (
    Compared,
    Talker,
    chain_batch,
    chained,
    check,
    deep_clip,
    steps_of,
)
from tests.support.multiplex_models import WIDTH, clip_batch

pytestmark = pytest.mark.usefixtures("ray_cluster")

TEXT = dict(hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=17, max_position_embeddings=16)  # fmt: skip


@pytest.mark.cells(1)
@pytest.mark.parametrize(("image", "text"), [
    ({"tp": 2, "pp": 2}, {"cp": 2}),
    ({"cp": 2, "pp": 2}, {"dp": 2, "sharding": "fsdp"}),
    ({"dp": 2, "sharding": "fsdp", "pp": 2}, {"tp": 2}),
    ({"cp": 2, "dp": 2, "sharding": "fsdp"}, {"dp": 2, "sharding": "zero1"}),
])  # fmt: skip
def test_towers_shard_tensors_tokens_and_samples(image, text):
    dag = deep_clip()
    plan = dag_plan(dag, {"image": ParallelSpec(**image), "text": ParallelSpec(**text)}, 2)
    check(dag, plan, steps_of(clip_batch, 2))


class Speaker(nn.Module):
    """Language model that reads another module's output as its first tokens.

    It returns its samples' losses and its states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
        self.config = self.model.config

    def forward(self, prefix: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        embeds = torch.cat([prefix[:, None], self.model.get_input_embeddings()(ids)], 1)
        output = self.model.model(inputs_embeds=embeds, use_cache=False)
        states = output.last_hidden_state[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            self.model.lm_head(states).transpose(1, 2), ids, reduction="none"
        )
        return {"loss": losses.sum(1), "hidden": states}


def speaking() -> ModuleDag:
    """Return a graph: a tower, a language model with a loss, and a decoder with another loss."""
    torch.manual_seed(3)
    chain = chained().nodes
    example = {"prefix": torch.randn(3, WIDTH), "ids": torch.randint(0, 6, (3, 7))}
    return ModuleDag({
        "first": chain["first"],
        "speaker": DagLoss(
            Speaker(), reads={"ids": "codes"}, inputs={"prefix": "first"}, weight=0.7,
            divide_by="count", example_inputs=example,
        ),
        "talker": DagLoss(Talker(), reads="codes", inputs={"states": "speaker.hidden"}),
    })


def speech_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    batch = chain_batch(size, seed)
    return {
        "x": batch["x"], "codes": torch.randint(0, 6, (size, 7)), "count": torch.full((size,), 7)
    }


@pytest.mark.cells(1)
@pytest.mark.parametrize("speaker", [
    {"tp": 2, "pp": 2}, {"dp": 2, "sharding": "fsdp", "pp": 2}, {"tp": 2, "dp": 2},
])
def test_a_middle_module_with_a_loss(speaker):
    """Check inputs with partial or full gradients per process, and replicated outputs.

    A microbatch of one sample leaves a process without any.
    """
    dag = speaking()
    plan = dag_plan(dag, {"speaker": ParallelSpec(**speaker)}, 2)
    check(dag, plan, steps_of(speech_batch, 2, sizes=(3, 1)))


class Tokens(nn.Module):
    """Module that embeds its input as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states[:, None] * self.places


def between() -> ModuleDag:
    """Return a graph with a transformer between a tower and a decoder."""
    torch.manual_seed(4)
    nodes = speaking().nodes
    model = hf.ModernBertModel(hf.ModernBertConfig(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=17, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, local_attention=4,
    ))  # fmt: skip
    model.get_input_embeddings().requires_grad_(False)  # its embedding is not used
    return ModuleDag({
        "first": nodes["first"],
        "tokens": DagModule(Tokens(), inputs={"states": "first"}),
        "middle": DagModule(
            model, inputs={"inputs_embeds": "tokens"}, outputs="last_hidden_state",
            example_inputs={"inputs_embeds": torch.randn(3, 7, WIDTH)},
        ),
        "talker": DagLoss(Talker(), reads="codes", inputs={"states": "middle"}),
    })


@pytest.mark.cells(1)
@pytest.mark.parametrize("middle", [
    {"cp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2, "sharding": "fsdp"}, {"cp": 2, "tp": 2},
])
def test_a_middle_module_that_shards_tokens(middle):
    dag = between()
    plan = dag_plan(dag, {"middle": ParallelSpec(**middle)}, 2)
    check(dag, plan, steps_of(speech_batch, 2, sizes=(3, 1)))


def test_unshardable_modules_are_rejected_by_name():
    """Check that this happens before any process starts."""
    def refused(error: type[Exception], text: str, dag: ModuleDag, **specs: ParallelSpec) -> None:
        with pytest.raises(error, match=re.escape(text)):
            ParallelModel(dag, dag_plan(dag, specs))

    fsdp = ParallelSpec(dp=2, sharding="fsdp")
    refused(PlanError, "sharding of 'talker' is 'fsdp', but no list of blocks", speaking(),
            talker=fsdp)  # fmt: skip
    refused(ProbeError, "cp of 'talker' is 2; accepted: 1", speaking(), talker=ParallelSpec(cp=2))
    refused(ProbeError, "cp of 'second' is 2; accepted: 1", chained(), second=ParallelSpec(cp=2))
    together = ModuleDag({
        "first": DagModule(nn.Linear(5, 8), reads={"input": "x"}),
        "loss": DagLoss(Compared(), inputs={"x": every("first")}),
    })
    refused(PlanError, "sharding of 'loss' is 'fsdp', but the module reads every(); accepted",
            together, loss=fsdp)  # fmt: skip
