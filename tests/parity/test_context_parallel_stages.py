"""A language model with context parallelism equals one process."""

import pytest
import torch
import transformers as hf

from raymm.actors.modules.merge import Prepend, ReplaceTokens
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.language import LanguageStage
from raymm.errors import ModelError, PlanError, ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, complete_microbatch, text_inputs
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of
from tests.support.parity_oracle import prepend, replace

TOKENS = {"vision": pm.IMAGE_TOKEN}


def isolated(query, key, past):
    return past if query[0] == 0 else query == key


def model_of(llm, merge=None, mask=None) -> MultimodalModule:
    vision = ModalityModule(pm.build(pm.siglip(), 1), "mlp")
    return MultimodalModule({"vision": vision}, ModalityModule(pm.build(llm, 3)), merge, mask)


def step(placeholders: bool = False) -> list[dict]:
    """Return rows of different lengths, images in some, a microbatch of a few tokens."""
    image = (pm.IMAGE_TOKEN, 4)
    runs = [[image, image], [], [image]] if placeholders else None
    return [
        pm.batch([37, 25, 9], 4, runs, vision=[0, 0, 2]),
        pm.batch([3], 5),
        pm.batch([50, 41], 6),
        pm.batch([20], 7, runs and [[image]], vision=[0]),
    ]


def test_causal_with_projector_gradients(ray_cluster):
    """Prepend images under the model's own mask; two ranks of two processes; tied embeddings."""
    model = model_of(pm.llama(tied=True))
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2, cp=2), 4)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        assert parallel.group.num_ranks == 5
        check_gradients(parallel, oracle, step())
        check_gradients(parallel, oracle, step()[1:3])
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step(), step()[1:]]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm", [pm.gemma3, pm.qwen3])
def test_masks_windows_and_replicas(ray_cluster, llm):
    """Use a mask over placeholders; layers with windows; two replicas of two processes."""
    mask = "multimodal_isolated" if llm is pm.qwen3 else None
    model = model_of(llm(), ReplaceTokens(TOKENS), mask)
    oracle = oracle_of(model, replace(TOKENS), isolated if mask else None)
    vision = ParallelSpec(dp=2, ranks=(0, 1))
    spec = MultimodalParallelSpec({"vision": vision}, ParallelSpec(cp=2, dp=2), 4, recompute=True)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step(True))
        check_training(parallel, oracle, [[step(True)], [step(True)[::-1]], [step(True)]])


def test_three_processes_and_zero_bubble(ray_cluster):
    model = model_of(pm.llama(tied=False))
    oracle = oracle_of(model, prepend)
    spec = MultimodalParallelSpec({}, ParallelSpec(cp=3), 4, "zero_bubble")
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


def test_unsplittable_models_are_rejected_before_the_start():
    model = model_of(pm.llama())
    with pytest.raises(PlanError, match="cp of stage .* all stages of rank 0"):
        MultimodalParallelSpec(
            {"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(cp=2, ranks=(0,)), 2
        ).plan(model)
    with pytest.raises(PlanError, match="cp is 0"):
        ParallelSpec(cp=0)


def test_models_that_cannot_shard_tokens_are_rejected_by_name(ray_cluster, ended_actors):
    recurrent = hf.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=97, state_size=4)
    own = hf.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=97)
    # It counts positions itself and ignores position_ids.
    counting = hf.BartConfig(
        d_model=32, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=48,
        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, vocab_size=97,
        dropout=0.0,
    )
    bidirectional = hf.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=97, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    spec = MultimodalParallelSpec({}, ParallelSpec(cp=2))
    for config, why in (
        (bidirectional, "Bert.*its own mask is not causal"),
        (recurrent, "Mamba.*mixes tokens"), (own, "Bloom.*cannot have cp above 1"),
        (counting, "Bart.*order of tokens besides their position_ids"),
    ):
        with pytest.raises(ProbeError, match=why):
            # Bart, whose own loss is not shifted, is rejected for that otherwise.
            spec.apply(MultimodalModule({}, ModalityModule(config), router_loss="ignore"))
    assert ended_actors() == []


def test_a_dense_mask_from_the_merge_policy_is_refused():
    """Reject it: one process would use it, but processes that shard tokens have another size."""

    def merge(features, inputs):
        merged = Prepend()(features, inputs)
        rows, tokens = merged["labels"].shape
        return {**merged, "attention_mask": torch.zeros(rows, 1, tokens, tokens)}

    model = model_of(pm.llama(), merge)
    model.materialize()
    stage = LanguageStage.build(model.language_spec(), 0, 3)
    stage.share_tokens(None)
    inputs = text_inputs(complete_microbatch(pm.batch([5, 3], 1), ()))
    with pytest.raises(ModelError, match=r"attention_mask of shape \(2, 1, 5, 5\)"):
        stage.run(inputs, {}, MicrobatchContext(4))
