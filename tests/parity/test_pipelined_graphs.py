"""Graphs of modules in pipelines on Ray actors equal one process.

Compares loss, gradients and updates with a process that accumulates the same microbatches.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from raymm.actors.modules.noise import SampleSeeds
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import DataError, PlanError, ProbeError
from raymm.model.contrastive import clip_dag
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import ParallelSpec, dag_plan
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from tests.support.multiplex_models import (
    WIDTH,
    ImageBind,
    MeanSquare,
    Tower,
    Unified,
    clip_batch,
    gradient_problems,
    imagebind_batch,
    unified_batch,
)

# eps keeps elements whose gradient is rounding error from moving at the full rate; the norm makes
# clipping take effect.
MAX_NORM = 0.02
# All parameters decay, so that biases whose gradients are rounding error move, too.
OPTIMIZER = OptimizerConfig(
    lr=1e-3, eps=1e-5, weight_decay=0.1, no_decay=(), max_grad_norm=MAX_NORM
)
PARAMETER_TOLERANCE = 1e-3  # relative to the change of a parameter
STEPS = 3

pytestmark = pytest.mark.usefixtures("ray_cluster")


def step_loss(dag, batches, step=0):
    """Return the loss of all microbatches, each divided by its own count over the whole step."""
    scales, total, first = dag.scales(*batches), torch.zeros(()), 0
    for batch in batches:
        own = dag.scales(batch)
        for name, loss in dag(batch, SampleSeeds(step=step, first=first)).losses.items():
            total = total + loss * (scales[name] / own[name])
        first += dag.batch_size(batch)
    return total


def check(dag, plan, steps, unmoved=(), **options):
    """Check one step's loss and gradients, accumulated twice, then AdamW steps with clipping.

    All parameters except ``unmoved`` change.
    """
    dag.materialize()
    trained = {n: p for n, p in dag.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    with ParallelModel(dag, plan, optimizer=OPTIMIZER, timeout_s=120, **options) as running:
        loss = step_loss(dag, steps[0])
        loss.backward()
        assert abs(running.evaluate(steps[0]).loss - loss.item()) <= 1e-6 * abs(loss.item())
        output = running.execute(steps[0])
        assert abs(output.loss - loss.item()) <= 1e-6 * abs(loss.item())
        assert output.losses.keys() == dag.graph.losses
        due = {name: p.grad for name, p in trained.items()}
        assert gradient_problems(running.gradients(), due) == []
        running.zero_grad()
        optimizer = torch.optim.AdamW(
            trained.values(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
        )
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            loss = step_loss(dag, step, number)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item()
            assert norm > MAX_NORM, "clipping is not exercised"
            optimizer.step()
            output = running.train_step(step)
            assert abs(output.loss - loss.item()) <= 1e-5 * abs(loss.item())
            assert output.grad_norm == pytest.approx(norm, rel=1e-5)
        after = running.parameters()
        assert set(after) == set(trained)
        for name, parameter in trained.items():
            moved = float((parameter.detach() - before[name]).norm())
            error = float((after[name] - parameter.detach()).norm())
            assert (moved > 0) != (name in unmoved), name
            assert error <= PARAMETER_TOLERANCE * moved, (name, error, moved)
    return output


def deep_clip() -> ModuleDag:
    """Return a CLIP whose towers have three layers each."""
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    text = dict(hidden_size=20, intermediate_size=28, num_hidden_layers=3,
                num_attention_heads=2, vocab_size=31, max_position_embeddings=9,
                eos_token_id=2, bos_token_id=0, pad_token_id=1)  # fmt: skip
    model = hf.CLIPModel(hf.CLIPConfig(
        vision_config=vision, text_config=text, projection_dim=WIDTH
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return clip_dag(model)


def steps_of(batch, microbatches, sizes=(5, 3, 4, 6)):
    """Return microbatches of different numbers of samples."""
    return [
        [batch(sizes[m], 10 * step + m) for m in range(microbatches)] for step in range(STEPS)
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_clip_with_towers_in_stages_and_in_replicas(schedule):
    dag = deep_clip()
    plan = dag_plan(
        dag, {"image": ParallelSpec(pp=2), "text": ParallelSpec(pp=2, dp=2)}, 4, schedule
    )
    assert plan.num_ranks == 7
    output = check(dag, plan, steps_of(clip_batch, 4))
    spans = {(span.stage, span.microbatch) for span in output.timeline.spans}
    assert len({stage for stage, _ in spans}) >= 7


def test_six_towers_some_of_them_frozen():
    """Put losses on the ranks of their inputs, or on a separate one."""
    dag = ImageBind().dag()
    specs = {
        "image": ParallelSpec(dp=2, ranks=(0, 1)), "text": ParallelSpec(ranks=(2,)),
        "audio": ParallelSpec(pp=2, ranks=(3, 4)), "depth": ParallelSpec(ranks=(2,)),
        "thermal": ParallelSpec(ranks=(5,)), "imu": ParallelSpec(ranks=(5,)),
        "text_loss": ParallelSpec(ranks=(2,)), "audio_loss": ParallelSpec(ranks=(4,)),
        "depth_loss": ParallelSpec(ranks=(0,)), "thermal_loss": ParallelSpec(ranks=(5,)),
        "imu_loss": ParallelSpec(ranks=(5,)),
    }
    nodes = dict(dag.nodes)
    nodes["audio"] = DagModule(
        dag.nodes["audio"].modality.module, reads={"x": "audio"},
        example_inputs={"x": torch.randn(2, 7)},
    )
    dag = ModuleDag(nodes)
    check(dag, dag_plan(dag, specs, 2), steps_of(imagebind_batch, 2))


def test_encoders_a_backbone_and_decoders_with_losses():
    """Freeze an encoder whose projector has a separate stage; losses of different weights.

    One loss is divided by its label tokens over the step.
    """
    dag = Unified().dag()
    plan = dag_plan(dag, {
        "vision": ParallelSpec(pp=2, layers=(1, 1)), "adapt": ParallelSpec(dp=2),
        "audio": ParallelSpec(ranks=(0,)), "image": ParallelSpec(ranks=(6,)),
        "text": ParallelSpec(ranks=(6,)),
    }, 2)
    check(dag, plan, steps_of(unified_batch, 2))


class Block(nn.Linear):
    """Linear layer from (..., WIDTH) to the same shape."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x).tanh()


