"""Mllama and Idefics on processes that shard text and visual tokens equal one process.

Compares logits, loss and every gradient, for any distribution of tokens.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from raymm.actors.sharding.visual_tokens import LeastBytes
from raymm.errors import ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.cross_attention import share_cross_attention
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.convert import cross_masks
from raymm.scheduler.context_parallel.traffic import AttentionShape, method_bytes
from tests.support.cross_attention_models import (
    BEFORE_THE_TEXT_MODEL,
    CROSS_LAYERS,
    HEADS,
    HIDDEN,
    LENGTHS,
    MODELS,
    PATCHES,
    SELF_LAYERS,
    STATES,
    batch_of,
    layouts,
    mllama,
    one_process,
    positions,
    shared,
    this_process,
)
from tests.support.rank_processes import rank_processes
from tests.support.shared_batch import SharedBatch, padded_causal_masks

TOLERANCE = 1e-5
TIMES_ONE_PROCESS, TIMES_FOR_ONE_TENSOR = 1.2, 5  # under autocast


def off(mine: torch.Tensor, due: torch.Tensor) -> float:
    """Return the error relative to the norm of the expected tensor."""
    error, norm = float((mine.double() - due.double()).norm()), float(due.double().norm())
    return error / norm if norm else (0.0 if error == 0 else float("inf"))


def alone(family, seeds, states=None) -> dict[str, torch.Tensor]:
    """Return logits, loss, and gradients of visual tokens and parameters of one process.

    Without ``states`` in float64, to avoid rounding errors, with the model's visual tokens; else
    with these states.
    """
    model = MODELS[family]()
    if states is None:
        model.double()
    results: dict[str, torch.Tensor] = {}
    for seed in seeds:
        batch = batch_of(family, seed)
        given = None if states is None else states[seed].detach().requires_grad_()
        out, made = one_process(model, family, batch, given)
        results |= {f"logits {seed}": out.logits.detach(), f"loss {seed}": out.loss.detach()}
        out.loss.backward()
        shape = len(batch.ids), -1, made.shape[-1]
        results[f"visual {seed}"] = made.grad.reshape(shape)
        results[f"states {seed}"] = made.detach().reshape(shape)
    for name, parameter in model.named_parameters():
        if not name.startswith(BEFORE_THE_TEXT_MODEL):
            results[name] = parameter.grad
            assert float(parameter.grad.norm()) > 1e-5, f"{name} has next to no gradient"
    return results


def together(
    exchange, family, seeds, states, layout, checkpointing=False, **options
) -> dict[str, torch.Tensor]:
    """Return the same for sharded processes; logits are local. All batches are in flight at once.
    """
    model = MODELS[family]()
    share_cross_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    under_way, results = {}, {}
    for seed in seeds:
        given = states[seed].detach().requires_grad_()
        text, visual = layouts(layout, exchange.size, given.shape[1])
        batch = batch_of(family, seed)
        share = shared(exchange, family, batch, text, visual, **options)
        under_way[seed] = this_process(model, family, batch, share, given), given
    for seed, (out, given) in under_way.items():
        out.loss.backward()
        results |= {f"loss {seed}": out.loss.detach().clone(), f"visual {seed}": given.grad}
    results |= {
        name: parameter.grad for name, parameter in model.named_parameters()
        if not name.startswith(BEFORE_THE_TEXT_MODEL)
    }  # fmt: skip
    for tensor in results.values():
        dist.all_reduce(tensor, group=exchange.group)
    return results | {f"logits {seed}": out.logits.detach() for seed, (out, _) in under_way.items()}


def differences_on_a_rank(
    group, family, layout, seeds=(0,), autocast=False, method="rotate", **options
) -> dict[str, tuple[float, float]]:
    """Return the errors of the processes, and of one process (0 except under autocast)."""
    exchange = Exchange(group)
    if method == "auto":
        method = options["self_method"] = LeastBytes()
    exact = alone(family, seeds)
    states = {seed: exact.pop(f"states {seed}").float() for seed in seeds}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = together(
            exchange, family, seeds, states, layout, cross_method=method, **options
        )
        rounded = alone(family, seeds, states) if autocast else exact
    assert set(found) == set(exact)
    for seed in seeds:
        text, _ = layouts(layout, exchange.size, states[seed].shape[1])
        rows = text.positions(exchange.rank)
        real, name = batch_of(family, seed).attention_mask[:, rows].bool(), f"logits {seed}"
        found[name] = found[name][real]
        exact[name] = exact[name][:, rows][real]
        if autocast:
            rounded[name] = rounded[name][:, rows][real]
    return {name: (off(found[name], due), off(rounded[name], due)) for name, due in exact.items()}


@pytest.fixture(scope="module")
def processes():
    with rank_processes() as running:
        yield running


def too_far(answers: list[dict[str, tuple[float, float]]]) -> list:
    assert all(len(found) > 40 for found in answers)
    return [one for found in answers for one in found.items() if not one[1][0] <= TOLERANCE]


@pytest.mark.cells(4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "even"), (2, "one_has_no_visual_tokens"), (3, "ragged"), (4, "ragged")],
)
def test_logits_loss_and_gradients(processes, family, ranks, layout, recompute):
    answers = processes.run(
        differences_on_a_rank, ranks, family=family, layout=layout, recompute=recompute
    )
    assert too_far(answers) == []


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("method", ["gather", "needed", "ring", "ulysses", "auto"])
def test_every_method(processes, family, method):
    answers = processes.run(
        differences_on_a_rank, 2, family=family, layout="even", method=method,
        recompute=method not in ("ulysses", "auto"),
    )  # fmt: skip
    assert too_far(answers) == []


@pytest.mark.cells(1)
@pytest.mark.parametrize("family", MODELS)
def test_batches_with_different_masks_add_up(processes, family):
    """Accumulate three microbatches in flight at once, with the model's own checkpointing, too."""
    answers = processes.run(
        differences_on_a_rank, 3, family=family, layout="ragged", recompute=True, seeds=(0, 1, 2),
        checkpointing=True,
    )  # fmt: skip
    assert too_far(answers) == []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_bf16_autocast(processes, family, recompute):
    """Compare the mean distance from float64 with that of one process under autocast.

    Each tensor stays within a few times of that (gates are single numbers).
    """
    answers = processes.run(
        differences_on_a_rank, 2, family=family, layout="even", recompute=recompute, autocast=True
    )
    for found in answers:
        mine, one = (torch.tensor(errors) for errors in zip(*found.values(), strict=True))
        assert 1e-3 < one.mean() and mine.mean() <= TIMES_ONE_PROCESS * one.mean()
        assert (mine <= TIMES_FOR_ONE_TENSOR * one.clamp(min=one.median())).all()


