"""Stages with expert parallelism, and FSDP for the other parameters, equal one process.

Loss and every gradient are those of transformers' own forward of the whole step's batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from raymm import MultimodalModule
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.probe.experts.parallel import probe_experts
from raymm.actors.recompute.recomputed_layers import recompute_layers
from raymm.actors.sharding.fully_sharded import fully_sharded_plan, language_units, local_part
from raymm.actors.stages.language import LanguageStage
from raymm.kernels.collectives.p2p import Exchange
from tests.support.mixture_models import OneProcess, Sizes, mixtral, one_batch, qwen3_moe, step
from tests.support.rank_processes import rank_processes

TOLERANCE = 1e-5
# In the second microbatch one of two processes has no row.
SIZES: Sizes = [(2, 9), (1, 6), (3, 12)]


@pytest.fixture(scope="module")
def processes():
    with rank_processes(2) as running:
        yield running


def counts(oracle: OneProcess, batch) -> tuple[float, ...]:
    """Return the number of the step's tokens per expert."""
    real = one_batch(batch)["attention_mask"].flatten().bool()
    every = torch.cat([logits[real] for logits in oracle.output.router_logits])
    chosen = every.topk(oracle.model.config.num_experts_per_tok).indices.flatten()
    return tuple(torch.bincount(chosen, minlength=every.shape[1]).tolist())


def step_of(group, config, router_counts, option):
    """Return a process's part of the loss, and its gradients.

    Each gradient has a flag: True if other processes have parts of the same one.
    """
    spec = MultimodalModule({}, config).language_spec()
    skeleton = spec.source.skeleton()
    blocks = find_blocks(skeleton)
    plan = fully_sharded_plan(skeleton, language_units(skeleton, blocks), 2)
    plan = replace(plan, experts=probe_experts(spec.source, 2, spec.name))
    stage = LanguageStage.build(spec, 0, spec.num_blocks)
    if option:
        recompute_layers(block_list(stage.module, blocks), (option,) * spec.num_blocks)
    stage.share_samples(Exchange(group))
    stage.shard_parameters({"module": plan}, group, torch.device("cpu"))
    microbatches = step(0, SIZES)
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches)
    context = MicrobatchContext(labels, router_loss=True, router_counts=router_counts)
    total = torch.zeros(())
    for batch in microbatches:
        message = stage.run({**batch, "sample_index": {}}, {}, context)
        message.loss.backward()
        total += message.loss.detach()
    place = dist.get_rank(group)
    return total.item(), {
        name: (local_part(parameter.grad).clone(), plan.shard(name, place) is not None)
        for name, parameter in stage.module.named_parameters()
    }


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (qwen3_moe(num_experts=5), ""),  # not divisible by two
        (mixtral(num_local_experts=3), "all"),  # tokens are exchanged again for the backward
        (mixtral(num_local_experts=2, num_experts_per_tok=1), ""),
    ],
)
def test_a_step_is_that_of_one_process(processes, config, option):
    described = MultimodalModule({}, config)
    described.materialize()
    oracle = OneProcess(described.language_model.module, 0.01, lr=1e-3)
    microbatches = step(0, SIZES)
    loss = float(oracle.loss(microbatches))
    results = processes.run(
        step_of, 2, config=config, router_counts=counts(oracle, microbatches), option=option
    )
    assert sum(own for own, _ in results) == pytest.approx(loss, rel=1e-6)
    for name, due in oracle.gradients.items():
        parts = [gradients[name][0] for _, gradients in results]
        is_shared_out = results[0][1][name][1]
        gradient = torch.cat(parts) if is_shared_out else parts[0] + parts[1]
        assert (gradient - due).norm() <= TOLERANCE * due.norm(), name
