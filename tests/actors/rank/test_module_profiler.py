"""The profiler on modules of known cost, with a clock that only the modules advance."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from raymm.actors.memory.live_bytes import LiveBytes
from raymm.actors.modules.merge import Prepend
from raymm.actors.rank.module_profiler import ModuleProfiler, ProfileRequest, layer_peaks
from raymm.actors.sharding.tensor_plan import tensor_plan
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import ConfigSource, LiveSource

# Seconds of the fake clock per block: forward, input gradient, weight gradient.
COSTS = ((3.0, 5.0, 7.0), (11.0, 13.0, 17.0), (19.0, 23.0, 29.0))
CLOCK = [0.0]
ROWS, WIDTH, INNER = 64, 32, 256
FLOAT = 4
HIDDEN, WIDE, WEIGHT = ROWS * WIDTH * FLOAT, ROWS * INNER * FLOAT, WIDTH * INNER * FLOAT


class _TimedProduct(torch.autograd.Function):
    """``x @ w`` that advances the clock by given amounts."""

    @staticmethod
    def forward(ctx, x, weight, costs):
        CLOCK[0] += costs[0]
        ctx.save_for_backward(x, weight)
        ctx.costs = costs
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            CLOCK[0] += ctx.costs[1]
            for_x = gradient @ weight.T
        if ctx.needs_input_grad[1]:
            CLOCK[0] += ctx.costs[2]
            for_weight = x.flatten(0, 1).T @ gradient.flatten(0, 1)
        return for_x, for_weight, None


class TimedBlock(nn.Module):
    def __init__(self, costs) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.costs = costs

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _TimedProduct.apply(hidden_states, self.weight, self.costs)


class TimedEncoder(nn.Module):
    """Encoder that calls its blocks in one of the two usual ways."""

    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimedBlock(costs) for costs in COSTS[:2])
        self.by_keyword = by_keyword

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = layer(hidden_states=features) if self.by_keyword else layer(features)
        return features


@pytest.fixture
def fake_clock(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK[0])


def timed_stage(by_keyword: bool, frozen: bool) -> EncoderStage:
    encoder = TimedEncoder(by_keyword).requires_grad_(not frozen)
    projector = TimedBlock(COSTS[2])
    spec = EncoderSpec("x", LiveSource.of(encoder), 2, LiveSource.of(projector))
    return EncoderStage(spec, 0, 3, encoder, projector)


@pytest.mark.cells(1)
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_times_are_attributed_to_their_layers(fake_clock, by_keyword, frozen):
    profiler = ModuleProfiler(partial(timed_stage, by_keyword, frozen), "cpu", None, False, 1)
    inputs = {"features": torch.randn(2, 6, 4), "sample_index": torch.tensor([0, 1])}
    times = profiler.measure(ProfileRequest(inputs, {}), repeats=3)
    measured = tuple((t.forward, t.backward_input, t.backward_weight) for t in times.layers)
    assert measured == COSTS
    assert (times.samples, times.tokens, times.output_shape) == (2, 12, (2, 6, 4))
    assert [t.output_bytes for t in times.layers] == [2 * 6 * 4 * 4] * 3


def test_saved_bytes_are_counted_once_and_without_parameters():
    profiler = ModuleProfiler(partial(timed_stage, False, False), "cpu", None, False, 1)
    inputs = {"features": torch.randn(2, 6, 4), "sample_index": torch.tensor([0, 1])}
    times = profiler.measure(ProfileRequest(inputs, {}), repeats=1)
    # Every block keeps its input (2, 6, 4) in fp32; its weight is a parameter.
    assert [t.activation_bytes for t in times.layers] == [2 * 6 * 4 * 4] * 3


LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=20,
)


def language_stage(frozen: bool = False) -> LanguageStage:
    source = ConfigSource(LlamaForCausalLM, LLAMA, frozen=frozen)
    return LanguageStage.build(LanguageSpec("llm", source, 3, Prepend()), 0, 3)


def text(rows: int, length: int, **sample_index: list[int]) -> dict:
    ids = torch.randint(0, 20, (rows, length))
    index = {name: torch.tensor(rows_of) for name, rows_of in sample_index.items()}
    return {
        "input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids),
        "sample_index": index,
    }


@pytest.mark.cells(1)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_language_model_has_every_cost(autocast, frozen):
    profiler = ModuleProfiler(partial(language_stage, frozen), "cpu", autocast, True, 1)
    request = ProfileRequest(text(2, 10, vision=[0, 1]), {"vision": (2, 4, 32)})
    times = profiler.measure(request, repeats=2)
    assert (times.samples, times.tokens) == (2, 2 * (4 + 10))  # image tokens before the text
    assert len(times.layers) == 3 and times.output_shape == ()
    assert all(t.forward > 0 and t.backward_input > 0 for t in times.layers)
    assert all(t.activation_bytes > 28 * 32 for t in times.layers)
    assert [t.output_bytes for t in times.layers] == [28 * 32 * 4] * 2 + [4]


def test_plain_text_leaves_the_merge_out_for_that_request_only():
    profiler = ModuleProfiler(language_stage, "cpu", None, False, 1)
    plain = profiler.measure(ProfileRequest(text(3, 9), {}, plain_text=True), repeats=1)
    assert (plain.samples, plain.tokens) == (3, 27)
    request = ProfileRequest(text(1, 9, vision=[0]), {"vision": (1, 4, 32)})
    assert profiler.measure(request, repeats=1).tokens == 13


@pytest.mark.cells(1)
@pytest.mark.parametrize("frozen", [False, True])
def test_activations_grow_with_length_without_weights(frozen):
    profiler = ModuleProfiler(partial(language_stage, frozen), "cpu", "bfloat16", True, 1)
    short, long = (
        profiler.measure(ProfileRequest(text(1, n), {}, plain_text=True), 1).layers[1]
        for n in (64, 128)
    )
    # Twice as much, except for rotary tables: no weights are included.
    assert long.activation_bytes == pytest.approx(2 * short.activation_bytes, rel=0.02)


def test_a_real_encoder_is_measured_with_its_projector():
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4,
    )
    projector = nn.Linear(16, 32)

    def build() -> EncoderStage:
        spec = EncoderSpec(
            "vision", ConfigSource(SiglipVisionModel, config, frozen=True), 2,
            LiveSource.of(projector),
        )
        return EncoderStage.build(spec, 0, 3)

    profiler = ModuleProfiler(build, "cpu", None, False, 1)
    inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "sample_index": torch.tensor([0, 0, 1])}
    times = profiler.measure(ProfileRequest(inputs, {}), repeats=1)
    assert (times.samples, times.tokens, times.output_shape) == (3, 12, (3, 4, 32))
    assert times.layers[2].output_bytes == 12 * 32 * 4
    assert times.layers[2].activation_bytes == 12 * 16 * 4  # the input of its one product


def test_a_plain_module_that_cannot_be_cut_is_one_layer():
    cnn = nn.Conv2d(3, 8, 4, 4)
    spec = EncoderSpec("vision", LiveSource.of(cnn), 1)
    profiler = ModuleProfiler(lambda: EncoderStage(spec, 0, 1, cnn, None), "cpu", None, False, 1)
    inputs = {"input": torch.randn(2, 3, 8, 8), "sample_index": torch.tensor([0, 1])}
    times = profiler.measure(ProfileRequest(inputs, {}), repeats=1)
    assert (len(times.layers), times.samples, times.tokens) == (1, 2, 8)
    assert times.layers[0].backward_input > 0


def test_activation_options_of_blocks_are_measured():
    """Check the kept bytes: only the input with full recomputation, more with kept products."""
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        image_size=8, patch_size=4,
    )

    def build(frozen: bool) -> EncoderStage:
        spec = EncoderSpec(
            "vision", ConfigSource(SiglipVisionModel, config, frozen=frozen), 3,
            LiveSource.of(nn.Linear(16, 32).requires_grad_(not frozen)),
        )
        return EncoderStage.build(spec, 0, 4)

    inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "sample_index": torch.tensor([0, 0, 1])}
    trained, frozen = (
        ModuleProfiler(lambda frozen=frozen: build(frozen), "cpu", None, False, 1).measure(
            ProfileRequest(inputs, {}), repeats=1
        ).layers
        for frozen in (False, True)
    )
    assert not any(layer.options for layer in frozen) and not trained[3].options
    hidden = 3 * 4 * 16 * 4
    for layer in trained[:3]:
        held = {option.name: option.nbytes for option in layer.options}
        assert list(held) == ["matmuls", "attention", "all"]
        assert held["all"] < held["attention"] < held["matmuls"] < layer.activation_bytes
        assert all(option.seconds >= 0 for option in layer.options)
        # Recomputed tensors exist while their gradients do.
        working = {option.name: option.working_bytes or 0 for option in layer.options}
        assert working["all"] + held["all"] > layer.activation_bytes
        assert working["all"] > working["matmuls"] > 0
    # The first layer includes the patch embedding.
    assert trained[1].options[2].nbytes == hidden
    # Blocks of one kind are equal.
    assert trained[1].options[0].seconds == trained[0].options[0].seconds


def test_half_of_a_module_is_measured():
    """Check the replicated parts: both norms of a block with their inputs, outputs and statistics.

    Products inside are sharded.
    """
    config = LlamaConfig(
        hidden_size=32, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )
    source = ConfigSource(LlamaForCausalLM, config)
    profiler = ModuleProfiler(
        lambda: LanguageStage.build(LanguageSpec("llm", source, 3, Prepend()), 0, 3),
        "cpu", None, False, 1,
    )
    rows, tokens = 2, 24
    ids = torch.randint(64, (rows, tokens))
    request = ProfileRequest(
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}, {}
    )
    whole = profiler.measure(request, repeats=1).layers
    profiler.halve({"module": tensor_plan(source, 2, "llm")})
    halved = profiler.layer_bytes(request)
    assert len(halved) == 3
    hidden = rows * tokens * 32 * 4
    for layer, half in zip(whole, halved, strict=True):
        sizes = (layer.activation_bytes, half.activation_bytes), *(
            (a.nbytes, b.nbytes) for a, b in zip(layer.options, half.options, strict=True)
        )
        assert all(0 <= 2 * half - size for size, half in sizes)
        assert [option.name for option in half.options] == ["matmuls", "attention", "all"]
        assert half.working_bytes < layer.working_bytes
    # A block's input, the result of attention, and for each its norm and the scaled norm.
    shared = 2 * halved[1].activation_bytes - whole[1].activation_bytes
    assert 6 * hidden <= shared < 7 * hidden
    assert 2 * halved[1].options[2].nbytes - whole[1].options[2].nbytes == hidden


class Block(nn.Module):
    """Block ``x -> relu(x A) B``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(INNER, WIDTH))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (hidden_states @ self.up).relu() @ self.down


def test_layers_of_a_module() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    inputs = torch.randn(ROWS, WIDTH)

    def run() -> torch.Tensor:
        hidden = inputs
        for block in blocks:
            hidden = block(hidden)
        return hidden

    run().sum().backward()  # gradients exist, as in all microbatches but the first
    live = LiveBytes()
    live.note_all()
    with live:
        # A block keeps the result of relu, and the second one its input.
        working, forward = layer_peaks(run, list(blocks), live, [WIDE, WIDE + HIDDEN])
    # The second one's backward needs the output's gradient, and that of relu's result and of its
    # input, or of a weight. The first one's needs no gradient of the input.
    assert HIDDEN + WIDE <= working[1] <= HIDDEN + 2 * WIDE + WEIGHT
    assert HIDDEN + WIDE <= working[0] <= HIDDEN + 2 * WIDE + WEIGHT
    # Without a backward: the product and the result of relu; the second's input, too.
    assert forward == [2 * WIDE, HIDDEN + 2 * WIDE]
