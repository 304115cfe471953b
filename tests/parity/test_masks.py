"""Masks over merged tokens, across pipeline stages, equal the dense mask in one process."""

import pytest
import transformers as hf

from raymm.actors.modules.merge import Prepend, ReplaceTokens
from raymm.errors import ModelError, ProbeError
from raymm.kernels.mask.patterns import full
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


def multimodal(query, key, past):
    return past if query[0] == 0 else query[0] == key[0]


def isolated(query, key, past):
    return past if query[0] == 0 else query == key


def own_image(query, key, past):
    return past or (query[0] != 0 and query == key)


RULES = {
    "causal": lambda query, key, past: past,
    "multimodal": multimodal,
    "multimodal_isolated": isolated,
    "causal_with_own_image": own_image,
}


def everything(length, spans, document_lengths):
    """Return a user-defined mask: every token sees every token, including padding."""
    return full(length)


def model_of(mask, merge=None) -> MultimodalModule:
    return MultimodalModule(
        {
            "vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp"),
            "audio": ModalityModule(pm.build(pm.whisper(), 2), "linear"),
        },
        ModalityModule(pm.build(pm.llama(), 3)),
        merge,
        mask,
    )


def batches():
    image, sound = (pm.IMAGE_TOKEN, 4), (pm.AUDIO_TOKEN, pm.AUDIO_FRAMES // 2)
    both = pm.batch([7, 5, 9], 4, [[image, image], [], [sound, image]], vision=[0, 0, 2], audio=[2])
    return [both, pm.batch([6, 8], 5, [[image], [image]], vision=[0, 1]), pm.batch([4, 13], 7)]


@pytest.mark.parametrize("name", RULES)
def test_masks_in_one_process(name):
    """Put items among the text and before it; several images in a row; text-only microbatches."""
    model = model_of(name, ReplaceTokens(TOKENS))
    check_reference(model, oracle_of(model, replace(TOKENS), RULES[name]), batches())
    model = model_of(name)
    plain = [pm.batch([7, 5], 3, vision=[0, 0], audio=[1]), pm.batch([4, 6], 4)]
    check_reference(model, oracle_of(model, prepend, RULES[name]), plain)


def test_masks_across_stages(ray_cluster):
    """Cut the language model into three stages; all of them need the mask."""
    model = model_of("multimodal_isolated", ReplaceTokens(TOKENS))
    oracle = oracle_of(model, replace(TOKENS), isolated)
    both, images, text = batches()
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=3), 3, recompute=True)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, [both, images, text])
        # Equal shapes, other positions of the images: nothing is cached from the previous batch.
        here = pm.batch([6, 6], 5, [[(pm.IMAGE_TOKEN, 4)]] * 2, vision=[0, 1])
        moved = {**here, **{name: here[name].roll(2, dims=1) for name in ("input_ids", "labels")}}
        moved["labels"][:, :2] = -100
        check_gradients(parallel, oracle, [here, moved, text])
        check_training(parallel, oracle, [[[both, text]], [[images, here, moved]], [[text, both]]])


def test_a_user_defined_mask(ray_cluster):
    """Select kernels, too; a CPU has only one."""
    model = model_of(everything, ReplaceTokens(TOKENS))
    oracle = oracle_of(model, replace(TOKENS), lambda query, key, past: True)
    images = pm.batch([6, 6], 5, [[(pm.IMAGE_TOKEN, 4)]] * 2, vision=[0, 1])
    with MultimodalParallelSpec({}, ParallelSpec(pp=2), 1).apply(model, kernels="auto") as parallel:
        check_gradients(parallel, oracle, [images])


def test_models_without_mask_support_are_rejected_by_name():
    with pytest.raises(ModelError, match="'diagonal'.*multimodal_isolated"):
        model_of("diagonal")
    sinks = hf.GptOssConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, num_local_experts=2,
        num_experts_per_tok=1,
    )
    with pytest.raises(ProbeError, match="GptOssForCausalLM.*attention sinks"):
        MultimodalModule({}, ModalityModule(sinks), mask="causal")
    recurrent = hf.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=97, state_size=4)
    with pytest.raises(ProbeError, match="Mamba"):
        MultimodalModule({}, ModalityModule(recurrent), mask="causal")
    # Its layer norms cancel a constant, and its layers drop the mask before attention.
    deaf = hf.StableLmConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97,
    )
    with pytest.raises(ProbeError, match="StableLmForCausalLM lets a token see another document"):
        MultimodalModule({}, ModalityModule(deaf), mask="causal")
    late = hf.Lfm2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97,
        layer_types=["full_attention"] * 3 + ["conv"],
    )
    # Detected, and so called with documents as rows, though the first three layers have none.
    assert MultimodalModule({}, ModalityModule(late), mask="causal").mixers == {"Lfm2ShortConv"}
    dropped = pm.llama()
    dropped.attention_dropout = 0.1
    with pytest.raises(ProbeError, match="attention dropout 0.1"):
        MultimodalModule({}, ModalityModule(dropped), mask="causal")


def test_experts_and_dropout_do_not_count_as_leaks():
    """Ignore last-bit changes: experts' rounding depends on the number of routed tokens."""
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=97)
    experts = hf.Qwen3MoeConfig(
        **sizes, num_key_value_heads=2, head_dim=8, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, mlp_only_layers=[],
    )
    MultimodalModule({}, ModalityModule(experts), mask="multimodal")
    dropping = hf.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=97, n_positions=64, resid_pdrop=0.5,
        embd_pdrop=0.5, attn_pdrop=0.0,
    )
    MultimodalModule({}, ModalityModule(dropping), mask="multimodal")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda layout: layout[:, :1], r"shape \(3, 1, 13\); expected \(3, 2, 13\)"),
        (lambda layout: layout[0], "shape"),
        (lambda layout: layout.tolist(), "a list, not a tensor"),
        (lambda layout: layout + 0.5, "whole numbers"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(change, what):
    """Reject a single row for two, which would be broadcast."""

    def merge(features, inputs):
        merged = Prepend()(features, inputs)
        return {**merged, "token_layout": change(merged["token_layout"])}

    with pytest.raises(ModelError, match=f"token_layout.*{what}"):
        model_of("multimodal", merge)(**pm.batch([5, 3], 1, vision=[0, 0, 1]))


@pytest.mark.parametrize("given", [None, full(3)])
def test_an_invalid_mask_of_a_policy_is_rejected(given):
    def wrong(length, spans, document_lengths):
        return given

    with pytest.raises(ModelError, match="mask policy wrong returned .* for a row of 5 tokens"):
        model_of(wrong)(**pm.batch([5, 3], 1))


def test_more_encoders_than_kinds_are_refused():
    vision = ModalityModule(pm.build(pm.siglip(), 1), "linear")
    language = ModalityModule(pm.build(pm.llama(), 3))
    encoders = {f"vision{n}": vision for n in range(63)}
    with pytest.raises(ModelError, match="at most 62 encoders, got 63"):
        MultimodalModule(encoders, language, mask="multimodal")
    with pytest.raises(ModelError, match="mask is \\['causal'\\]"):
        MultimodalModule({}, language, mask=["causal"])
