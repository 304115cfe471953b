"""Multiplexed iterations on actors equal one process: losses, gradients, parameters."""

from __future__ import annotations

import os
import signal

import pytest
import ray
import torch
from multiplex_models import (
    Doubling,
    Failing,
    ImageBind,
    MeanSquare,
    OwnLength,
    Unified,
    clip_batch,
    clip_model,
    gradient_problems,
    imagebind_batch,
    mapping_of,
    pooled_dag,
    unified_batch,
)
from torch import nn

import raymm
from raymm.actors.modules.node import OutputError
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import RankFailedError
from raymm.model.contrastive import clip_dag
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from raymm.runtime.multiplexed_dag import MultiplexedModule
from raymm.scheduler.program.program import Op
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore

# eps keeps elements whose gradient is nothing but rounding from moving at the full rate; the
# norm makes clipping bite.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.05)
PARAMETER_TOLERANCE = 1e-3  # of how far a parameter has moved

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def four_gpus(ray_cluster):
    """Processes that the models of these tests take turns in: starting them takes longest."""
    held = []

    def run(dag, mapping, **options):
        group = held[0] if held else None
        running = MultiplexedModule(dag, mapping, group=group, timeout_s=120, **options)
        held[:] = [running.group]
        return running

    yield run
    for group in held:
        group.shutdown()


def check_gradients(running, oracle, loss_of, batch, name_of=lambda name: name):
    """One batch: loss, evaluation and every gradient."""
    oracle.zero_grad()
    loss = loss_of(batch)
    loss.backward()
    evaluated = running.evaluate(batch)
    output = running.execute(batch)
    for found in (evaluated, output):
        assert abs(found.loss - loss.item()) <= 1e-6 * abs(loss.item())
    due = {name_of(n): p.grad for n, p in oracle.named_parameters() if p.requires_grad}
    assert gradient_problems(running.gradients(), due) == []
    return output


def check_steps(running, oracle, loss_of, batches, name_of=lambda name: name):
    """AdamW steps with clipping: norms, losses, and parameters at the end."""
    trained = {n: p for n, p in oracle.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), OPTIMIZER.max_grad_norm).item()
        assert norm > OPTIMIZER.max_grad_norm, "clipping is not exercised"
        optimizer.step()
        output = running.train_step(batch)
        assert abs(output.loss - loss.item()) <= 1e-5 * abs(loss.item())
        assert abs(output.grad_norm - norm) <= 1e-5 * norm
        assert output.learning_rate == OPTIMIZER.lr
    after = running.parameters()
    assert set(after) == {name_of(name) for name, _ in oracle.named_parameters()}
    for name, parameter in oracle.named_parameters():
        mine = after[name_of(name)]
        if name not in trained:
            assert torch.equal(mine, parameter), name
            continue
        moved = float((parameter.detach() - before[name]).norm())
        error = float((mine - parameter.detach()).norm())
        assert moved > 0 and error <= PARAMETER_TOLERANCE * moved, (name, error, moved)


def test_clip_with_towers_of_different_degrees(four_gpus):
    model = clip_model()
    dag = clip_dag(model)

    def loss_of(batch):
        return model(**batch, return_loss=True).loss

    names = {id(p): n for n, p in dag.materialize().named_parameters()}
    ids = {n: id(p) for n, p in model.named_parameters()}

    def name_of(name):
        return names[ids[name]]

    batch = clip_batch(6, 0)
    assert abs(dag(batch).loss.item() - loss_of(batch).item()) < 1e-6
    mapping = mapping_of(4, {"image": ((0, 1, 2, 3), 6), "text": ((1, 2), 4)})
    running = four_gpus(dag, mapping, optimizer=OPTIMIZER)
    output = check_gradients(running, model, loss_of, batch, name_of)
    for size in (7, 1, 3):  # ragged, and fewer samples than copies
        check_gradients(running, model, loss_of, clip_batch(size, size), name_of)
    spans = output.timeline.spans
    assert {(s.rank, s.stage.module) for s in spans if s.op == Op.FORWARD} == {
        *((gpu, "image") for gpu in range(4)), *((gpu, place) for gpu in (1, 2)
                                                 for place in ("text", "contrastive")),
    }
    assert len(spans) == 16 and output.timeline.makespan <= output.seconds
    assert output.sent_bytes > 0
    granted = running.quotas()
    assert "'image': asked 0.6 (6.0 SMs), granted 6 of 10" in granted[1]
    assert "text" not in granted[0]
    check_steps(
        running, model, loss_of, [clip_batch(n, 10 + n) for n in (6, 5, 6)], name_of
    )


