"""Hugging Face decoders with a raymm mask equal the same models with the dense mask."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

from benchmarks.gpu.every_mask import every_pattern
from raymm.errors import ModelError
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.hf.self_attention import ModelMask, raymm_attention_forward, raymm_model_mask
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import causal, causal_with_own_image, documents, multimodal
from raymm.kernels.mask.spans import Span
from tests.support.random_masks import same_tables

hf_attention.register()
T, V, WINDOW = 57, 61, 13
TOLERANCE = 1e-5
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=V, use_cache=False,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
DECODERS = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8
    ),
}  # fmt: skip


def decoder(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = DECODERS[name]()
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def with_raymm(model: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(hf_attention.NAME)
    return twin


def dense_argument(model: torch.nn.Module, masks: list[AttentionMask]):
    """Return the model's form of a dense mask: 4-D, or one per kind of layer, 0 and -inf-like."""

    def additive(each: list[AttentionMask]) -> torch.Tensor:
        visible = torch.stack([mask.dense() for mask in each])[:, None]
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    config = model.config
    sliding = [mask.windowed(WINDOW) for mask in masks]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return {"full_attention": additive(masks), "sliding_attention": additive(sliding)}
    return additive(sliding if getattr(config, "sliding_window", None) else masks)


def run(model, ids, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss (of fp32 log-probabilities of the next token) and every gradient."""
    model.zero_grad()
    logits = model(input_ids=ids, **kwargs).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def check_equal(actual, expected) -> None:
    (loss, gradients), (due, dues) = actual, expected
    assert abs(loss - due) <= TOLERANCE * abs(due)
    assert gradients.keys() == dues.keys()
    for name, gradient in gradients.items():
        error = (gradient.double() - dues[name].double()).norm()
        assert error <= TOLERANCE * dues[name].double().norm(), name


def ids_of(batch: int = 1, length: int = T) -> torch.Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(1))


def no_empty_rows(name: str) -> bool:
    """Return True for models whose eager attention lets empty rows see everything."""
    mask = every_pattern(T)[name]()
    return mask.n_queries == mask.n_keys and bool(mask.dense().any(dim=1).all())


PATTERNS = [name for name in every_pattern(T) if no_empty_rows(name)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_decoder_obeys_every_pattern(pattern):
    model, ids = decoder("llama"), ids_of()
    mask = every_pattern(T)[pattern]()
    expected = run(model, ids, attention_mask=dense_argument(model, [mask]))
    check_equal(run(with_raymm(model), ids, raymm_mask=mask), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_real_decoders_with_windows_softcap_and_gqa(name):
    """Use two sequences with a mask each, also with activation recomputation."""
    model, ids = decoder(name), ids_of(2)
    spans = [Span(3, 20, 1), Span(30, 41, 2)]
    masks = [
        causal_with_own_image(T, spans),
        multimodal(T, spans[:1], document_lengths=[25, T - 25]),
    ]
    expected = run(model, ids, attention_mask=dense_argument(model, masks))
    twin = with_raymm(model)
    check_equal(run(twin, ids, raymm_mask=masks), expected)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(run(twin, ids, raymm_mask=masks), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_two_different_masks_back_to_back(name):
    model, ids = decoder(name), ids_of()
    twin = with_raymm(model)
    for mask in (documents([20, 37]), causal(T), documents([20, 37])):
        expected = run(model, ids, attention_mask=dense_argument(model, [mask]))
        check_equal(run(twin, ids, raymm_mask=mask), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_without_a_raymm_mask_the_models_own_is_used(name):
    """Use causal masks with the layers' windows; padding; sequences packed by position ids."""
    model, ids = decoder(name), ids_of(2)
    twin = with_raymm(model)
    check_equal(run(twin, ids), run(model, ids))
    padding = torch.ones(2, T, dtype=torch.int64)
    padding[1, 50:] = 0  # within the window of every row: no row is empty
    check_equal(run(twin, ids, attention_mask=padding), run(model, ids, attention_mask=padding))
    positions = torch.cat([torch.arange(20), torch.arange(T - 20)])[None].expand(2, -1)
    check_equal(run(twin, ids, position_ids=positions), run(model, ids, position_ids=positions))


def test_under_autocast_the_layers_run_in_its_dtype():
    model, ids = decoder("llama"), ids_of()
    mask = documents([20, 37])
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = run(with_raymm(model), ids, raymm_mask=mask)
    exact, _ = run(model, ids, attention_mask=dense_argument(model, [mask]))
    assert loss != exact and abs(loss - exact) <= 2e-2 * exact


def test_a_hidden_token_has_no_influence_at_all():
    """Check that the gradient with respect to an invisible input is exactly zero."""
    model, ids = with_raymm(decoder("qwen3")), ids_of()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    spans = [Span(5, 12, 1), Span(20, 30, 1)]
    mask = multimodal(T, spans, isolate=True, document_lengths=[40, T - 40])
    logits = model(inputs_embeds=embeds, raymm_mask=mask).logits
    seen = reachable(mask, model.config.num_hidden_layers)
    for row in (0, 6, 15, 25, 39, 40, 50):
        (gradient,) = torch.autograd.grad(logits[0, row].sum(), embeds, retain_graph=True)
        touched = (gradient[0] != 0).any(dim=1)
        assert torch.equal(touched, seen[row]), row


def reachable(mask: AttentionMask, layers: int) -> torch.Tensor:
    """Return the inputs that an output depends on after some layers."""
    once = (mask.dense() | torch.eye(T, dtype=torch.bool)).double()
    seen = torch.eye(T, dtype=torch.float64)
    for _ in range(layers):
        seen = ((once @ seen) > 0).double()
    return seen > 0


def test_only_plain_masks_need_no_dense_one():
    from transformers.masking_utils import (
        bidirectional_mask_function,
        or_masks,
        sliding_window_causal_mask_function,
    )

    made = raymm_model_mask(2, 9, 9)
    assert isinstance(made, ModelMask) and made.window is None
    assert same_tables(made.masks[0], causal(9))
    windowed = raymm_model_mask(2, 9, 9, mask_function=sliding_window_causal_mask_function(4))
    assert windowed.window == 4 and same_tables(windowed.masks[0], causal(9, 4))
    both = raymm_model_mask(2, 9, 9, mask_function=bidirectional_mask_function)
    assert bool(both.masks[0].dense().all())

    def first(b, h, q, k):
        return k == 0

    other = or_masks(sliding_window_causal_mask_function(4), first)
    made = raymm_model_mask(2, 9, 9, mask_function=other, use_vmap=True)
    dense = causal(9, 4).dense()
    dense[:, 0] = True
    assert made.window is None and len(made.masks) in (1, 2)
    assert all(torch.equal(mask.dense(), dense) for mask in made.masks)


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(4)}, "position bias"),
        ({"dropout": 0.1}, "attention dropout 0.1"),
        ({"raymm_mask": causal(9)}, "9 queries and 9 keys, the tensors have 8 and 8"),
        ({"attention_mask": torch.randn(1, 1, 8, 8)}, "adds a bias"),
        ({"attention_mask": torch.ones(1, 8, dtype=torch.bool)}, r"\(B, 1, Tq, Tk\)"),
    ],
)
def test_unsupported_features_are_refused(given, said):
    query, key = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    arguments = {"attention_mask": None, **given}
    with pytest.raises(ModelError, match=said):
        raymm_attention_forward(Layer(), query, key, key, **arguments)


def test_chunked_attention_does_not_lose_its_chunks():
    layer = Layer()
    layer.config = hf.LlamaConfig(attention_chunk_size=4)
    query, key = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    with pytest.raises(ModelError, match="chunks of 4"):
        raymm_attention_forward(layer, query, key, key, None, raymm_mask=causal(8))
