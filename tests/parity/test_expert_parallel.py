"""Expert parallelism on Ray actors equals one process; checkpoints fit any layout."""

from __future__ import annotations

import pytest
import torch

from raymm import MultimodalModule, MultimodalParallelSpec, ParallelSpec
from raymm.errors import PlanError, ProbeError
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.actors.experts.test_router_loss import OPTIMIZER, SIZES, check
from tests.support.mixture_models import mixtral, step

pytestmark = pytest.mark.usefixtures("ray_cluster")

EP = ParallelSpec(dp=2, sharding="fsdp", ep=2)


def test_experts_on_other_processes():
    """Also shard tokens, in two stages; tests/actors/experts has other kinds of layers."""
    config = mixtral(num_local_experts=3)
    check(config, ParallelSpec(pp=2, cp=2, sharding="fsdp", ep=2), microbatches=2)


def run(described, spec, folder, begin_from=None):
    """Return the weights after two steps, saved after the first or started from a checkpoint."""
    layout = MultimodalParallelSpec(language_model_spec=spec, num_microbatches=len(SIZES))
    store = CheckpointStore(folder)
    with layout.apply(described, optimizer=OPTIMIZER, timeout_s=120) as parallel:
        if begin_from is None:
            parallel.train_step(step(0, SIZES))
            store.save(parallel, {})
        else:
            restore(parallel, begin_from)
        parallel.train_step(step(1, SIZES))
        return parallel.parameters(), store.latest()


def test_checkpoints_fit_any_layout(tmp_path):
    described = MultimodalModule({}, mixtral(num_local_experts=3))
    by_ep, of_ep = run(described, EP, tmp_path / "ep")
    by_pp, of_pp = run(described, ParallelSpec(pp=2), tmp_path / "pp")
    for spec, begin in ((ParallelSpec(pp=2), of_ep), (EP, of_pp)):
        after, _ = run(described, spec, tmp_path / "more", begin)
        for name, due in by_pp.items():
            assert torch.allclose(by_ep[name], due, atol=1e-5), name
            assert torch.allclose(after[name], due, atol=1e-5), name


def test_combinations_with_expert_parallelism():
    with pytest.raises(PlanError, match="ep is 2, with dp 2, cp 1 and sharding 'none'; accepted"):
        ParallelSpec(dp=2, ep=2)
    layout = MultimodalParallelSpec(language_model_spec=ParallelSpec(
        dp=4, sharding="fsdp", ep=4
    ))  # fmt: skip
    with pytest.raises(ProbeError, match="ep of 'llm' is 4, but .* has 3 experts"):
        layout.apply(MultimodalModule({}, mixtral(num_local_experts=3)))