def test_a_planned_model_runs(four_gpus):
    model = clip_model()
    dag = clip_dag(model)
    planned = raymm.plan_multiplexed(dag, gpus=4, batch=6, tokens={"text": 8})
    running, batch = four_gpus(dag, planned.mapping), clip_batch(6, 0)
    due = model(**batch, return_loss=True).loss.item()
    assert running.execute(batch).loss == pytest.approx(due, rel=1e-6)


def test_six_towers_some_of_them_frozen(four_gpus):
    model = ImageBind()
    dag = model.dag()
    names = {id(p): n for n, p in dag.materialize().named_parameters()}
    ids = {n: id(p) for n, p in model.named_parameters()}
    mapping = mapping_of(
        4,
        {"image": ((0, 1, 2, 3), 5), "audio": ((0, 1), 4), "depth": ((2,), 5), "imu": ((3,), 2)},
        {"text": ((0, 1, 2, 3), 3), "thermal": ((1,), 7)},
        {"audio_loss": ((0, 3), 5)},
    )
    running = four_gpus(dag, mapping, optimizer=OPTIMIZER, lockstep=True)
    for size in (8, 5, 2):
        output = check_gradients(
            running, model, model, imagebind_batch(size, size), lambda n: names[ids[n]]
        )
    assert set(output.losses) == {name for name in dag.nodes if name.endswith("_loss")}
    backward = {s.stage.module for s in output.timeline.spans if s.op == Op.BACKWARD}
    assert backward == set(dag.nodes) - {"depth", "thermal"}
    check_steps(
        running, model, model, [imagebind_batch(7, 20 + i) for i in range(3)],
        lambda n: names[ids[n]],
    )


def test_encoders_a_frozen_backbone_and_decoders_with_losses(four_gpus):
    model = Unified()
    dag = model.dag()
    batch = unified_batch(6, 0)
    assert abs(dag(batch).loss.item() - model(batch).item()) < 1e-6
    mapping = mapping_of(  # the last GPU has nothing to do
        4,
        {"vision": ((0, 1), 7, 1), "audio": ((2,), 3, 2)},
        {"adapt": ((0,), 2, 2), "vision": ((1, 2), 8, 1)},
        {"backbone": ((0, 1), 10, 2)},
        {"text": ((1, 2), 6, 2), "image": ((2,), 4, 2)},
        slices=2,
    )
    running = four_gpus(dag, mapping, optimizer=OPTIMIZER)
    for size in (6, 5, 1):
        output = check_gradients(
            running, model, model, unified_batch(size, size), model.dag_name
        )
    backward = {s.stage.module for s in output.timeline.spans if s.op == Op.BACKWARD}
    assert backward == set(dag.nodes) - {"audio"}  # the backbone hands gradients on
    check_steps(
        running, model, model, [unified_batch(6, 30 + i) for i in range(3)], model.dag_name
    )


