"""Rows packed into one sequence have the loss and the gradients of the rows."""

import pytest
import torch
import transformers as hf

from raymm.actors.modules.merge import Prepend, ReplaceTokens
from raymm.errors import ModelError, ProbeError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import (
    OPTIMIZER,
    check_gradients,
    check_reference,
    check_training,
    oracle_of,
)
from tests.support.parity_oracle import prepend, replace

TOKENS = {"vision": pm.IMAGE_TOKEN, "audio": pm.AUDIO_TOKEN}


def isolated(query, key, past):
    return past if query[0] == 0 else query == key


def model_of(llm, merge=None, mask=None, packing=True) -> MultimodalModule:
    return MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp"),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(llm, 3)), merge, mask, packing,
    )


def step(placeholders: bool = False) -> list[dict]:
    """Return rows with several images and clips, or none; very different lengths; a single row."""
    image, clip = (pm.IMAGE_TOKEN, 4), (pm.AUDIO_TOKEN, pm.AUDIO_FRAMES // 2)
    runs = [[image, image], [], [image, clip]] if placeholders else None
    return [
        pm.batch([47, 25, 39], 4, runs, vision=[0, 0, 2], audio=[2]),
        pm.batch([3, 11], 5),
        pm.batch([20], 7, runs and [[image]], vision=[0]),
    ]


@pytest.mark.parametrize("llm", [pm.llama, pm.qwen3, pm.gemma3, pm.gpt2])
def test_in_one_process(llm):
    """Use models with rotary and learned positions, and with windows."""
    model = model_of(llm())
    check_reference(model, oracle_of(model, prepend), step())


def test_masks_over_placeholders_in_one_process():
    model = model_of(pm.qwen3(), ReplaceTokens(TOKENS), "multimodal_isolated")
    check_reference(model, oracle_of(model, replace(TOKENS), isolated), step(True))


def test_padding_is_removed():
    """Check that the blocks' input is as long as the rows together."""
    seen = {}
    for packing in (False, True):
        model = model_of(pm.llama(), packing=packing).materialize()
        layer = model.language_model.module.model.layers[0]
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, key=packing: seen.update(
                {key: tuple((args[0] if args else kwargs["hidden_states"]).shape[:2])}
            ),
            with_kwargs=True,
        )
        model(**pm.batch([7, 30, 2], 4, vision=[0, 2]))
    assert seen == {False: (3, 30), True: (1, 7 + 30 + 2 + 2 * 4)}


def test_stages_and_sharded_processes(ray_cluster):
    """Use a pipeline; sharded tokens and tensors; recomputation."""
    model = model_of(pm.llama(tied=True), ReplaceTokens(TOKENS), "multimodal_isolated")
    oracle = oracle_of(model, replace(TOKENS), isolated)
    encoders = {"vision": ParallelSpec(ranks=(0,)), "audio": ParallelSpec(ranks=(0,))}
    for llm in (ParallelSpec(pp=2, cp=2), ParallelSpec(tp=2, dp=3)):
        spec = MultimodalParallelSpec(encoders, llm, 3, recompute=True)
        with spec.apply(model, optimizer=OPTIMIZER) as parallel:
            check_gradients(parallel, oracle, step(True))
            if llm.cp > 1:
                check_training(parallel, oracle, [[step(True)], [step(True)], [step(True)]])
                oracle = oracle_of(model, replace(TOKENS), isolated)


def test_models_without_packing_are_rejected_by_name():
    bloom = hf.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=97)
    bert = hf.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=97, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    for config, why in ((bloom, "Bloom.*cannot have its samples packed"), (bert, "not causal")):
        with pytest.raises(ProbeError, match=why):
            MultimodalModule({}, ModalityModule(config), packing=True)


def test_unknown_per_token_inputs_are_rejected():
    def merge(features, inputs):
        merged = Prepend()(features, inputs)
        return {**merged, "token_type_ids": torch.zeros_like(merged["labels"])}

    model = MultimodalModule({}, ModalityModule(pm.build(pm.llama(), 3)), merge, packing=True)
    with pytest.raises((ValueError, ModelError), match=r"token_type_ids.*with packing"):
        model(**pm.batch([7, 5], 1))