def bytes_on_a_rank(group, family: str, recompute: bool) -> list[tuple[int, int]]:
    """Return bytes sent forward and in both passes, and those of the formulas."""
    exchange, model = Exchange(group), MODELS[family]()
    share_cross_attention(model)
    batch = batch_of(family, 0)
    states = torch.randn(len(LENGTHS), *STATES[family], requires_grad=True)
    text, visual = layouts("ragged", exchange.size, states.shape[1])
    share = shared(exchange, family, batch, text, visual, recompute=recompute)
    out = this_process(model, family, batch, share, states)
    forward = exchange.sent_bytes
    out.loss.backward()
    sizes = {"activation_bytes": 4, "sequences": len(LENGTHS), "head_dim": HIDDEN // HEADS,
             "query_heads": HEADS, "key_heads": 2 if family == "mllama" else HEADS}  # fmt: skip
    cross = method_bytes(AttentionShape(text.sizes, visual.sizes, **sizes), "rotate")
    own = method_bytes(AttentionShape(text.sizes, text.sizes, **sizes), "gather")
    layers = ((cross, CROSS_LAYERS), (own, SELF_LAYERS[family]))
    due = [sum(n * getattr(kind, pass_)[exchange.rank] for kind, n in layers)
           for pass_ in ("forward", "backward")]  # fmt: skip
    return [(forward, due[0]), (exchange.sent_bytes, sum(due))]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_bytes_are_those_of_the_formulas(processes, family, recompute):
    """Check that recomputation sends no additional bytes."""
    for found in processes.run(bytes_on_a_rank, 3, family=family, recompute=recompute):
        assert all(counted == due > 0 for counted, due in found), found