def test_microbatches_accumulate_gradients(four_gpus):
    """Of unequal sizes and numbers of labels; the towers of two GPUs sum what they have once."""
    model = Unified()
    mapping = mapping_of(
        4, {"vision": ((0, 1), 7), "audio": ((2,), 3)}, {"adapt": ((0, 3), 5)},
        {"backbone": ((0, 1), 10)}, {"text": ((1, 2), 6), "image": ((2,), 4)},
    )
    running = four_gpus(model.dag(), mapping, optimizer=OPTIMIZER)
    whole = unified_batch(7, 40)
    parts = [{name: t[lo:hi] for name, t in whole.items()} for lo, hi in ((0, 4), (4, 5), (5, 7))]
    model.zero_grad()
    loss = model(whole)
    loss.backward()
    due = {model.dag_name(n): p.grad for n, p in model.named_parameters() if p.requires_grad}
    for found in (running.evaluate(parts), running.execute(parts), running.execute(parts)):
        assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert gradient_problems(running.gradients(), due) == []
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, OPTIMIZER.max_grad_norm).item()
    assert running.train_step(parts).grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_checkpoint_goes_on_under_another_mapping(four_gpus, tmp_path):
    """Parameters, optimizer state and steps."""
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
    running = four_gpus(model.dag(), first, optimizer=OPTIMIZER)
    running.train_step(batches[0])
    running.train_step(batches[1])
    folder = store.save(running, {"anything": 1})
    due = running.train_step(batches[2])
    after = running.parameters()
    again = four_gpus(model.dag(), other, optimizer=OPTIMIZER)
    assert restore(again, folder).trainer == {"anything": 1} and again.steps_taken == 2
    found = again.train_step(batches[2])
    assert found.loss == pytest.approx(due.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(due.grad_norm, rel=1e-5)
    for name, value in again.parameters().items():
        torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-6, msg=name)


def test_dropout_repeats_and_is_off_in_evaluation(four_gpus):
    torch.manual_seed(0)
    dag = ModuleDag({
        "tower": DagModule(nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5)), reads={"input": "x"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "tower"}),
    })
    mapping = mapping_of(4, {"tower": ((0, 1), 10)})
    batch = {"x": torch.randn(4, 3)}
    losses = []
    for seed in (7, 7, 8):
        running = four_gpus(dag, mapping, seed=seed)
        losses.append(running.execute(batch).loss)
        assert running.execute(batch).loss == losses[-1]  # the same step
        evaluated = running.evaluate(batch).loss
        assert running.train_step(batch).loss == losses[-1]
    assert losses[0] == losses[1] != losses[2]
    dag.materialize().eval()
    assert evaluated == pytest.approx(dag(batch).loss.item(), rel=1e-6) != losses[2]


