"""bf16 weights with master copies are bitwise equal to fp32 weights under autocast."""

import pytest
import torch

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm

STEPS = 3


def model() -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(tied=True), 3)),
    )


def trained(
    parameters: str, spec: ParallelSpec, microbatches: int, precision: str = "bf16",
    max_grad_norm: float | None = None,
):
    """Return parameters after some steps, and losses."""
    config = OptimizerConfig(
        lr=1e-3, eps=1e-5, max_grad_norm=max_grad_norm, parameters=parameters
    )
    layout = MultimodalParallelSpec({"vision": ParallelSpec()}, spec, microbatches)
    step = [pm.batch([9, 7], 4 + m, vision=[0, 1]) for m in range(microbatches)]
    with layout.apply(model(), optimizer=config, precision=precision) as parallel:
        losses = [parallel.train_step(step).loss for _ in range(STEPS)]
        return parallel.parameters(), losses


@pytest.mark.cells(1)
@pytest.mark.parametrize(("spec", "max_grad_norm"), [
    (ParallelSpec(pp=2), None), (ParallelSpec(tp=2), None), (ParallelSpec(pp=2), 0.3),
])
def test_master_weights_equal_fp32_parameters_bitwise(ray_cluster, spec, max_grad_norm):
    """Use one microbatch, as several accumulate gradients in bf16. Clipping adds no rounding."""
    due, losses = trained("fp32", spec, 1, max_grad_norm=max_grad_norm)
    mine, same = trained("bf16_master", spec, 1, max_grad_norm=max_grad_norm)
    assert same == losses
    halved = {name for name, value in mine.items() if value.dtype == torch.bfloat16}
    assert all(name.endswith(("_proj.weight", "_proj.bias", "fc1.weight", "fc1.bias",
                              "fc2.weight", "fc2.bias")) or "projector" in name
               or "patch_embedding" in name or "head" in name for name in halved)
    assert len(halved) > 20
    for name, value in due.items():
        assert mine[name].equal(value.to(mine[name].dtype)), name


def test_several_microbatches_and_replicas(ray_cluster):
    due, losses = trained("fp32", ParallelSpec(), 2)
    for parameters in ("bf16_master", "bf16_stochastic"):
        _, near = trained(parameters, ParallelSpec(dp=2, sharding="zero1"), 2)
        assert near == pytest.approx(losses, rel=2e-3)
        assert near[-1] < near[0]


def test_what_cannot_be_is_refused_before_anything_starts(ray_cluster):
    with pytest.raises(PlanError, match="parameters is 'bf16_master', and run.precision 'fp32'"):
        trained("bf16_master", ParallelSpec(), 1, "fp32")
    with pytest.raises(PlanError, match="sharding of 'llm'.*which already gathers weights"):
        trained("bf16_master", ParallelSpec(dp=2, sharding="fsdp"), 2)
