"""Backward in two passes equals ``torch.autograd.backward``: numbers, work, memory, hooks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from raymm.actors.executor.split_backward import backward_input

Forward = Callable[..., Sequence[torch.Tensor]]


class Passes:
    """Gradients of one forward, computed plainly and in two passes.

    Args:
        parameters: parameters that get gradients.
        forward: maps leaves to outputs; runs twice, with the same seed.
        inputs: values of the leaves.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], forward: Forward, inputs: Sequence[torch.Tensor]
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        leaves, outputs = self._forward(forward, inputs)
        generator = torch.Generator().manual_seed(1)
        gradients = [
            None if t.dim() == 0 else torch.randn(t.shape, generator=generator).to(t.dtype)
            for t in outputs
        ]
        pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
        with FlopCounterMode(display=False) as plain:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self.expected = [p.grad for p in self.parameters]
        self.expected_inputs = [leaf.grad for leaf in leaves]
        leaves, outputs = self._forward(forward, inputs)
        with FlopCounterMode(display=False) as first:
            self.inputs, deferred = backward_input(outputs, gradients, leaves)
        self.early = [p.grad is not None for p in self.parameters]
        del outputs
        with FlopCounterMode(display=False) as second:
            deferred.run()
        self.actual = [p.grad for p in self.parameters]
        self.flops = tuple(one.get_total_flops() for one in (plain, first, second))

    def _forward(self, forward: Forward, inputs: Sequence[torch.Tensor]):
        for parameter in self.parameters:
            parameter.grad = None
        torch.manual_seed(0)
        leaves = [value.detach().requires_grad_() for value in inputs]
        return leaves, forward(*leaves)

    def check(self, tolerance: float = 0.0, early: int | None = 0) -> None:
        """Check all gradients, relative to their own norms.

        Args:
            early: number of parameters whose gradients are computed in pass one; None for any.
        """
        for mine, due in [
            *zip(self.actual, self.expected, strict=True),
            *zip(self.inputs, self.expected_inputs, strict=True),
        ]:
            assert (mine is None) == (due is None)
            if due is not None:
                assert mine.dtype == due.dtype and mine.shape == due.shape
                error = (mine.double() - due.double()).norm()
                assert error <= tolerance * due.double().norm()
        assert any(due is not None for due in self.expected + self.expected_inputs)
        if early is not None:
            assert sum(self.early) == early

    def check_work(self) -> None:
        """Check that no product is computed twice, and that each pass has its share."""
        plain, first, second = self.flops
        assert first > 0 and second > 0
        assert first + second == plain


def passes(module: nn.Module, forward: Forward, *inputs: torch.Tensor) -> Passes:
    return Passes(list(module.parameters()), forward, inputs)


def x(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def decoder(kind: str) -> nn.Module:
    torch.manual_seed(0)
    small = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=31,
    )
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**small, tie_word_embeddings=False))
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**small, num_local_experts=4))
    if kind == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, head_dim=4, tie_word_embeddings=True))
    return hf.GPT2LMHeadModel(hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=16, resid_pdrop=0.3,
        embd_pdrop=0.3, attn_pdrop=0.3, bos_token_id=1, eos_token_id=1,
    )).train()


def embedded(module: nn.Module) -> Forward:
    """Run a decoder as the first and last stage of a model.

    Modality features are added to the embedded text (so tied embeddings are used twice), and the
    loss is returned.
    """

    def forward(features: torch.Tensor) -> list[torch.Tensor]:
        embeds = module.get_input_embeddings()(IDS)
        logits = module(inputs_embeds=embeds + features, use_cache=False).logits
        return [F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())]

    return forward


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3", "gpt2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_decoders_bit_for_bit(kind, autocast):
    """Compare whole decoders, tied (Qwen3, GPT-2) and not, mixture of experts, dropout (GPT-2).

    Under autocast a weight has one cast for all its uses. Both ways sum the two uses of a tied
    weight in bf16, so that even this is equal.
    """
    module = decoder(kind)
    inner = embedded(module)

    def forward(features):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return inner(features)

    run = passes(module, forward, x(2, 5, 16))
    run.check()
    run.check_work()


