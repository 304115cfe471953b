"""8-bit moments, and stochastically rounded weights, equal those of one process."""

import pytest
import torch

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.support import parity_models as pm

FULLY = ParallelSpec(dp=2, sharding="fsdp")
STEPS = 3


def model() -> MultimodalModule:
    """Return a model whose parameters do not fill quantisation blocks.

    Embeddings have 97 * 64 elements; halves of the feed-forwards of 64 * 96 have fewer than are
    quantised and end within blocks.
    """
    config = pm.llama(tied=False, layers=2)
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 96, 96
    return MultimodalModule({}, ModalityModule(pm.build(config, 3)))


def step() -> list[dict]:
    return [pm.batch([9, 7], 4), pm.batch([8, 5], 5)]


def run(spec, config, store=None, begin=False, precision="fp32", steps=STEPS):
    """Return parameters before and after steps, some of them optionally after a checkpoint."""
    layout = MultimodalParallelSpec({}, spec, 2)
    with layout.apply(model(), optimizer=config, seed=7, precision=precision) as parallel:
        if begin:
            restore(parallel, store.latest(), ())
        before = parallel.parameters()
        for _ in range(steps):
            parallel.train_step(step())
        if store is not None and not begin:
            store.save(parallel, {})
        return before, parallel.parameters()


def distances(mine, due, before):
    """Return the error of each parameter, relative to its change."""
    return {n: float((mine[n] - p).norm() / (p - before[n]).norm()) for n, p in due.items()}


@pytest.mark.cells(1)
@pytest.mark.parametrize("spec", [
    ParallelSpec(tp=2), FULLY, ParallelSpec(tp=2, dp=2, sharding="zero1"),
], ids=["tp", "fsdp", "tp-zero1"])
def test_8_bit_moments(ray_cluster, spec, tmp_path):
    config = OptimizerConfig(
        name="adamw_8bit", lr=1e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=None
    )
    before, due = run(ParallelSpec(), config)
    store = CheckpointStore(str(tmp_path))
    _, mine = run(spec, config, store)
    assert max(distances(mine, due, before).values()) < 1e-2
    at, due = run(ParallelSpec(), config, store, begin=True)
    _, mine = run(FULLY if spec.tp > 1 else ParallelSpec(tp=2), config, store, begin=True)
    assert max(distances(mine, due, at).values()) < 1e-2


def test_stochastic_rounding(ray_cluster):
    """Use one step: products in bf16 differ slightly, and later steps would start from that."""
    config = OptimizerConfig(lr=1e-3, eps=1e-5, parameters="bf16_stochastic")
    _, due = run(ParallelSpec(), config, precision="bf16", steps=1)
    _, mine = run(ParallelSpec(tp=2), config, precision="bf16", steps=1)
    rounded = [(mine[n], p) for n, p in due.items() if p.dtype == torch.bfloat16]
    differing = sum(int((one != other).sum()) for one, other in rounded)
    assert rounded and differing < 0.03 * sum(p.numel() for _, p in rounded)
