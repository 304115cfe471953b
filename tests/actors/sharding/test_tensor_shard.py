"""Sharded modules in gloo processes compute the results of the full module.

Losses, outputs and every gradient; uncut, cut into stages, over several microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from raymm.actors.executor.split_backward import backward_input
from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.modules.token_layout import MASKS
from raymm.actors.probe.cut import probe_encoder, probe_language_model
from raymm.actors.probe.tensor import probe_tensor
from raymm.actors.sharding.tensor_plan import TensorPlan, tensor_plan
from raymm.actors.sharding.tensor_shard import cut_tensor, shard_module
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import LiveSource
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.model.multimodal import complete_microbatch, text_inputs
from tests.support.rank_processes import RankProcesses, rank_processes
from tests.support.shard_models import ENCODERS, FUSED, LANGUAGE, module_of, pm, projector

TOLERANCE = 1e-5
BATCHES = (([7, 5], 1), ([3, 9], 2))


class CountingGroup(TensorGroup):
    """Group that counts its sums."""

    sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return super().all_reduce(tensor)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(4) as running:
        yield running


def plan_for(source: LiveSource, tp: int, case: str) -> TensorPlan:
    """Return the probe's plan, which differs from the rules for fused projections."""
    make = probe_tensor if case in FUSED else tensor_plan
    plan = make(source, tp, case)
    # A plan is sent to ranks.
    assert copy.deepcopy(plan) == plan
    return plan


def run_language(
    case: str, bounds: list[int], group: Any = None, autocast: bool = False, mask: str = "",
    two_passes: bool = False,
) -> dict[str, Any]:
    """Run both microbatches through stages of blocks between ``bounds``.

    The stages are sharded if there is a group.
    """
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
            check_shards(stage.module, source.structure, plan, counting.rank)
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
    """Return the last stage's output, and the sent and received tensors between stages."""
    between, received = [], {}
    for stage in stages:
        message = stage.run(inputs, received, MicrobatchContext(20))
        (sent,) = message.outputs
        leaf = sent.detach().requires_grad_()
        between.append((sent, leaf))
        received, inputs = {stage.spec.name: Message((leaf,), message.side)}, None
    return between[-1][0], between[:-1]


def backward(output: torch.Tensor, between: list[Any]) -> None:
    output.backward()
    for sent, leaf in reversed(between):
        sent.backward(leaf.grad)


def backward_in_two_passes(output: torch.Tensor, between: list[Any]) -> None:
    """Run the backward as zero-bubble schedules do."""
    gradient = None
    for sent, leaf in reversed([(None, None), *between]):
        inputs = [leaf] if leaf is not None else []
        found, weights = backward_input([output], [gradient], inputs)
        weights.run()
        if leaf is not None:
            output, gradient = sent, found[0]


def gradients(stages: list[Any]) -> dict[str, torch.Tensor]:
    """Return gradients by name; for tied parameters, which two stages have, the sum."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


def check_shards(part: nn.Module, whole: nn.Module, plan: TensorPlan, rank: int) -> None:
    """Check that every parameter is as large as its shard, and that nothing larger is kept."""
    for name, parameter in part.named_parameters(remove_duplicate=False):
        shape, shard = list(whole.get_parameter(name).shape), plan.shard(name, rank)
        if shard is not None:
            shape[shard.dim] = shard.length
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
            sharers = plan.sharers(name, rank)
            own = sum(results[other]["gradients"][name] for other in sharers)
            shard = plan.shard(name, rank)
            # Rounding error alone: the bias of keys.
            norm = max(float(gradient.norm()), 1e-2 * largest)
            assert (own - cut_tensor(gradient, shard)).norm() <= tolerance * norm, name
            if not plan.is_replica(name, rank):
                counted += at_its_place(own, gradient, shard)
        # Shards that are not replicas make up the full parameter, once.
        assert (counted - gradient).norm() <= tolerance * norm, name


def at_its_place(own: torch.Tensor, whole: torch.Tensor, shard: Any) -> torch.Tensor:
    if shard is None:
        return own
    result, start = torch.zeros_like(whole), 0
    for lo, hi in shard.ranges:
        part = own.narrow(shard.dim, start, hi - lo)
        result.narrow(shard.dim, lo, hi - lo).copy_(part)
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
    """Use first, middle and last stages; tied embeddings on two of them."""
    check_language(processes, case, 2, [0, 1, 2, 3])


def test_llama_sums_twice_per_layer_and_direction(processes: RankProcesses) -> None:
    """Count attention and feed-forward; forward also the embedding and the loss, backward the head.
    """
    for result in processes.run(run_language, 2, case="llama", bounds=[0, 3]):
        assert result["sums"] == [2 * 3 + 2, 2 * 3 + 1] * 2


def test_weight_gradients_in_a_separate_pass(processes: RankProcesses) -> None:
    """Use the model's own mask; no sum is repeated."""
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
    return [p.grad for name, p in module.named_parameters() if plan.shard(name, 0) is None]


def test_dropout_is_the_same_on_all_processes(processes: RankProcesses) -> None:
    """Check that replicated tensors have the same dropout everywhere."""
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
            check_shards(stage.module, source.structure, plan, group.rank)
    outputs = []
    for scale in (1.0, -0.5):
        given = {name: value * scale for name, value in inputs.items()}
        output, between = forward(stages, given)
        backward((output * torch.cos(torch.arange(output.numel()).view_as(output))).sum(), between)
        outputs.append(output.detach())
    return {"outputs": outputs, "gradients": gradients(stages)}


@pytest.mark.cells(4)
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
    assert plan.shard("layers.0.weight", 1).ranges == ((2, 4),)
    check_gradients(processes.run(run_projector, 4), run_projector()["gradients"], plan)


def run_frozen(group: Any, no_grad: bool) -> dict[str, Any]:
    """Run a frozen model, with or without a trainable input."""
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
