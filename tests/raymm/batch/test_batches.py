"""Inputs of encoders that a model was not tried with are tried once, or rejected by name."""

import pytest
import torch
import transformers as hf

from raymm.batch.batches import TriedInputs
from raymm.data.loading.in_memory import describe_microbatches
from raymm.errors import DataError, ModelError, ProbeError
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, complete_microbatch
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support.masked_encoder import Masked

SMALL = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16,
    num_key_value_heads=2,
)


def model(**options) -> MultimodalModule:
    vision = ModalityModule(Masked(), "linear", **options)
    return MultimodalModule({"vision": vision}, hf.LlamaConfig(**SMALL))


def tried(described: MultimodalModule, pp: int) -> TriedInputs:
    found = TriedInputs(described)
    plan = MultimodalParallelSpec({"vision": ParallelSpec(pp=pp)}).plan(described)
    found.retries.update(stage_builders(described, plan).retries)
    return found


def step(**vision):
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "vision": vision}
    return describe_microbatches([complete_microbatch(batch, ("vision",))], ("vision",))


X = torch.randn(2, 3, 4)


def test_untried_inputs_are_named_with_tried_ones():
    inputs = tried(model(example_inputs={"x": X}), pp=2)
    inputs.check(*step(x=X))
    inputs.check(*step(x=torch.randn(2, 7, 4)))
    named = (
        r"'vision' has mask \(float32, 2 dimensions\), x \(float32, 3 dimensions\), which differs "
        r"from the inputs that its encoder was tried with \(x \(float32, 3 dimensions\)\), "
        r".*Masked cannot be cut"
    )
    with pytest.raises(DataError, match=named):
        inputs.check(*step(x=X, mask=torch.rand(2, 3)))
    inputs.check(*step(x=X))  # the check continues
    tried(model(example_inputs={"x": X, "mask": X[..., 0]}), 2).check(*step(x=X, mask=X[..., 1]))
    tried(model(example_inputs={"x": X}), 1).check(*step(x=X, mask=X[..., 1]))


def test_accepted_inputs_are_tried_once():
    inputs = tried(model(example_inputs={"x": X}), pp=2)
    retry, calls = inputs.retries["vision"], []
    inputs.retries["vision"] = lambda example: (calls.append(sorted(example)), retry(example))
    for _ in range(3):
        inputs.check(*step(x=X, scale=torch.ones(2)))
        inputs.check(*step(x=X))
    assert calls == [["scale", "x"]]


def test_a_loss_that_would_be_dropped_is_refused_early():
    config = hf.DogeConfig(
        **SMALL, is_moe=True, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    with pytest.raises(ProbeError, match="DogeForCausalLM adds aux_loss .*router_loss: ignore"):
        MultimodalParallelSpec({}).apply(MultimodalModule({}, config))
    with pytest.raises(ModelError, match="router_loss is 'sum'; accepted: 'ignore', None"):
        MultimodalModule({}, config, router_loss="sum")