def saved_on_a_rank(group, family: str) -> tuple[int, int]:
    """Return the bytes that autograd keeps, with and without recomputation, each storage once."""
    exchange, model = Exchange(group), MODELS[family]()
    share_cross_attention(model)
    batch = batch_of(family, 0)
    states = torch.randn(len(LENGTHS), *STATES[family], requires_grad=True)
    text, visual = layouts("even", exchange.size, states.shape[1])
    kept = []
    for recompute in (False, True):
        share = shared(exchange, family, batch, text, visual, recompute=recompute)
        storages: dict[int, int] = {}

        def pack(tensor, storages=storages):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = this_process(model, family, batch, share, states)
        kept.append(sum(storages.values()))
        out.loss.backward()
    return kept[0], kept[1]


@pytest.mark.parametrize("family", MODELS)
def test_recomputation_keeps_visual_tokens_once(processes, family):
    """Check that the keys and values of cross-attention layers are not kept."""
    tokens = STATES[family][0] // 2
    heads = 2 if family == "mllama" else HEADS
    keys_and_values = CROSS_LAYERS * 2 * len(LENGTHS) * tokens * heads * (HIDDEN // HEADS) * 4
    for kept, recomputed in processes.run(saved_on_a_rank, 2, family=family):
        assert kept - recomputed >= keys_and_values


def frozen_on_a_rank(group, family: str) -> list[float]:
    """Train only the visual tokens; a process without any must still take part."""
    exchange, model = Exchange(group), MODELS[family]().requires_grad_(False)
    share_cross_attention(model)
    batch = batch_of(family, 0)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        states = torch.randn(len(LENGTHS), *STATES[family], requires_grad=True)
        text, visual = layouts("one_has_no_visual_tokens", exchange.size, states.shape[1])
        share = shared(exchange, family, batch, text, visual, recompute=recompute)
        this_process(model, family, batch, share, states).loss.backward()
        dist.all_reduce(states.grad, group=group)
        grads.append(states.grad)
    assert float(grads[0].norm()) > 1e-4
    return [off(*grads)]


@pytest.mark.parametrize("family", MODELS)
def test_a_frozen_model_sends_gradients_to_visual_tokens(processes, family):
    assert all(found[0] <= TOLERANCE for found in processes.run(frozen_on_a_rank, 2, family=family))


def backward_under_autocast_on_a_rank(group) -> list[str]:
    """Return weights without a gradient, if the backward also is within autocast."""
    exchange, model = Exchange(group), mllama()
    share_cross_attention(model)
    batch = batch_of("mllama", 0)
    states = torch.randn(len(LENGTHS), *STATES["mllama"], requires_grad=True)
    text, visual = layouts("even", exchange.size, states.shape[1])
    share = shared(exchange, "mllama", batch, text, visual, recompute=True)
    with torch.autocast("cpu", torch.bfloat16):
        this_process(model, "mllama", batch, share, states).loss.backward()
    return [name for name, p in model.named_parameters() if p.grad is None
            and not name.startswith(BEFORE_THE_TEXT_MODEL)]  # fmt: skip


def test_a_backward_pass_within_autocast_reaches_every_weight(processes):
    assert processes.run(backward_under_autocast_on_a_rank, 2) == [[], []]


class OtherCrossAttention(nn.Module):
    """Cross attention of an unknown class."""


class GatedAttention(type(mllama().model.language_model.layers[1].cross_attn)):
    """Attention whose output depends on the hidden states in addition to its queries."""

    def forward(self, hidden_states, cross_attention_states=None, **kwargs):
        """Multiply by a gate that is computed before attention."""
        gate = hidden_states.mean(-1, keepdim=True).sigmoid()
        out, _ = super().forward(hidden_states, cross_attention_states, **kwargs)
        return gate * out, None


class DeafAttention(GatedAttention):
    """Attention that does not use the interface."""

    def forward(self, hidden_states, cross_attention_states=None, **kwargs):
        """Return without attention."""
        return self.o_proj(self.q_proj(hidden_states)), None


def test_unknown_layers_are_refused_by_name():
    model = mllama()
    layer = model.model.language_model.layers[3]
    for kind, reason in ((GatedAttention, "for more than"), (DeafAttention, "did not attend")):
        layer.cross_attn.__class__ = kind
        expected = rf"layers.3.cross_attn \({kind.__name__}.*{reason}"
        with pytest.raises(ModelError, match=expected):
            share_cross_attention(model)
    layer.cross_attn = OtherCrossAttention()
    with pytest.raises(ModelError, match=r"layers.3.cross_attn \(OtherCross.*\) is"):
        share_cross_attention(model)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="LlamaForCausalLM has no cross attention"):
        share_cross_attention(LlamaForCausalLM(config))


