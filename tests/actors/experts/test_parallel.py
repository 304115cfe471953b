"""Experts that are sharded over processes equal the unsharded layer."""

import copy

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raymm.actors.experts.parallel import check_experts, share_experts, share_of
from raymm.actors.experts.routing import experts
from raymm.actors.modules.precision import ComputeCopies
from raymm.costs.layer_count import count_layers
from raymm.costs.load import Load
from raymm.errors import ModelError
from raymm.kernels.collectives.exchange_rows import exchange_rows
from tests.support.rank_processes import rank_processes

WIDTH, MOST = 8, 3
SIZES = dict(
    hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=4, vocab_size=16, num_experts_per_tok=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def processes():
    with rank_processes(MOST) as running:
        yield running


def layer(name: str, count: int) -> nn.Module:
    """Return all experts of a layer, with random weights."""
    config = getattr(hf, f"{name}Config")(**SIZES, num_local_experts=count)
    (found,) = experts(getattr(hf, f"{name}ForCausalLM")(config)).values()
    torch.manual_seed(count)
    for parameter in found.parameters():
        nn.init.normal_(parameter)
    return found


def tokens(seed: int, rows: int, count: int, among: int):
    """Return hidden states, experts, weights and gradients of tokens that use ``among`` experts."""
    generator = torch.Generator().manual_seed(seed)
    hidden, due = torch.randn(2, rows, WIDTH, generator=generator)
    used = torch.randperm(count, generator=generator)[:among]
    order = torch.rand(rows, among, generator=generator).argsort(1)[:, : min(2, among)]
    weights = torch.rand(order.shape, generator=generator)
    return hidden, used[order], weights, due


def computed(module: nn.Module, hidden, chosen, weights, due):
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    output = module(hidden, chosen, weights)
    output.backward(due)
    return output.detach(), hidden.grad, weights.grad


def shared(group, name, seed, count, sizes, among):
    """Return a process's outputs for its tokens, and its experts' gradients."""
    module, place = layer(name, count), dist.get_rank(group)
    share_experts(module, place, len(sizes), group)
    start = sum(sizes[:place])
    own = [part[start : start + sizes[place]] for part in tokens(seed, sum(sizes), count, among)]
    outcome = computed(module, *own)
    return outcome, {n: p.grad for n, p in module.named_parameters()}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["Mixtral", "GptOss"]), seed=st.integers(0, 1000),
    count=st.integers(3, 7), among=st.integers(1, 7),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=MOST),
)  # fmt: skip
def test_sharded_experts_equal_the_whole_layer(processes, name, seed, count, among, sizes):
    """Include tokens that use no expert of a process, and processes with few tokens."""
    among = min(among, count)
    whole = layer(name, count)
    expected = computed(whole, *tokens(seed, sum(sizes), count, among))
    results = processes.run(
        shared, len(sizes), name=name, seed=seed, count=count, sizes=sizes, among=among
    )
    for number, due in enumerate(expected):
        assert close(torch.cat([outcome[number] for outcome, _ in results]), due)
    share = share_of(count, len(sizes))
    for parameter, due in whole.named_parameters():
        for place, (_, gradients) in enumerate(results):
            # None means no gradient: AdamW would skip a parameter that it decays elsewhere.
            assert close(gradients[parameter], due.grad[share * place : share * (place + 1)])


def exchanged(group):
    """Count the exchanges of tokens to experts and back."""
    sizes: list[int] = []

    def counting(rows, *how):
        sizes.append(rows.numel())
        return exchange_rows(rows, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymm.actors.experts.parallel.exchange_rows", counting)
        shared(group, "Mixtral", 0, 4, (5, 2), 4)
    return sum(sizes)


def test_costs_predict_the_exchanged_bytes(processes):
    config = hf.MixtralConfig(**SIZES, num_local_experts=4)
    (count,) = count_layers(hf.MixtralForCausalLM(config), Load(1, 7), causal=True)
    assert sum(processes.run(exchanged, 2)) == count.exchange_elements


def in_bf16(group):
    """Run as under autocast: weights appear in bf16, their gradients arrive in fp32."""
    module, place = layer("Mixtral", 4), dist.get_rank(group)
    share_experts(module, place, 2, group, cast=True)
    own = [part[3 * place : 3 * place + 3] for part in tokens(0, 6, 4, 4)]
    with ComputeCopies([module], torch.bfloat16).shown() as copies:
        assert {copy.dtype for copy in copies} == {torch.bfloat16} and len(copies) == 2
        outcome = computed(module, *own)
    return outcome, {n: p.grad for n, p in module.named_parameters()}


def test_experts_compute_in_the_autocast_dtype(processes):
    whole = layer("Mixtral", 4)
    output = computed(whole, *tokens(0, 6, 4, 4))[0]
    results = processes.run(in_bf16, 2)
    low = torch.cat([outcome[0] for outcome, _ in results])
    assert not torch.equal(low, output) and (low - output).norm() <= 2e-2 * output.norm()
    for name, due in whole.named_parameters():
        gradient = torch.cat([gradients[name] for _, gradients in results])
        assert gradient.dtype == torch.float32
        assert (gradient - due.grad).norm() <= 3e-2 * due.grad.norm()


def test_experts_that_cannot_be_sharded():
    check_experts(layer("Mixtral", 4))
    odd = layer("Mixtral", 4)
    odd.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError, match=r"do not all have 4 experts .*: .*scale \(3,\)"):
        check_experts(odd)
    del odd.num_experts
    with pytest.raises(ModelError, match="do not all have the same number of experts"):
        check_experts(odd)
    together = copy.deepcopy(layer("Mixtral", 4))
    forward = together.forward
    together.forward = lambda *args: forward(*args) * together.gate_up_proj.mean()
    with pytest.raises(ModelError, match="each processes its tokens alone"):
        check_experts(together)