@pytest.mark.parametrize("kind", ["siglip", "clip", "whisper", "albert"])
def test_encoders_bit_for_bit(kind):
    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    early = 0
    if kind == "whisper":
        module = WhisperEncoder(hf.WhisperConfig(
            d_model=16, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=24,
            num_mel_bins=8, max_source_positions=6, dropout=0.2, vocab_size=31, pad_token_id=0,
            decoder_start_token_id=1, decoder_layers=1, decoder_attention_heads=2,
        )).train()
        run = passes(module, lambda t: [module(t).last_hidden_state], x(2, 8, 12))
    elif kind == "albert":  # one layer's weights, used twice
        module = hf.AlbertModel(hf.AlbertConfig(**size, embedding_size=8, vocab_size=31))
        run = passes(module, lambda t: [module(inputs_embeds=t).last_hidden_state], x(2, 5, 8))
        early = 10  # the layer's biases and norms; its matrices are deferred
    else:
        image = dict(**size, image_size=16, patch_size=8)
        module = (
            hf.SiglipVisionModel(hf.SiglipVisionConfig(**image)) if kind == "siglip"
            else hf.CLIPVisionModel(hf.CLIPVisionConfig(**image))
        )
        run = passes(module, lambda t: [module(t).last_hidden_state], x(2, 3, 16, 16))
    run.check(early=early)
    run.check_work()


def test_frozen_and_partly_frozen():
    """Freeze everything, so that pass one does all; train only norms: no matrix product in pass
    two.
    """
    module = decoder("llama").requires_grad_(False)
    run = passes(module, embedded(module), x(2, 5, 16))
    run.check()
    assert run.flops[0] == run.flops[1] and run.flops[2] == 0
    for layer in module.model.layers:
        layer.input_layernorm.requires_grad_(True)
    run = passes(module, embedded(module), x(2, 5, 16))
    run.check()
    assert len(run.parameters) == 2
    assert run.flops[0] == run.flops[1] and run.flops[2] == 0


