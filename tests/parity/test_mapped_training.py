"""Graphs under mappings on Ray actors.

Oracles are transformers models. Also covers checkpoints, random numbers, and errors by name.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import ModelError, RankFailedError
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.contrastive import clip_dag
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.program.program import Op
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.support.multiplex_models import (
    Doubling,
    Failing,
    MeanSquare,
    OwnLength,
    Unified,
    clip_batch,
    clip_model,
    gradient_problems,
    mapping_of,
    unified_batch,
)

# eps keeps elements whose gradient is rounding error from moving at the full rate; the norm makes
# clipping take effect.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.05)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def running_of(dag, mapping, microbatches=1, **options):
    """Start the model on separate processes."""
    plan = plan_of_mapping(dag, mapping, microbatches)
    return ParallelModel(dag, plan, timeout_s=120, **options)


def test_a_transformers_clip_and_its_granted_quotas():
    """Compare with a model's own forward; ragged batches, and fewer samples than replicas."""
    model = clip_model()
    dag = clip_dag(model)
    names = {id(p): n for n, p in dag.materialize().named_parameters()}
    mapping = mapping_of(4, {"image": ((0, 1, 2, 3), 6), "text": ((1, 2), 4)})
    with running_of(dag, mapping, optimizer=OPTIMIZER) as running:
        for size in (6, 7, 1, 3):
            batch = clip_batch(size, size)
            model.zero_grad()
            loss = model(**batch, return_loss=True).loss
            loss.backward()
            for output in (running.evaluate(batch), running.execute(batch)):
                assert output.loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-7)
            due = {names[id(p)]: p.grad for p in model.parameters() if p.requires_grad}
            assert gradient_problems(running.gradients(), due) == []
            running.zero_grad()
    forwards = {(s.rank, s.stage.module) for s in output.timeline.spans if s.op == Op.FORWARD}
    assert forwards <= {
        *((rank, "image") for rank in range(4)),
        *((rank, place) for rank in (1, 2) for place in ("text", "contrastive")),
    }


def test_microbatches_accumulate_gradients():
    """Use unequal sizes and numbers of labels; the towers of two GPUs reduce gradients once."""
    model = Unified()
    mapping = mapping_of(
        4, {"vision": ((0, 1), 7), "audio": ((2,), 3)}, {"adapt": ((0, 3), 5)},
        {"backbone": ((0, 1), 10)}, {"text": ((1, 2), 6), "image": ((2,), 4)},
    )
    whole = unified_batch(7, 40)
    parts = [{name: t[lo:hi] for name, t in whole.items()} for lo, hi in ((0, 4), (4, 5), (5, 7))]
    loss = model(whole)
    loss.backward()
    due = {model.dag_name(n): p.grad for n, p in model.named_parameters() if p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    with running_of(model.dag(), mapping, 3, optimizer=OPTIMIZER) as running:
        for output in (running.evaluate(parts), running.execute(parts)):
            assert output.loss == pytest.approx(loss.item(), rel=1e-6)
        assert gradient_problems(running.gradients(), due) == []
        running.zero_grad()
        norm = torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.max_grad_norm).item()
        assert running.train_step(parts).grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_checkpoint_resumes_under_another_mapping(tmp_path):
    """Restore parameters, optimizer state and steps."""
    model = Unified()
    store = CheckpointStore(tmp_path)
    batches = [unified_batch(5, 60 + i) for i in range(3)]
    first = mapping_of(
        4, {"vision": ((0, 1), 7), "audio": ((2,), 3)}, {"adapt": ((0,), 5)},
        {"backbone": ((0, 1), 10)}, {"text": ((1, 2), 6), "image": ((2,), 4)},
    )
    other = mapping_of(
        4, {"audio": ((0, 3), 3)}, {"adapt": ((1, 2), 5), "vision": ((3,), 5)},
        {"backbone": ((2, 3), 10)}, {"text": ((0,), 6), "image": ((0, 1), 4)},
    )
    with running_of(model.dag(), first, optimizer=OPTIMIZER) as running:
        running.train_step(batches[0])
        running.train_step(batches[1])
        folder = store.save(running, {"anything": 1})
        due = running.train_step(batches[2])
        after = running.parameters()
    with running_of(model.dag(), other, optimizer=OPTIMIZER) as again:
        assert restore(again, folder).trainer == {"anything": 1} and again.steps_taken == 2
        output = again.train_step(batches[2])
        assert output.loss == pytest.approx(due.loss, rel=1e-5)
        assert output.grad_norm == pytest.approx(due.grad_norm, rel=1e-5)
        for name, value in again.parameters().items():
            torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-6, msg=name)