def test_parameters_that_no_loss_depends_on_have_no_gradient(four_gpus):
    """So that AdamW leaves them alone, whatever momentum they have."""
    dag = pooled_dag().materialize()
    mapping = mapping_of(
        4, {"tower": ((0, 1), 5), "other": ((2,), 5)}, {"error": ((1, 3), 5), "mean": ((2,), 5)}
    )
    running = four_gpus(dag, mapping, optimizer=OPTIMIZER)
    optimizer = torch.optim.AdamW(
        dag.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    for step, used in enumerate(([0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1])):
        torch.manual_seed(step)
        batch = {"x": torch.randn(4, 3), "used": torch.tensor(used)}
        optimizer.zero_grad()
        dag(batch).loss.backward()
        due = {name: p.grad for name, p in dag.named_parameters()}
        assert (due["tower.pool.weight"] is None) == (not any(used))
        assert due["other.pool.weight"] is None
        running.execute(batch)
        assert gradient_problems(running.gradients(), due) == []
        torch.nn.utils.clip_grad_norm_(dag.parameters(), OPTIMIZER.max_grad_norm)
        before = {name: p.detach().clone() for name, p in dag.named_parameters()}
        held = running.parameters()
        optimizer.step()
        running.train_step(batch)
        after = running.parameters()
        for name, parameter in dag.named_parameters():
            if due[name] is None:
                assert torch.equal(after[name], held[name]), name
            moved = float((parameter.detach() - before[name]).norm())
            error = float((after[name] - held[name] - parameter.detach() + before[name]).norm())
            assert error <= PARAMETER_TOLERANCE * moved + 1e-7, (step, name, error, moved)


def test_all_members_of_every_group_meet_before_its_first_messages(four_gpus):
    """NCCL groups that begin with messages of some of their members hang."""

    def met(actor):
        groups = {"messages": actor._messages._group, **actor._replicas}
        return {
            name: one._get_sequence_number_for_group() for name, one in groups.items()
            if one is not torch.distributed.GroupMember.NON_GROUP_MEMBER
        }

    dag, _ = failing()
    mapping = mapping_of(4, {"fine": ((0, 1), 10)}, {"broken": ((1, 2), 5)}, {"mean": ((3,), 5)})
    for _ in range(2):  # processes that another model had have new groups
        running = four_gpus(dag, mapping)
        found = ray.get([one.__ray_call__.remote(met) for one in running.group._actors])
        assert [set(one) for one in found] == [
            {"messages", "fine"}, {"messages", "fine", "broken"}, {"messages", "broken"},
            {"messages"},
        ]
        assert all(count >= 1 for one in found for count in one.values()), found


def test_a_model_whose_processes_run_another_says_so(four_gpus):
    dag, batch = failing()
    first = four_gpus(dag, mapping_of(4, {"fine": ((0,), 10)}, {"broken": ((1, 2), 5)},
                                      {"mean": ((3,), 5)}))  # fmt: skip
    for options, text in (
        ({"threads": 0}, "threads is 0; accepted: a whole number from 1"),
        ({"threads": 7}, "threads is 7, and the group's processes have 1"),
        ({"device": "cuda"}, "device is 'cuda', and the group's processes have 'cpu'"),
        ({"resources": raymm.RankResources(cpus=2.0)}, "resources is RankResources"),
    ):
        with pytest.raises(ValueError, match=text):
            four_gpus(dag, first.mapping, **options)
    for timeout in (0, float("nan"), "5"):
        with pytest.raises(ValueError, match=f"timeout_s is {timeout!r}; accepted: a positive"):
            MultiplexedModule(dag, first.mapping, timeout_s=timeout)
    with first:
        second = four_gpus(dag, first.mapping)
    with pytest.raises(RuntimeError, match="processes run another model"):
        first.execute(batch)
    assert second.execute(batch).loss == pytest.approx(dag(batch).loss.item(), rel=1e-6)


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
    running = MultiplexedModule(dag, mapping)
    assert running.execute(batch).loss == pytest.approx(dag(batch).loss.item(), rel=1e-6)
    with pytest.raises(RankFailedError, match=r"GPU 1 \(.*module 'broken' failed: Arithmetic"):
        running.execute({**batch, "code": torch.ones(4, 1)})
    running.close()


def test_a_killed_process_is_named():
    dag, batch = failing()
    mapping = mapping_of(
        2, {"fine": ((0,), 10)}, {"broken": ((1,), 5)}, {"mean": ((0, 1), 10)}
    )
    with MultiplexedModule(dag, mapping) as running:
        running.execute(batch)
        os.kill(running.group.pids()[1]["pid"], signal.SIGKILL)
        with pytest.raises(RankFailedError, match=r"GPU 1 \(modules broken, mean, error"):
            running.execute(batch)
        for call in (lambda: running.execute(batch), running.gradients, running.quotas):
            with pytest.raises(RuntimeError, match=r"have ended: GPU 1 \(.*died"):
                call()


def test_shapes_that_differ_between_gpus_are_named():
    dag = ModuleDag({
        "speech": DagModule(OwnLength(), reads=("x", "length")),
        "flat": DagModule(nn.Flatten(), inputs={"input": "speech"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "flat"}),
    })
    mapping = mapping_of(3, {"speech": ((0, 1), 10)}, {"flat": ((2,), 10)})
    batch = {"x": torch.randn(4, 3), "length": torch.tensor([2, 1, 1, 4])}
    with (
        MultiplexedModule(dag, mapping) as running,
        pytest.raises(RankFailedError, match=r"'speech' are .*\(4, 3\).* on GPU 1 and .*\(2, 3\).* "
                                             "on GPU 0; accepted: shapes that follow"),
    ):  # fmt: skip
        running.execute(batch)


def test_a_module_that_changes_what_others_read_is_named():
    """Which of the two is first would decide what the other reads."""
    dag = ModuleDag({
        "tower": DagModule(nn.Linear(3, 3), reads={"input": "x"}),
        "doubling": DagLoss(Doubling(), inputs={"x": "tower"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "tower"}),
    })
    batch = {"x": torch.randn(4, 3)}
    with MultiplexedModule(dag, mapping_of(1, {"tower": ((0,), 10)})) as running:
        with pytest.raises(RankFailedError, match="'doubling' changes its input 'x' in place"):
            running.evaluate(batch)
    with torch.no_grad(), pytest.raises(OutputError, match="'doubling' changes its input 'x'"):
        dag(batch)
