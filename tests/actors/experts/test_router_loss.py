"""Mixtures of experts with a router loss on Ray actors equal one process.

Loss, every gradient and AdamW steps are those of transformers' own forward of the whole step's
batch.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from raymm import MultimodalModule, MultimodalParallelSpec, ParallelSpec
from raymm.actors.experts.router_loss import RouterLoss
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from tests.support.mixture_models import OneProcess, gpt_oss, mixtral, one_batch, qwen3_moe, step

pytestmark = pytest.mark.usefixtures("ray_cluster")

TOLERANCE = 1e-5
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=None)
SIZES = [(2, 9), (1, 6), (3, 12), (2, 5)]
STEPS = 3
LOSS = RouterLoss(experts=4, top_k=2, coefficient=0.25)


def check_loads(output, oracle: OneProcess, batch) -> None:
    """Check the number of tokens per expert against the routers' logits of one process."""
    logits = oracle.output.router_logits
    real = one_batch(batch)["attention_mask"].flatten().bool()
    loads = [output.expert_loads[name] for name in sorted(output.expert_loads)]
    assert len(loads) == len(logits)
    for load, of_layer in zip(loads, logits, strict=True):
        chosen = of_layer[real].topk(oracle.model.config.num_experts_per_tok).indices.flatten()
        assert list(load) == torch.bincount(chosen, minlength=of_layer.shape[1]).tolist()
    worst = max(max(load) * len(load) / sum(load) for load in loads)
    assert max(output.expert_imbalance.values()) == pytest.approx(worst)


def check(config, spec: ParallelSpec, microbatches: int = 4, *, plan=None, **model) -> None:
    described = MultimodalModule({}, config, **model)
    described.materialize()
    oracle = OneProcess(
        described.language_model.module, lr=OPTIMIZER.lr, eps=OPTIMIZER.eps,
        betas=OPTIMIZER.betas, weight_decay=OPTIMIZER.weight_decay,
    )
    before = {n: p.detach().clone() for n, p in oracle.trained.items()}
    layout = MultimodalParallelSpec(
        language_model_spec=spec, num_microbatches=microbatches, **(plan or {})
    )
    with layout.apply(described, optimizer=OPTIMIZER, timeout_s=120) as parallel:
        for number in range(STEPS):
            batch = step(number, SIZES[:microbatches])
            loss = float(oracle.loss(batch))
            output = parallel.execute(batch)
            assert abs(output.loss - loss) <= 1e-6 * loss
            gradients = parallel.gradients()
            for name, due in oracle.gradients.items():
                own = gradients[f"language_model.module.{name}"]
                assert (own - due).norm() <= TOLERANCE * due.norm(), (number, name)
            check_loads(output, oracle, batch)
            parallel.optimizer.step()
            oracle.optimizer.step()
        after = parallel.parameters()
        # the router loss makes the difference
        assert parallel.evaluate(batch).loss < parallel.execute(batch).loss
    for name, due in oracle.trained.items():
        moved = (due.detach() - before[name]).norm()
        difference = (after[f"language_model.module.{name}"] - due.detach()).norm()
        assert difference <= 1e-3 * moved, name


@pytest.mark.cells(2)
@pytest.mark.parametrize(
    "config, spec, model",
    [
        (gpt_oss(), ParallelSpec(pp=2, dp=2), {}),
        (qwen3_moe(), ParallelSpec(pp=2, cp=2), {}),
        (mixtral(), ParallelSpec(dp=2, sharding="fsdp"), {}),
        (qwen3_moe(), ParallelSpec(pp=2, tp=2), {"packing": True}),
        # The last stage has no experts, and contributes nothing.
        (
            qwen3_moe(mlp_only_layers=[2, 3]), ParallelSpec(pp=2),
            {"plan": {"schedule": "zero_bubble"}},
        ),
        (mixtral(attention_dropout=0.0), ParallelSpec(pp=2), {"plan": {"recompute": True}}),
        (mixtral(), ParallelSpec(), {"microbatches": 1}),
    ],
)
def test_a_router_loss_equals_that_of_one_batch(config, spec, model):
    check(config, spec, **model)


def logits_of(rows):
    torch.manual_seed(0)
    return [torch.randn(rows, 4) for _ in range(3)]


@pytest.mark.parametrize("padded", [False, True])
def test_a_loss_equals_transformers(padded):
    logits = logits_of(10)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]) if padded else None
    due = load_balancing_loss_func(tuple(logits), 4, 2, mask)
    sums = LOSS.of(logits, None if mask is None else mask.flatten().bool())
    torch.testing.assert_close(LOSS.part(sums), 0.25 * due)


def test_parts_add_up_to_the_loss_of_the_step():
    logits = logits_of(10)
    parts = [LOSS.of([layer[rows] for layer in logits]) for rows in (slice(3), slice(3, 10))]
    counts = sum(part.counts for part in parts).tolist()
    whole = LOSS.part(LOSS.of(logits))
    torch.testing.assert_close(sum(LOSS.part(part, counts) for part in parts), whole)
    torch.testing.assert_close(LOSS.whole(parts), whole)


def test_no_tokens_have_no_loss():
    assert LOSS.part(LOSS.of([layer[:0] for layer in logits_of(2)])) == 0
