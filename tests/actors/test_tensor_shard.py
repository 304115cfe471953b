"""Modules in shards, in gloo processes, compute what the whole module does: losses, outputs and
every gradient; whole, cut into stages, over several microbatches."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "kernels"), str(HERE.parent / "parity")]

import parity_models as pm  # noqa: E402
from rank_processes import RankProcesses, rank_processes  # noqa: E402

from raymm.actors.split_backward import backward_input  # noqa: E402
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage  # noqa: E402
from raymm.actors.stages.language import LanguageSpec, LanguageStage  # noqa: E402
from raymm.actors.stages.merge import Prepend  # noqa: E402
from raymm.actors.stages.message import Message, MicrobatchContext  # noqa: E402
from raymm.actors.stages.probe import ProbeError, probe_encoder, probe_language_model  # noqa: E402
from raymm.actors.stages.probe_tensor import (  # noqa: E402
    compare_shards,
    example_run,
    probe_tensor,
    run_whole,
)
from raymm.actors.stages.projector import Projector, ProjectorConfig  # noqa: E402
from raymm.actors.stages.source import LiveSource  # noqa: E402
from raymm.actors.stages.tensor_plan import TensorPlan, plan_module, tensor_plan  # noqa: E402
from raymm.actors.stages.tensor_shard import cut_tensor, shard_module  # noqa: E402
from raymm.actors.stages.token_layout import MASKS  # noqa: E402
from raymm.kernels.tensor_group import TensorGroup  # noqa: E402
from raymm.model import complete_microbatch, text_inputs  # noqa: E402
from raymm.scheduler.plan import PlanError  # noqa: E402

TOLERANCE = 1e-5
BATCHES = (([7, 5], 1), ([3, 9], 2))


def with_kv_heads(count: int) -> hf.LlamaConfig:
    config = pm.llama()
    config.num_key_value_heads = count
    return config


def qwen3_one_kv_head() -> hf.Qwen3Config:
    config = pm.qwen3()
    config.num_key_value_heads = 1
    return config


def gemma2() -> hf.Gemma2Config:
    return hf.Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=pm.V, sliding_window=4,
        final_logit_softcapping=2.0, attn_implementation="eager",
    )


def phi3() -> hf.Phi3Config:
    return hf.Phi3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, pad_token_id=0, resid_pdrop=0.0,
    )


def glm4() -> hf.Glm4Config:
    """Gate and up in one."""
    return hf.Glm4Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=pm.V, pad_token_id=0,
    )


def neox() -> hf.GPTNeoXConfig:
    """Query, key and value of a head side by side; attention and feed-forward in parallel."""
    return hf.GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=pm.V, attention_dropout=0.0, hidden_dropout=0.0,
    )


def mixtral() -> hf.MixtralConfig:
    return hf.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, num_local_experts=4,
    )


def aria() -> hf.AriaTextConfig:
    """Experts whose matrices are kept the other way round, and shared ones besides."""
    return hf.AriaTextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=pm.V, moe_num_experts=4, moe_topk=2,
        moe_num_shared_experts=1, pad_token_id=0,
    )


def deepseek_v3() -> hf.DeepseekV3Config:
    """Latent attention, whose plan shards experts and feed-forwards only."""
    return hf.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=12,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, vocab_size=pm.V,
    )


def deepseek_v2() -> hf.DeepseekV2Config:
    """Latent attention in shards; its rotary part goes to all heads directly."""
    return hf.DeepseekV2Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=12,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, vocab_size=pm.V, head_dim=8,
    )


def vit() -> hf.ViTConfig:
    return hf.ViTConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        image_size=pm.IMAGE_SIZE, patch_size=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def projector() -> ProjectorConfig:
    return ProjectorConfig("mlp", 12, 8)


LANGUAGE = {
    "llama": pm.llama,
    "llama_untied": lambda: pm.llama(tied=False),
    "llama_one_kv_head": lambda: with_kv_heads(1),
    "qwen3": pm.qwen3,
    "qwen3_one_kv_head": qwen3_one_kv_head,
    "gemma3": pm.gemma3,
    "gemma2": gemma2,
    "gpt2": pm.gpt2,
    "opt": pm.opt,
    "phi3": phi3,
    "phi3_gathered": phi3,
    "glm4": glm4,
    "neox": neox,
    "mixtral": mixtral,
    "aria": aria,
    "deepseek_v3": deepseek_v3,
    "deepseek_v2": deepseek_v2,
}
FUSED = ("gpt2", "phi3", "glm4", "neox")
ENCODERS = {"siglip": pm.siglip, "clip": pm.clip, "whisper": pm.whisper, "vit": vit}
CLASSES = {
    hf.Gemma2Config: hf.Gemma2ForCausalLM, hf.Glm4Config: hf.Glm4ForCausalLM,
    hf.GPTNeoXConfig: hf.GPTNeoXForCausalLM, hf.Phi3Config: hf.Phi3ForCausalLM,
    hf.MixtralConfig: hf.MixtralForCausalLM, hf.AriaTextConfig: hf.AriaTextForCausalLM,
    hf.DeepseekV3Config: hf.DeepseekV3ForCausalLM, hf.DeepseekV2Config: hf.DeepseekV2ForCausalLM,
    hf.ViTConfig: hf.ViTModel, ProjectorConfig: Projector,
}


def module_of(config: Any) -> nn.Module:
    """Random weights, none of which is a special case."""
    if type(config) in pm.MODEL_CLASSES:
        return pm.build(config, 3)
    torch.manual_seed(3)
    model = CLASSES[type(config)](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class CountingGroup(TensorGroup):
    """Counts sums over the group."""

    sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return super().all_reduce(tensor)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(4) as running:
        yield running


def plan_for(source: LiveSource, tp: int, case: str) -> TensorPlan:
    """The probe's choice where it differs from what rules alone say: fused projections."""
    make = probe_tensor if case in FUSED else tensor_plan
    plan = make(source, tp, case)
    # A plan is sent to ranks.
    assert copy.deepcopy(plan) == plan
    return plan