class States(nn.Module):
    """Named states of two kinds, and a number without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.pool = nn.Linear(WIDTH, 4)

    def forward(self, states: torch.Tensor, length: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            states = layer(states)
        return {"states": states, "pooled": self.pool(states), "length": length + 1}


class Head(nn.Module):
    """Distances for samples that are long enough."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, WIDTH)

    def forward(self, made: dict[str, torch.Tensor], first: torch.Tensor) -> torch.Tensor:
        assert made["length"].dtype == torch.int64
        error = (self.head(made["pooled"]) - made["states"] + first).square().mean(1)
        return error * (made["length"] > 2)


def chain_batch(size, seed):
    torch.manual_seed(4000 + seed)
    return {"x": torch.randn(size, 5), "length": torch.randint(1, 5, (size,))}


def chained() -> ModuleDag:
    torch.manual_seed(5)
    example = {"states": torch.randn(2, WIDTH), "length": torch.tensor([1, 2])}
    return ModuleDag({
        "first": DagModule(Tower(5, 8), reads="x", example_inputs={"x": torch.randn(2, 5)}),
        "second": DagModule(
            States(), reads="length", inputs={"states": "first"}, example_inputs=example
        ),
        "head": DagLoss(Head(), inputs={"made": "second", "first": "first"}),
    })


@pytest.mark.cells(1)
@pytest.mark.parametrize("recompute", [False, True])
def test_an_encoder_that_feeds_an_encoder_that_feeds_a_head(recompute):
    """Cut both encoders into stages; the head reads both. Several named outputs, one integer."""
    dag = chained()
    specs = {"first": ParallelSpec(pp=2), "second": ParallelSpec(pp=3)}
    check(dag, dag_plan(dag, specs, 3, recompute=recompute), steps_of(chain_batch, 3))


class Thinker(nn.Module):
    """Module that predicts its next input, and returns its states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.embed(ids).cumsum(1)
        for layer in self.layers:
            states = layer(states)
        logits = self.head(states[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return {"loss": losses.view(len(ids), -1).sum(1), "hidden": states, "unread": logits}


class Talker(nn.Module):
    """Module that reads the states of a thinker."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, states: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        logits = self.head(states)
        losses = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
        return losses.view(len(codes), -1).sum(1)