class Custom(torch.autograd.Function):
    """Product x * w, with a backward that computes both gradients at once and counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        Custom.calls += 1
        value, weight = ctx.saved_tensors
        return gradient * weight, (gradient * value).flatten(0, -2).sum(0)


def p(*shape: int, seed: int = 7) -> torch.Tensor:
    return nn.Parameter(x(*shape, seed=seed))


W, V, B, E = p(4, 4), p(4, 4, seed=8), p(4, seed=9), p(12, 4, seed=10)
Q = p(12, 4, seed=11)


def in_place(t: torch.Tensor) -> list[torch.Tensor]:
    total = torch.zeros(3, 4)
    total.index_add_(0, torch.tensor([2, 0, 2]), t @ W)
    total[:, :2] += (t @ V)[:, :2]
    total.mul_(B)
    return [total]


def fused(t: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (t @ Q.t()).chunk(3, -1)
    mixed = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    one, two = (mixed @ W).split(2, -1)
    return [one * two.sum(), torch.stack((mixed @ V).unbind(0)).cumsum(0)]


def split_weight(t: torch.Tensor) -> list[torch.Tensor]:
    """Return one weight, cut into three, which the chain enters at different depths."""
    a, b, c = Q.chunk(3)
    return [F.linear(F.linear(F.linear(t, a).tanh(), b).tanh(), c)]


def weight_and_its_norm(t: torch.Tensor) -> list[torch.Tensor]:
    """Return a weight that the chain enters directly and, lower down, through its norm."""
    return [(t * (B / B.norm())).tanh() * B]


def recurrent(t: torch.Tensor) -> list[torch.Tensor]:
    hidden = torch.zeros(3, 4)
    for _ in range(4):
        hidden = torch.tanh(F.linear(t, W, B) + F.linear(hidden, V, B))
    return [hidden]


# name: (parameters, forward, number of parameters that pass one must handle)
GRAPHS = {
    "chain": ([W, V, B], lambda t: [F.linear(F.linear(t, W, B).relu(), V)], 0),
    "input used several times": ([W, V], lambda t: [(t @ W) * t + (t @ V).tanh() * (t + 1)], 0),
    "weight used twice": ([W, B], lambda t: [F.linear(F.linear(t, W).tanh(), W, B)], 0),
    "recurrent": ([W, V, B], recurrent, 1),
    "norm used twice": ([W, B], lambda t: [((t * B) @ W) * B], 1),
    "weight and its norm": ([B], weight_and_its_norm, 1),
    "tied": ([E, W], lambda t: [F.linear((F.embedding(IDS[0, :3], E) + t) @ W, E)], 0),
    "embedding used twice": (
        [E], lambda t: [(F.embedding(IDS[0, :3], E) + t) * F.embedding(IDS[0, 1:4], E)], 0,
    ),
    "a product of parameters": ([W, V], lambda t: [(t @ (W @ V)).tanh()], 0),
    "a product of parameters, used twice": (
        [W, V, B], lambda t: [(lambda m: ((t @ m) * B) @ m)(W @ V)], 2,
    ),
    "an output that no input is part of": ([W, B], lambda t: [t @ W, (B * W).sum(), W + 1], 1),
    "an output without gradient": ([W], lambda t: [t @ W, torch.ones(2)], 0),
    "a parameter returned": ([W, B], lambda t: [(t @ W) * B, B], 1),
    "the input returned": ([W], lambda t: [t @ W, t], 0),
    "the same output twice": ([W], lambda t: [t @ W] * 2, 0),
    "an input that is not used": ([W, B], lambda t: [(W * B).sum()], 0),
    "unused parameter": ([W, V], lambda t: [t @ W], 0),
    "in place": ([W, V, B], in_place, 0),
    "chunk, split, unbind, attention": ([Q, W, V], fused, 0),
    "chunked weight": ([Q], split_weight, 0),
    "custom function": ([W, B], lambda t: [Custom.apply(t @ W, B).tanh()], 1),
    "custom function without parameters": ([W, V], lambda t: [Custom.apply(t @ W, x(4)) @ V], 0),
    "custom function among parameters": ([W, B], lambda t: [t @ Custom.apply(W, B)], 0),
    "expanded bias": ([B], lambda t: [t + B + B.expand(3, 4)], 1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name):
    """Accept rounding for weights whose parts are summed in another order."""
    parameters, forward, early = GRAPHS[name]
    Passes(parameters, forward, [x(3, 4)]).check(1e-6, early=early)


def test_a_custom_function_runs_once_per_backward():
    Custom.calls = 0
    Passes([W, B], lambda t: [Custom.apply(t @ W, B).tanh()], [x(3, 4)])
    assert Custom.calls == 2  # once plainly, once in two passes


@pytest.mark.parametrize("module, shape", [
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3),
                   nn.GroupNorm(2, 4)), (2, 3, 7, 7)),
    (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2), (2, 5, 8)),
    (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.PReLU(), nn.utils.weight_norm(
        nn.Linear(6, 6))), (3, 6)),
])
def test_torch_modules(module, shape):
    run = passes(module, lambda t: [module(t)], x(*shape))
    run.check(1e-6)
    run.check_work()


def test_lstm():
    module = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
    passes(module, lambda t: [module(t)[0]], x(2, 5, 4)).check(1e-6, early=None)


OPS = ["linear", "matmul", "scale", "add", "mul", "tanh", "slice", "in_place", "shift", "cat"]


@given(st.data())
def test_random_graphs(data):
    """Reuse parameters and intermediate results at random, in double precision."""
    count = data.draw(st.integers(1, 3))
    parameters = [x(4, 4, seed=i).double().requires_grad_() for i in range(count)]
    vectors = [x(4, seed=20 + i).double().requires_grad_() for i in range(count)]
    draw = data.draw
    steps = draw(st.lists(st.tuples(
        st.sampled_from(OPS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99),
    ), min_size=1, max_size=12))
    num_inputs = draw(st.integers(1, 2))
    num_outputs = draw(st.integers(1, 3))

    def forward(*leaves):
        # Later operations treat results, parameters and functions of parameters the same.
        pool = [*leaves, *parameters]
        for op, a, b, c in steps:
            one, two = pool[-1 - a % len(pool)], pool[b % len(pool)]
            weight, vector = parameters[c % count], vectors[c % count]
            if op == "linear":
                new = F.linear(one, weight, vector)
            elif op == "matmul":
                new = one @ two
            elif op == "scale":
                new = one * vector
            elif op == "add":
                new = one + two
            elif op == "mul":
                new = one * two
            elif op == "tanh":
                new = one.tanh()
            elif op == "slice":
                upper, lower = one.split(2)
                new = torch.cat([lower * vector, upper])
            elif op == "in_place":
                new = one.clone()
                new[1:3] += two[:2] @ weight
                new.mul_(vector)
            elif op == "shift":
                new = torch.stack(one.unbind(0)[::-1]) + vector
            else:
                new = torch.cat([one, two])[1:5]
            pool.append(new / (1 + new.detach().norm()))
        return pool[-num_outputs:]

    values = [x(4, 4, seed=30 + i).double() for i in range(num_inputs)]
    leaves = [value.requires_grad_() for value in values]
    if not any(t.requires_grad for t in forward(*leaves)):
        return
    Passes([*parameters, *vectors], forward, values).check(1e-12, early=None)


def test_gradients_accumulate_over_microbatches():
    """Interleave passes of several microbatches, as in a schedule."""
    module = decoder("qwen3")
    forward = embedded(module)
    features = [x(2, 5, 16, seed=i) for i in range(3)]
    for one in features:
        torch.autograd.backward(forward(one.requires_grad_()))
    due = {name: q.grad for name, q in module.named_parameters()}
    module.zero_grad()
    deferred = []
    outputs = [forward(one) for one in features]
    for one, loss in zip(features, outputs, strict=True):
        deferred.append(backward_input(loss, [None], [one])[1])
    for one in deferred:
        one.run()
    for name, q in module.named_parameters():
        assert (q.grad - due[name]).norm() <= 1e-6 * due[name].norm()


class Packed:
    """Wrapper of a saved tensor that supports weak references."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value.detach()  # an output would hold its node, and the node this object


