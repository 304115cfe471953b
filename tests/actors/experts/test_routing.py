"""The routers' loss in parts equals transformers' loss of one batch; expert loads are counted."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from raymm.actors.experts.router_loss import Mixture, RouterLoss
from raymm.actors.experts.routing import Routing, experts, real_tokens, routers
from raymm.actors.probe.experts.router_loss import mixture_of
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError

SIZES = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, vocab_size=32, num_experts_per_tok=2, num_local_experts=4,
    output_router_logits=True,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000), layers=st.integers(1, 4), rows=st.integers(1, 20),
    top_k=st.integers(1, 3), cuts=st.lists(st.integers(0, 20), max_size=4),
    stages=st.integers(1, 4), padded=st.booleans(),
)  # fmt: skip
def test_parts_add_up_to_the_loss_of_one_batch(seed, layers, rows, top_k, cuts, stages, padded):
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(rows, 5, generator=generator).requires_grad_() for _ in range(layers)]
    real = torch.ones(rows, dtype=torch.bool)
    if padded and rows > 1:
        real[torch.randperm(rows, generator=generator)[: rows // 2]] = False
    expected = 0.3 * load_balancing_loss_func(tuple(logits), 5, top_k, real.long()[None])
    due = torch.autograd.grad(expected, logits)

    loss = RouterLoss(5, top_k, 0.3)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = [
        loss.of([one[lo:hi] for one in logits[stage::stages]], real[lo:hi])
        for lo, hi in zip(edges, edges[1:], strict=False)
        for stage in range(min(stages, layers))
    ]
    step = torch.stack([part.counts for part in parts]).sum(0).tolist()
    total = torch.stack([loss.part(part, step) for part in parts]).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.whole(parts).item() == pytest.approx(expected.item(), rel=1e-5)
    for own, other in zip(torch.autograd.grad(total, logits), due, strict=True):
        assert (own - other).norm() <= 1e-5 * other.norm()


def test_a_step_of_padding_alone_has_no_loss():
    loss, logits = RouterLoss(5, 2, 0.3), torch.randn(4, 5, requires_grad=True)
    part = loss.part(loss.of([logits], torch.zeros(4, dtype=torch.bool)))
    part.backward()
    assert part.item() == 0 and not logits.grad.any()


@pytest.mark.parametrize(
    "name, more",
    [
        ("Mixtral", {"router_aux_loss_coef": 0.01}), ("GptOss", {"router_aux_loss_coef": 0.9}),
        ("JetMoe", {"aux_loss_coef": 0.02, "kv_channels": 8}),
    ],
)
def test_a_models_own_loss_is_found_by_a_trial(name, more):
    config = getattr(hf, f"{name}Config")(**SIZES, **more)
    source = ConfigSource(getattr(hf, f"{name}ForCausalLM"), config)
    coefficient = next(iter(more.values()))
    assert mixture_of(source) == Mixture(RouterLoss(config.num_local_experts, 2, coefficient))
    assert mixture_of(source, ignore=True) == Mixture()
    setattr(config, next(iter(more)), 0.0)
    assert mixture_of(ConfigSource(getattr(hf, f"{name}ForCausalLM"), config)) == Mixture()
    config.output_router_logits = False
    assert mixture_of(ConfigSource(getattr(hf, f"{name}ForCausalLM"), config)) == Mixture()


def test_models_without_routers_or_with_other_losses():
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name}
    llama = ConfigSource(hf.LlamaForCausalLM, hf.LlamaConfig(**sizes))
    assert mixture_of(llama) is None
    doge = hf.DogeConfig(**SIZES, is_moe=True, num_experts=4, router_aux_loss_coef=0.5)
    with pytest.raises(ProbeError, match="DogeForCausalLM adds aux_loss .*router_loss='ignore'"):
        mixture_of(ConfigSource(hf.DogeForCausalLM, doge))


def test_recording_leaves_other_forwards_and_configs_unchanged():
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES))
    assert len(routers(model)) == len(experts(model)) == 2
    routing = Routing(model, Mixture(RouterLoss(4, 2, 0.1)))
    ids = torch.arange(12).view(2, 6)
    real = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    with routing.noted(real_tokens(real, (2, 6))):
        assert model(ids, attention_mask=real).aux_loss is None
    model(ids)
    routed, loss = routing.outcome(None, True)
    expected = model(ids, attention_mask=real).aux_loss
    assert loss.item() == pytest.approx(0.1 * expected.item(), rel=1e-5)
    assert [int(load.sum()) for load in routed.loads.values()] == [16, 16]
    assert int(routed.counts.sum()) == 32
    routing.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in experts(model).values())


def test_a_mask_that_does_not_mark_padding():
    with pytest.raises(ValueError, match=r"shape \(2, 1, 6, 6\); accepted .* \(B, T\)"):
        real_tokens(torch.ones(2, 1, 6, 6), (2, 6))
    assert real_tokens(None, (2, 3)).all()


def test_plain_modules_have_no_routers():
    assert routers(nn.Linear(2, 2)) == [] and experts(nn.Linear(2, 2)) == {}


class WithoutRecorders(hf.LlamaForCausalLM):
    """Model that adds a loss without declaring its routers."""

    def forward(self, input_ids=None, labels=None, **more):
        output = super().forward(input_ids, labels=labels, **more)
        if self.config.output_router_logits and labels is not None:
            output.loss = output.loss + 0.1
        return output


def test_losses_of_unknown_routers_are_not_dropped():
    config = hf.LlamaConfig(**{n: v for n, v in SIZES.items() if "expert" not in n})
    with pytest.raises(ProbeError, match="WithoutRecorders adds aux_loss 0.1"):
        mixture_of(ConfigSource(WithoutRecorders, config))
    config.output_router_logits = False
    assert mixture_of(ConfigSource(WithoutRecorders, config)) is None
