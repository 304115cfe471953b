"""Graphs of modules are trained by a Trainer, from batches in memory."""

import pytest
import torch
from torch import nn

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.rank.rank_resources import RankResources
from raymm.config.sections import RunConfig
from raymm.data import DataConfig
from raymm.errors import ModelError
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from raymm.runtime.specs import ParallelSpec, dag_plan
from raymm.training.trainer import Trainer
from tests.support.tiny_run import checkpoint_tensors

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.1, no_decay=(), max_grad_norm=0.5)
STEPS = 4

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 8), nn.Linear(8, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(values)))


class Distance(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first - second).square().mean(-1)


def graph() -> ModuleDag:
    torch.manual_seed(0)
    return ModuleDag({
        "image": DagModule(Tower(4), reads={"values": "pixels"}),
        "sound": DagModule(Tower(5), reads={"values": "samples"}),
        "distance": DagLoss(Distance(), inputs={"first": "image", "second": "sound"}),
    })


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"pixels": torch.randn(6, 4), "samples": torch.randn(6, 5)} for _ in range(3)]


def trainer(folder, dag=None, steps=STEPS, **options) -> Trainer:
    dag = graph() if dag is None else dag
    return Trainer(
        dag, parallel=dag_plan(dag, {"image": ParallelSpec()}, num_microbatches=2), data=batches(),
        optimizer=OPTIMIZER, resources=RankResources(cpus=0.25),
        run_config=RunConfig(steps=steps, storage_path=str(folder), checkpoint_every=2), **options,
    )


def weights(folder) -> dict[str, torch.Tensor]:
    """Return the parameters of the newest checkpoint of a run."""
    return {
        name.replace("/module.", "."): tensor for name, tensor in checkpoint_tensors(folder).items()
        if not name.startswith("optimizer/")
    }


def test_a_run_equals_one_process_resumes_and_has_phases(tmp_path):
    result = trainer(tmp_path / "straight").fit()
    dag, data, losses = graph().materialize(), batches(), []
    optimizer = torch.optim.AdamW(
        dag.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = dag(data[step % len(data)]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(dag.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    assert [row["loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    trained = weights(tmp_path / "straight")
    assert trained.keys() == dict(dag.named_parameters()).keys()
    for name, parameter in dag.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)

    trainer(tmp_path / "twice", steps=2).fit()
    before, short = dict(graph().materialize().named_parameters()), weights(tmp_path / "twice")
    resumed = trainer(tmp_path / "twice").fit()
    assert resumed.metrics["step"] == STEPS
    again = weights(tmp_path / "twice")
    assert all(torch.equal(again[name], tensor) for name, tensor in trained.items())

    # A phase freezes a module: it has the parameters of the run that ends there.
    trainer(tmp_path / "run", at={2: {"sound": "frozen"}}).fit()
    for name, tensor in weights(tmp_path / "run").items():
        assert not torch.equal(tensor, before[name])
        assert torch.equal(tensor, short[name]) == name.startswith("sound.")


@pytest.mark.parametrize(("options", "said"), [
    (dict(data=DataConfig(train="rows.jsonl", tokenizer="none", batch_size=2, microbatches=1)),
     "data is a DataConfig; accepted"),
    (dict(parallel=None), "parallel is neither a plan nor a mapping; accepted for"),
    (dict(at={1: {"picture": "frozen"}}), "'picture', which is not a part of the model; accepted"),
])  # fmt: skip
def test_what_a_graph_lacks_is_refused_by_name(tmp_path, options, said):
    dag = graph()
    given = dict(parallel=dag_plan(dag), data=batches()) | options
    with pytest.raises(ModelError, match=said):
        Trainer(dag, run_config=RunConfig(steps=2, storage_path=str(tmp_path)), **given)