def talk_batch(size, seed):
    torch.manual_seed(6000 + seed)
    return {
        "ids": torch.randint(0, 11, (size, 7)), "codes": torch.randint(0, 6, (size, 7)),
        "count": torch.full((size,), 6),
    }


def talking() -> ModuleDag:
    torch.manual_seed(7)
    return ModuleDag({
        "thinker": DagLoss(
            Thinker(), reads="ids", divide_by="count",
            example_inputs={"ids": torch.randint(0, 11, (2, 7))},
        ),
        "talker": DagLoss(
            Talker(), reads="codes", inputs={"states": "thinker.hidden"}, weight=0.3,
        ),
    })


def test_a_talker_that_reads_a_thinkers_states():
    """Let the thinker compute a loss and be read, from its last stage."""
    dag = talking()
    plan = dag_plan(dag, {"thinker": ParallelSpec(pp=2), "talker": ParallelSpec(dp=2)}, 4)
    check(dag, plan, steps_of(talk_batch, 4))


def test_a_checkpoint_resumes_under_another_plan(tmp_path):
    dag = talking()
    steps = steps_of(talk_batch, 2)
    plan = dag_plan(dag, {"thinker": ParallelSpec(pp=2)}, 2)
    with ParallelModel(dag, plan, optimizer=OPTIMIZER, timeout_s=120) as running:
        running.train_step(steps[0])
        folder = CheckpointStore(tmp_path).save(running, {})
        running.train_step(steps[1])
        due = running.parameters()
    other = dag_plan(dag, {"talker": ParallelSpec(ranks=(0,)), "thinker": ParallelSpec(ranks=(0,))},
                     2)  # fmt: skip
    with ParallelModel(dag, other, optimizer=OPTIMIZER, timeout_s=120) as running:
        restore(running, folder)
        assert running.steps_taken == 1
        running.train_step(steps[1])
        for name, value in running.parameters().items():
            torch.testing.assert_close(value, due[name], rtol=1e-5, atol=1e-7)


def test_unsupported_graphs_are_rejected_by_name():
    """Check that this happens before any process starts."""
    dag = talking()
    with pytest.raises(PlanError, match="specs name \\['listener'\\]"):
        dag_plan(dag, {"listener": ParallelSpec()})
    with pytest.raises(PlanError, match="pp of 'talker' is 2, but it can be cut into at most 1"):
        dag_plan(dag, {"talker": ParallelSpec(pp=2)})
    with pytest.raises(PlanError, match="the model has a module 'thinker', the plan does not"):
        ParallelModel(dag, dag_plan(chained()))
    guessing = ModuleDag({
        "states": DagModule(States(), reads=("states", "length"), outputs="pooled"),
        "loss": DagLoss(MeanSquare(), inputs={"x": "states"}),
    })
    with pytest.raises(ProbeError, match="give example_inputs"):
        ParallelModel(guessing, dag_plan(guessing, {"states": ParallelSpec(pp=2)}))
    together = ModuleDag({
        "first": DagModule(Tower(5, 8), reads="x"),
        "loss": DagLoss(Compared(), inputs={"x": every("first")}),
    })
    with pytest.raises(ProbeError, match="'loss' reads every\\(\\) of 'first'"):
        ParallelModel(together, dag_plan(together, {"loss": ParallelSpec(pp=2)}))


class Compared(nn.Module):
    """Samples compared with the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, own: slice) -> torch.Tensor:
        return (self.layers(x)[own] - x.mean(0)).square().mean(1)


def test_unfit_batches_are_rejected_and_the_next_one_runs():
    dag = talking()
    plan = dag_plan(dag, {"talker": ParallelSpec(ranks=(0,)), "thinker": ParallelSpec(ranks=(0,))},
                    2)  # fmt: skip
    with ParallelModel(dag, plan, timeout_s=120) as running:
        with pytest.raises(DataError, match="a batch of 3 samples does not divide into 2"):
            running.execute(talk_batch(3, 0))
        with pytest.raises(DataError, match="a step has 3 microbatches; accepted: 1 to 2"):
            running.execute([talk_batch(2, 0)] * 3)
        batch = talk_batch(4, 0)
        whole = [{name: value[lo : lo + 2] for name, value in batch.items()} for lo in (0, 2)]
        assert running.execute(batch).loss == pytest.approx(step_loss(dag, whole).item(), rel=1e-6)
