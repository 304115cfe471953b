"""Stages with uneven token shards, in gloo processes, equal one process.

The sent tensors have one shape, whatever the masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.probe.cut import probe_language_model
from raymm.actors.sharding.context_rows import padded_length
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import LiveSource
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from raymm.model.multimodal import complete_microbatch, text_inputs
from tests.support.rank_processes import RankProcesses, rank_processes
from tests.support.shard_models import module_of, pm

TOLERANCE = 1e-5
# 24 blocks of 128, without padding: the owner of the last block depends on the length
TOKENS = 3072
# Two rows whose last tokens see everything; one of two; none.
BATCHES = (([TOKENS, TOKENS], 1), ([900, TOKENS], 2), ([900, TOKENS - 1000, TOKENS // 2], 3))


def last_sees_all(
    length: int, spans: Sequence[Any], document_lengths: Sequence[int]
) -> AttentionMask:
    """Return causal blockwise masks for rows of many tokens."""
    if document_lengths[0] < TOKENS:
        return patterns.documents(document_lengths)
    return patterns.causal_blockwise(length, 128)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with rank_processes(3) as running:
        yield running


def run_language(bounds: list[int], group: Any = None) -> dict[str, Any]:
    """Return loss and gradients of the microbatches, sent shapes, and local token counts."""
    source = LiveSource.of(module_of(pm.qwen3()))
    cut = probe_language_model(source)
    spec = LanguageSpec("llm", source, bounds[-1], Prepend(), cut, last_sees_all)
    stages = [LanguageStage.build(spec, lo, hi) for lo, hi in zip(bounds, bounds[1:], strict=False)]
    if group is not None:
        for stage in stages:
            stage.share_tokens(Exchange(group))
    own: list[int] = []
    stages[-1].module.get_decoder().layers[-1].register_forward_hook(
        lambda layer, args, hidden: own.append(hidden.shape[1])
    )
    losses, shapes = [], []
    for lengths, seed in BATCHES:
        inputs: Any = text_inputs(complete_microbatch(pm.batch(lengths, seed), ()))
        received: dict[str, Message] = {}
        between = []
        for stage in stages:
            message = stage.run(inputs, received, MicrobatchContext(20))
            (sent,) = message.outputs
            leaf = sent.detach().requires_grad_()
            between.append((sent, leaf))
            received, inputs = {"llm": Message((leaf,), message.side)}, None
            if message.side:
                side = [tuple(entry.shape) for entry in message.side.values()]
                shapes.append([tuple(sent.shape), *side])
        loss = between.pop()[0]
        loss.backward()
        for sent, leaf in reversed(between):
            sent.backward(leaf.grad)
        losses.append(loss.detach())
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return {"loss": sum(losses), "gradients": gradients, "shapes": shapes, "own": own}


@pytest.mark.cells(1)
@pytest.mark.parametrize(("ranks", "bounds"), [(2, [0, 1, 3]), (3, [0, 3])])
def test_uneven_shards_equal_the_whole(
    processes: RankProcesses, ranks: int, bounds: list[int]
) -> None:
    expected = run_language([0, 3])
    results = processes.run(run_language, ranks, bounds=bounds)
    torch.testing.assert_close(
        sum(result["loss"] for result in results), expected["loss"], rtol=TOLERANCE, atol=0
    )
    for name, gradient in expected["gradients"].items():
        total = sum(result["gradients"][name] for result in results)
        assert (total - gradient).norm() <= TOLERANCE * gradient.norm(), name
    padded = padded_length(TOKENS, ranks)
    uneven, even, _ = zip(*(result["own"] for result in results), strict=True)
    assert sum(uneven) == sum(even) == padded
    assert len(set(uneven)) > 1 and max(uneven) == padded // ranks + 128
    assert len(set(even)) == 1  # one row of two gains too little
    if len(bounds) > 2:
        assert all(result["shapes"] == results[0]["shapes"] for result in results)
        first, second, _ = results[0]["shapes"]
        assert first == second and first[0] == (2, padded // ranks + 128, 32)