def test_without_the_arguments_a_model_is_unchanged():
    """Check also a copy, and the class name."""
    batch, plain = batch_of("mllama", 0), mllama().eval()
    due = one_process(plain, "mllama", batch)[0].logits
    names = share_cross_attention(plain)
    assert names == tuple(f"model.language_model.layers.{i}.cross_attn" for i in (1, 3))
    copied = copy.deepcopy(plain)
    assert list(copied.state_dict()) == list(mllama().state_dict())
    kind = type(copied.get_submodule(names[0]))
    assert kind.__name__ == "MllamaTextCrossAttention"
    found = one_process(copied, "mllama", batch)[0].logits
    real = batch.attention_mask.bool()
    assert off(found[real].detach(), due[real].detach()) <= TOLERANCE


def refusals_on_a_rank(group) -> list[str]:
    exchange, batch = Exchange(group), batch_of("mllama", 0)
    length, tokens = max(LENGTHS), STATES["mllama"][0]
    text, visual = layouts("even", exchange.size, tokens)
    masks = padded_causal_masks(batch.attention_mask)
    cross = cross_masks(batch.shown.flatten(2), PATCHES, blind="everything")
    said = []
    share = SharedBatch(exchange, text, visual, masks, cross)
    apart = SharedBatch(exchange, ContextLayout.even(length, 3), visual, masks, cross)
    model = mllama()
    share_cross_attention(model)
    states = torch.randn(len(LENGTHS), *STATES["mllama"])
    for run in (
        apart.arguments,
        lambda: model(
            input_ids=share.of_text(batch.ids), cross_attention_states=states[:, :7],
            position_ids=share.of_text(positions(batch)), use_cache=False, **share.arguments(),
        ),
        lambda: model(
            input_ids=share.of_text(batch.ids), cross_attention_states=share.of_visual(states),
            position_ids=share.of_text(positions(batch)), use_cache=True, **share.arguments(),
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            run()
        said.append(str(error.value))
    return said


def test_what_does_not_fit_is_refused(processes):
    expected = [
        "split over 3 ranks", "got 7 visual tokens", "use_cache=False",
    ]
    for said in processes.run(refusals_on_a_rank, 2):
        assert all(part in one for part, one in zip(expected, said, strict=True)), said


def test_the_least_bytes_method_moves_fewer_queries():
    shape = (torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8))
    group = SimpleNamespace(queries=ContextLayout.even(16, 4), keys=ContextLayout.even(4096, 4))
    masks = (mask_patterns.full(16, 4096),)
    assert LeastBytes()(group, masks, *shape) == "rotate"
    few = SimpleNamespace(queries=group.keys, keys=group.queries)
    moved = (mask_patterns.full(4096, 16),)
    assert LeastBytes(methods=("rotate", "ring"))(few, moved, *shape) == "ring"
    even = SimpleNamespace(queries=ContextLayout.even(64, 4), keys=ContextLayout.even(64, 4))
    shape = (shape[0], shape[0])
    everything = (mask_patterns.full(64, 64),)
    assert LeastBytes()(even, everything, *shape) == "ulysses"
    assert LeastBytes()(even, everything, *shape, recompute=True) != "ulysses"