def run_language(
    case: str, bounds: list[int], group: Any = None, autocast: bool = False, mask: str = "",
    two_passes: bool = False,
) -> dict[str, Any]:
    """Both microbatches through stages of blocks between ``bounds``, one after another; in
    shards if there is a group."""
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    cut = probe_language_model(source) if len(bounds) > 2 else None
    spec = LanguageSpec("llm", source, bounds[-1], Prepend(), cut, MASKS.get(mask))
    stages = [LanguageStage.build(spec, lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    counting = None
    if group is not None:
        counting = CountingGroup(group)
        plan = plan_for(source, counting.size, case)
        for stage in stages:
            stage.shard_tensors({"module": plan}, counting)
            check_pieces(stage.module, source.structure, plan, counting.rank)
    losses, sums = [], []
    for lengths, seed in BATCHES:
        inputs = text_inputs(complete_microbatch(pm.batch(lengths, seed), ()))
        context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        before = counting.sums if counting else 0
        with context:
            loss, hidden = forward(stages, inputs)
        sums.append((counting.sums - before) if counting else 0)
        (backward_in_two_passes if two_passes else backward)(loss, hidden)
        sums.append((counting.sums - before - sums[-1]) if counting else 0)
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "gradients": gradients(stages), "sums": sums}


def forward(stages: list[Any], inputs: Any) -> tuple[torch.Tensor, list[Any]]:
    """The last stage's output; between stages what was sent, and the leaf that was received."""
    between, received = [], {}
    for stage in stages:
        message = stage.run(inputs, received, MicrobatchContext(20))
        (sent,) = message.tensors
        leaf = sent.detach().requires_grad_()
        between.append((sent, leaf))
        received, inputs = {"before": Message((leaf,), message.side)}, None
    return between[-1][0], between[:-1]


def backward(output: torch.Tensor, between: list[Any]) -> None:
    output.backward()
    for sent, leaf in reversed(between):
        sent.backward(leaf.grad)


def backward_in_two_passes(output: torch.Tensor, between: list[Any]) -> None:
    """As zero-bubble schedules do."""
    gradient = None
    for sent, leaf in reversed([(None, None), *between]):
        inputs = [leaf] if leaf is not None else []
        found, weights = backward_input([output], [gradient], inputs)
        weights.run()
        if leaf is not None:
            output, gradient = sent, found[0]


def gradients(stages: list[Any]) -> dict[str, torch.Tensor]:
    """By name; of tied parameters, which two stages have, the sum."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


def check_pieces(part: nn.Module, whole: nn.Module, plan: TensorPlan, rank: int) -> None:
    """Every parameter is as large as its piece, and nothing keeps more."""
    for name, parameter in part.named_parameters(remove_duplicate=False):
        shape, piece = list(whole.get_parameter(name).shape), plan.piece(name, rank)
        if piece is not None:
            shape[piece.dim] = piece.length
        assert list(parameter.shape) == shape, name
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4, name
        assert parameter.requires_grad == whole.get_parameter(name).requires_grad


def check_gradients(
    results: list[dict[str, Any]], expected: dict[str, torch.Tensor], plan: TensorPlan,
    tolerance: float = TOLERANCE,
) -> None:
    largest = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        counted = torch.zeros_like(gradient)
        for rank in range(plan.tp):
            holders = plan.holders(name, rank)
            own = sum(results[other]["gradients"][name] for other in holders)
            piece = plan.piece(name, rank)
            # Rounding alone: the bias of keys.
            norm = max(float(gradient.norm()), 1e-2 * largest)
            assert (own - cut_tensor(gradient, piece)).norm() <= tolerance * norm, name
            if not plan.is_replica(name, rank):
                counted += at_its_place(own, gradient, piece)
        # What is no replica makes up the whole, once.
        assert (counted - gradient).norm() <= tolerance * norm, name


def at_its_place(own: torch.Tensor, whole: torch.Tensor, piece: Any) -> torch.Tensor:
    if piece is None:
        return own
    result, start = torch.zeros_like(whole), 0
    for lo, hi in piece.ranges:
        part = own.narrow(piece.dim, start, hi - lo)
        result.narrow(piece.dim, lo, hi - lo).copy_(part)
        start += hi - lo
    return result


def check_language(processes: RankProcesses, case: str, tp: int, bounds: list[int]) -> None:
    expected = run_language(case, [0, 3])
    results = processes.run(run_language, tp, case=case, bounds=bounds)
    for result in results:
        assert torch.equal(result["losses"], results[0]["losses"])
        torch.testing.assert_close(result["losses"], expected["losses"], rtol=TOLERANCE, atol=0)
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    check_gradients(results, expected["gradients"], plan_for(source, tp, case))


@pytest.mark.parametrize("case", LANGUAGE)
def test_language_models_in_two_shards(processes: RankProcesses, case: str) -> None:
    check_language(processes, case, 2, [0, 3])


@pytest.mark.parametrize("case", ["llama", "qwen3_one_kv_head"])
def test_more_shards_than_kv_heads(processes: RankProcesses, case: str) -> None:
    check_language(processes, case, 4, [0, 3])


@pytest.mark.parametrize("case", ["llama", "opt", "gpt2", "gemma3"])
def test_stages_in_shards(processes: RankProcesses, case: str) -> None:
    """First, middle and last; tied embeddings on two of them."""
    check_language(processes, case, 2, [0, 1, 2, 3])


def test_llama_sums_twice_per_layer_and_direction(processes: RankProcesses) -> None:
    """Attention and feed-forward; forward also the embedding and the loss, backward the head."""
    for result in processes.run(run_language, 2, case="llama", bounds=[0, 3]):
        assert result["sums"] == [2 * 3 + 2, 2 * 3 + 1] * 2


def test_weights_gradients_in_a_pass_of_their_own(processes: RankProcesses) -> None:
    """With a mask, which is the model's own: no sum is done twice."""
    expected = run_language("llama", [0, 3])
    case = {"case": "llama", "bounds": [0, 1, 3], "mask": "causal", "two_passes": True}
    results = processes.run(run_language, 2, **case)
    plan = plan_for(LiveSource.of(module_of(pm.llama())), 2, "llama")
    check_gradients(results, expected["gradients"], plan)
    assert results[0]["sums"] == [2 * 3 + 2, 2 * 3 + 1] * 2


def run_with_dropout(group: Any) -> list[torch.Tensor]:
    config = pm.gpt2()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.2
    source, group = LiveSource.of(module_of(config)), TensorGroup(group)
    module, plan = source.build().train(), tensor_plan(source, group.size, "llm")
    shard_module(module, plan, group)
    torch.manual_seed(5)
    ids = torch.arange(12).view(2, 6)
    module.transformer(input_ids=ids).last_hidden_state.square().sum().backward()
    return [p.grad for name, p in module.named_parameters() if plan.piece(name, 0) is None]


def test_dropout_is_the_same_on_all_processes(processes: RankProcesses) -> None:
    """Where everybody computes the same, everybody drops the same."""
    first, second = processes.run(run_with_dropout, 2)
    assert len(first) > 10
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast(processes: RankProcesses) -> None:
    expected = run_language("llama", [0, 3], autocast=True)
    results = processes.run(run_language, 2, case="llama", bounds=[0, 3], autocast=True)
    torch.testing.assert_close(results[0]["losses"], expected["losses"], rtol=1e-2, atol=0)
    plan = plan_for(LiveSource.of(module_of(pm.llama())), 2, "llama")
    check_gradients(results, expected["gradients"], plan, tolerance=3e-2)


def run_encoder(case: str, bounds: list[int], group: Any = None) -> dict[str, Any]:
    config = ENCODERS[case]()
    inputs = pm.sounds(2) if case == "whisper" else pm.images(2)
    source = LiveSource.of(module_of(config).eval())
    cut = probe_encoder(source)
    spec = EncoderSpec("encoder", source, bounds[-1], cut=cut)
    stages = [EncoderStage.build(spec, lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    if group is not None:
        group = TensorGroup(group)
        plan = plan_for(source, group.size, case)
        for stage in stages:
            shard_module(stage.module, plan, group)
            check_pieces(stage.module, source.structure, plan, group.rank)
    outputs = []
    for scale in (1.0, -0.5):
        given = {name: value * scale for name, value in inputs.items()}
        output, between = forward(stages, given)
        backward((output * torch.cos(torch.arange(output.numel()).view_as(output))).sum(), between)
        outputs.append(output.detach())
    return {"outputs": outputs, "gradients": gradients(stages)}


@pytest.mark.parametrize("bounds", [[0, 2], [0, 1, 2]])
@pytest.mark.parametrize("case", ENCODERS)
def test_encoders(processes: RankProcesses, case: str, bounds: list[int]) -> None:
    expected = run_encoder(case, [0, 2])
    results = processes.run(run_encoder, 2, case=case, bounds=bounds)
    for result in results:
        for found, output in zip(result["outputs"], expected["outputs"], strict=True):
            assert (found - output).norm() <= TOLERANCE * output.norm()
    source = LiveSource.of(module_of(ENCODERS[case]()))
    check_gradients(results, expected["gradients"], plan_for(source, 2, case))


def run_projector(group: Any = None) -> dict[str, Any]:
    source = LiveSource.of(module_of(projector()))
    module = source.build()
    if group is not None:
        shard_module(module, plan_for(source, 4, "projector"), TensorGroup(group))
    features = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(1))
    module(features).square().sum().backward()
    return {"gradients": {name: p.grad for name, p in module.named_parameters()}}


def test_projector(processes: RankProcesses) -> None:
    plan = plan_for(LiveSource.of(module_of(projector())), 4, "projector")
    assert plan.piece("layers.0.weight", 1).ranges == ((2, 4),)
    check_gradients(processes.run(run_projector, 4), run_projector()["gradients"], plan)


def run_frozen(group: Any, no_grad: bool) -> dict[str, Any]:
    """A frozen model with something trainable before it, or nothing at all."""
    source = replace(LiveSource.of(module_of(pm.llama())), frozen=True)
    whole, shard, group = source.build(), source.build(), CountingGroup(group)
    shard_module(shard, tensor_plan(source, group.size, "llm"), group)
    assert not any(p.requires_grad for p in shard.parameters())
    results = []
    for module in (whole, shard):
        embeds = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        embeds.requires_grad_(not no_grad)
        with torch.set_grad_enabled(not no_grad):
            hidden = module.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        if not no_grad:
            hidden.square().sum().backward()
        results.append((hidden.detach(), embeds.grad))
    return {"results": results, "sums": group.sums}


@pytest.mark.parametrize("no_grad", [False, True])
def test_frozen_models(processes: RankProcesses, no_grad: bool) -> None:
    for found in processes.run(run_frozen, 2, no_grad=no_grad):
        (hidden, gradient), (shard_hidden, shard_gradient) = found["results"]
        assert (hidden - shard_hidden).norm() <= TOLERANCE * hidden.norm()
        assert found["sums"] == (6 if no_grad else 12)
        if not no_grad:
            assert (gradient - shard_gradient).norm() <= TOLERANCE * gradient.norm()


def test_who_holds_what() -> None:
    plan = tensor_plan(LiveSource.of(module_of(pm.llama())), 4, "llm")
    key, query = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "kq")
    assert [plan.piece(key, r).ranges for r in range(4)] == [((0, 8),)] * 2 + [((8, 16),)] * 2
    assert [plan.holders(key, r) for r in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [plan.is_replica(key, r) for r in range(4)] == [False, True, False, True]
    assert plan.piece(query, 3).ranges == ((24, 32),) and plan.holders(query, 3) == (3,)
    assert [plan.vocabulary(r) for r in range(4)] == [(0, 25), (25, 49), (49, 73), (73, 97)]
    assert plan.piece("lm_head.weight", 1) == plan.piece("model.embed_tokens.weight", 1)
    norm = "model.norm.weight"
    assert plan.piece(norm, 2) is None and plan.holders(norm, 2) == (2,)
    assert [plan.is_replica(norm, r) for r in range(4)] == [False, True, True, True]
    plan = tensor_plan(LiveSource.of(module_of(pm.qwen3())), 2, "llm")
    assert plan.holders("model.layers.1.self_attn.q_norm.weight", 1) == (0, 1)
    plan = tensor_plan(LiveSource.of(module_of(mixtral())), 2, "llm")
    fused = plan.piece("model.layers.0.mlp.experts.gate_up_proj", 1)
    assert fused.dim == 1 and fused.ranges == ((24, 48), (72, 96))
    assert tensor_plan(LiveSource.of(pm.make_cnn()), 2, "vision").styles == {}


@pytest.mark.parametrize(
    ("config", "tp", "why"),
    [
        (pm.llama(), 3, "tp of 'llm' is 3, but .* has 4 query heads .* accepted: divisors of 4"),
        (hf.LlamaConfig(hidden_size=96, intermediate_size=48, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=12, num_key_value_heads=3), 4, None),
        (hf.LlamaConfig(hidden_size=96, intermediate_size=48, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=12, num_key_value_heads=3), 2,
         "3 KV heads .* neither divides the other; accepted: 1, 3, 6, 12"),
        (hf.LlamaConfig(hidden_size=32, intermediate_size=49, num_hidden_layers=2, vocab_size=97,
                        num_attention_heads=4), 2, "49 inner features at .*mlp.* divisors of 49"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: Any, tp: int, why: str | None) -> None:
    source = LiveSource.of(hf.LlamaForCausalLM(config))
    with pytest.raises(PlanError, match=why or "3 KV heads"):
        tensor_plan(source, tp, "llm")


def test_a_style_that_is_not_supported_is_refused_by_name() -> None:
    model = module_of(pm.llama())
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp": "sequence_parallel"}
    with pytest.raises(PlanError, match=r"'model\.layers\.0\.mlp' has the style 'sequence_par"):
        plan_module(model, 2, "llm")


def test_groups_of_another_size_are_refused() -> None:
    class Three:
        rank, size = 0, 3

    model = module_of(pm.llama())
    with pytest.raises(ValueError, match="the group has 3 processes, the plan 2"):
        shard_module(model, plan_module(model, 2, "llm"), Three())


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_the_probe_accepts_what_is_right(case: str) -> None:
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    assert probe_tensor(source, 2, "llm") == tensor_plan(source, 2, "llm")


@pytest.mark.parametrize("case", FUSED)
def test_the_probe_finds_how_projections_are_fused(case: str) -> None:
    source = LiveSource.of(module_of(LANGUAGE[case]()))
    assert "gathered_column" in tensor_plan(source, 2, "llm").styles.values()
    assert "gathered_column" not in probe_tensor(source, 2, "llm").styles.values()


def wrong_plans() -> list[Any]:
    """What a rule may get wrong, and what the probe says."""

    def without(plan: TensorPlan, end: str) -> TensorPlan:
        return replace(plan, styles={n: s for n, s in plan.styles.items() if not n.endswith(end)})

    def swapped(plan: TensorPlan) -> TensorPlan:
        name = "model.layers.1.self_attn.k_proj.weight"
        return replace(plan, pieces={**plan.pieces, name: plan.pieces[name][::-1]})

    return [
        (lambda plan: without(plan, "1.mlp.down_proj"), "output of shard 0 differs"),
        (lambda plan: without(plan, "1.mlp.up_proj"), "the gradient of "),
        (lambda plan: replace(plan, head=None), "output of shard 0"),
        (swapped, "output of shard 0 differs"),
    ]


@pytest.mark.parametrize(("spoil", "why"), wrong_plans())
def test_the_probe_sees_what_is_wrong(spoil: Any, why: str) -> None:
    model = module_of(pm.qwen3()).eval()
    plan = plan_module(model, 2, "llm")
    run, inputs = example_run(model, None)
    expected = run_whole(model, run, inputs)
    assert compare_shards(model, plan, run, inputs, expected) == (None, frozenset())
    failure, _ = compare_shards(model, spoil(plan), run, inputs, expected)
    assert failure is not None
    assert re.search(why, failure)


def test_the_probe_finds_parameters_of_which_each_shard_has_a_part() -> None:
    model = module_of(pm.qwen3()).eval()
    plan = plan_module(model, 2, "llm")
    run, inputs = example_run(model, None)
    expected = run_whole(model, run, inputs)
    forgotten = replace(plan, partial=frozenset())
    found = compare_shards(model, forgotten, run, inputs, expected)
    assert found == (None, plan.partial) and len(plan.partial) == 6


class Shuffled(nn.Module):
    """Names that promise a plain feed-forward, and a forward that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(hidden, self.fc1.weight, self.fc1.bias)
        return hidden + nn.functional.linear(inner.softmax(-1), self.fc2.weight)


def test_a_module_that_no_plan_fits_is_refused_by_name() -> None:
    inputs = {"hidden": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))}
    with pytest.raises(ProbeError, match="tp of 'vision' is 2, but Shuffled cannot be sharded"):
        probe_tensor(LiveSource.of(Shuffled()), 2, "vision", inputs)


def test_what_lies_between_and_needs_all_of_it_is_gathered() -> None:
    class Softmaxed(Shuffled):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.fc2(self.fc1(hidden).softmax(-1))

    inputs = {"hidden": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))}
    plan = probe_tensor(LiveSource.of(Softmaxed()), 2, "vision", inputs)
    assert plan.styles == {"fc1": "gathered_column", "fc2": "split_row"}
