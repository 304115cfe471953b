"""What is handed on and not used has no gradient, as in one process, and so no weight decay."""

from __future__ import annotations

import pytest
import torch

from raymm.runtime.specs import ParallelSpec, dag_plan
from tests.actors.multiplex_models import pooled_dag
from tests.parity.test_mapped_graphs import mapped, split
from tests.parity.test_pipelined_graphs import check, steps_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

POOL = {f"{tower}.pool.{kind}" for tower in ("tower", "other") for kind in ("weight", "bias")}


def pooled_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    """Whose pooled states nobody uses but in the second microbatch of the second step."""
    torch.manual_seed(9000 + seed)
    return {"x": torch.randn(size, 3), "used": torch.full((size,), float(seed == 11))}


def never(size: int, seed: int) -> dict[str, torch.Tensor]:
    return pooled_batch(size, seed) | {"used": torch.zeros(size)}


@pytest.mark.parametrize("batch", [never, pooled_batch])
@pytest.mark.parametrize("specs", [
    {},  # a rank each
    {"tower": {"ranks": (0,)}, "error": {"ranks": (0,)}},
    {"tower": {"dp": 2}},
    {"error": {"dp": 2}},
], ids=["apart", "on one rank", "replicas", "readers"])  # fmt: skip
def test_outputs_that_nobody_uses(specs, batch):
    dag = pooled_dag()
    plan = dag_plan(dag, {name: ParallelSpec(**spec) for name, spec in specs.items()}, 2)
    unmoved = {name for name in POOL if batch is never or name.startswith("other")}
    check(dag, plan, steps_of(batch, 2), unmoved)


@pytest.mark.parametrize("batch", [never, pooled_batch])
def test_outputs_that_nobody_uses_by_samples(batch):
    """In slots, and in zero bubble with replicas that share samples."""
    unmoved = {name for name in POOL if batch is never or name.startswith("other")}
    dag = pooled_dag()
    plan = mapped(dag, 2, {"tower": ((0, 1), 5), "other": ((1,), 5)}, microbatches=2)
    check(dag, plan, steps_of(batch, 2), unmoved)
    dag = pooled_dag()
    specs = {"tower": ParallelSpec(dp=2), "error": ParallelSpec(dp=2)}
    plan = split(dag_plan(dag, specs, 2, "zero_bubble"), "tower", "error")
    check(dag, plan, steps_of(batch, 2), unmoved)