def test_the_graph_is_freed_during_pass_two():
    """Disable the garbage collector: there must be no reference cycles."""
    module = decoder("llama")
    forward = embedded(module)
    packed: list[weakref.ref] = []

    def pack(value: torch.Tensor) -> Packed:
        packed.append(weakref.ref(held := Packed(value)))
        return held

    def alive() -> int:
        return sum(one() is not None for one in packed)

    leaf = x(2, 5, 16).requires_grad_()
    gc.disable()
    try:
        with saved_tensors_hooks(pack, lambda held: held.value):
            outputs = forward(leaf)
        everything = alive()
        _, deferred = backward_input(outputs, [None], [leaf])
        del outputs
        seen = [alive()]
        norm = module.model.layers[0].post_attention_layernorm
        handle = norm.weight.register_post_accumulate_grad_hook(lambda _: seen.append(alive()))
        deferred.run()
        assert everything >= seen[0] > seen[1] > 0 and alive() == 0
        handle.remove()
        _, deferred = backward_input(forward(leaf), [None], [leaf])
        del deferred
        packed.clear()
        with saved_tensors_hooks(pack, lambda held: held.value):
            outputs = forward(leaf)
        _, deferred = backward_input(outputs, [None], [leaf])
        del outputs, deferred  # a failed step drops all of it unused
        assert packed and alive() == 0
    finally:
        gc.enable()


def test_no_hook_remains_on_a_living_graph():
    """Check that a node that saves nothing, and so can run again, does not keep its inputs."""
    leaf, bias = x(3, 4).requires_grad_(), p(4)
    output = leaf + bias
    _, deferred = backward_input([output], [torch.ones(3, 4)], [leaf])
    deferred.run()
    later = torch.full((3, 4), 2.0)
    observed = weakref.ref(later)
    (gradient,) = torch.autograd.grad([output], [leaf], [later])
    assert gradient.equal(later)
    del gradient, later
    assert observed() is None


def test_hooks_of_tensors_and_parameters_apply_once():
    weight, bias = p(4, 4), p(4, seed=9)
    weight.register_hook(lambda g: g * 3)
    bias.register_hook(lambda g: g * 5)

    def forward(t):
        hidden = F.linear(t, weight, bias)
        hidden.register_hook(lambda g: g * 2)
        return [F.linear(hidden.tanh(), weight) * bias]

    Passes([weight, bias], forward, [x(3, 4)]).check(1e-6, early=1)
    Passes([weight, bias], lambda t: [F.linear(t, weight, bias)], [x(3, 4)]).check()


def test_post_accumulate_hooks_run_in_both_passes():
    weight, bias = p(4, 4), p(4, seed=9)
    seen = []
    for one in (weight, bias):
        one.register_post_accumulate_grad_hook(lambda q: seen.append(q.shape))
    leaf = x(3, 4).requires_grad_()
    output = F.linear(F.linear(leaf, weight, bias), weight, bias)
    _, deferred = backward_input([output], [torch.ones(3, 4)], [leaf])
    assert seen == [bias.shape]
    deferred.run()
    assert seen == [bias.shape, weight.shape]