def test_dropout_repeats_and_is_off_in_evaluation():
    torch.manual_seed(0)
    dag = ModuleDag({
        "tower": DagModule(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)), reads={"input": "x"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "tower"}),
    })
    mapping = mapping_of(4, {"tower": ((0, 1), 10)})
    batch = {"x": torch.randn(4, 3)}
    losses = []
    for seed in (7, 7, 8):
        with running_of(dag, mapping, seed=seed) as running:
            losses.append(running.execute(batch).loss)
            running.zero_grad()
            assert running.execute(batch).loss == losses[-1]  # the same step
            assert running.execute(batch).loss != losses[-1]  # another batch in it
            running.zero_grad()
            evaluated = running.evaluate(batch).loss
            assert running.train_step(batch).loss == losses[-1]
    assert losses[0] == losses[1] != losses[2]
    dag.materialize().eval()
    assert evaluated == pytest.approx(dag(batch).loss.item(), rel=1e-6) != losses[2]


def failing() -> tuple[ModuleDag, dict[str, torch.Tensor]]:
    dag = ModuleDag({
        "fine": DagModule(nn.Linear(3, 3), reads={"input": "x"}),
        "broken": DagModule(Failing(), reads="code", inputs={"x": "fine"}),
        "error": DagLoss(nn.Flatten(0), inputs={"input": "mean"}),
        "mean": DagModule(nn.Linear(3, 1), inputs={"input": "broken"}),
    })
    return dag, {"x": torch.randn(4, 3), "code": torch.zeros(4, 1)}


def test_a_module_that_raises_is_named():
    dag, batch = failing()
    mapping = mapping_of(
        2, {"fine": ((0,), 10)}, {"broken": ((1,), 5)}, {"mean": ((0, 1), 10)}
    )
    with running_of(dag, mapping) as running:
        assert running.execute(batch).loss == pytest.approx(dag(batch).loss.item(), rel=1e-6)
        with pytest.raises(RankFailedError, match=r"rank 1 \(.*broken.*Arithmetic"):
            running.execute({**batch, "code": torch.ones(4, 1)})


def test_shapes_that_differ_between_gpus_are_named():
    dag = ModuleDag({
        "speech": DagModule(OwnLength(), reads=("x", "length")),
        "flat": DagModule(nn.Flatten(), inputs={"input": "speech"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "flat"}),
    })
    mapping = mapping_of(3, {"speech": ((0, 1), 10)}, {"flat": ((2,), 10)})
    batch = {"x": torch.randn(4, 3), "length": torch.tensor([2, 1, 1, 4])}
    with (
        running_of(dag, mapping) as running,
        pytest.raises(RankFailedError, match=r"'speech' have shapes \(2, 2, 3\) and \(2, 4, 3\)"),
    ):
        running.execute(batch)


def test_a_module_that_changes_shared_inputs_is_named():
    """Reject it: the result would depend on the order of the two modules."""
    dag = ModuleDag({
        "tower": DagModule(nn.Linear(3, 3), reads={"input": "x"}),
        "doubling": DagLoss(Doubling(), inputs={"x": "tower"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "tower"}),
    })
    batch = {"x": torch.randn(4, 3)}
    with running_of(dag, mapping_of(1, {"tower": ((0,), 10)})) as running:
        with pytest.raises(RankFailedError, match="'doubling' changes its input 'x' in place"):
            running.evaluate(batch)
    with torch.no_grad(), pytest.raises(ModelError, match="'doubling' changes its input 'x'"):
        dag(batch)
