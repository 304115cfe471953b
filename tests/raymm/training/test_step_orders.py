"""Orders per batch on actors equal one process, use real sizes, and are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import raymm
from raymm.data import DataConfig
from raymm.errors import ModelError, PlanError
from raymm.layout.plan_check import chosen_per_batch
from raymm.monitor.throughput import count_flops
from raymm.planning.request import PlanRequest
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.plan.plan import Plan
from raymm.training.run_batches import Batch
from raymm.training.step_orders import (
    EXPECTED,
    ExpectedSteps,
    StepOrders,
    step_orders,
)
from tests.parity.test_schedules import vision_and_llm
from tests.parity.test_vlms_on_ray import MAX_NORM, whole
from tests.parity.test_vlms_on_ray import OPTIMIZER as VLM_OPTIMIZER
from tests.support import parity_models as pm
from tests.support.multiplex_models import gradient_problems
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of
from tests.support.trainer_groups import trainer_groups

SCHEDULES = ("1f1b", "zero_bubble", "gpipe")
# Steps whose microbatches differ in text and images.
STEPS = [
    [
        pm.batch([6], 5, vision=[0, 0, 0]), pm.batch([14, 9], 4), pm.batch([3], 3, vision=[0]),
        pm.batch([12, 13], 6, vision=[1]),
    ],
    [
        pm.batch([2], 8, vision=[0, 0]), pm.batch([15, 15], 7), pm.batch([8], 9, vision=[0]),
        pm.batch([4, 5], 10),
    ],
]


class Ordered:
    """Parallel model whose steps take the orders of a run."""

    def __init__(self, parallel: ParallelModel, orders: StepOrders) -> None:
        self._parallel, self._orders = parallel, orders
        self.choices: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parallel, name)

    def _submit(self, batch: Any, update: bool) -> Any:
        parts, meta = self._parallel.prepare(batch)
        ordered = self._orders.ordered(Batch(parts, meta, None, (), None))
        self.choices.append(ordered.choice)
        return self._parallel.submit(
            (ordered.parts, ordered.meta), update=update, schedule=ordered.choice.schedule
        ).result()

    def execute(self, batch: Any) -> Any:
        return self._submit(batch, update=False)

    def train_step(self, batch: Any) -> Any:
        return self._submit(batch, update=True)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Plan]:
    model = vision_and_llm()
    plan = raymm.plan(
        model, ranks=3, microbatches=4, microbatch=STEPS[0][3], device="H100", dtype="fp32",
        schedules=SCHEDULES, per_batch=True,
    ).plan
    assert set(plan.step_schedules) == set(SCHEDULES)
    return model, plan


def test_steps_of_a_model_by_parts_equal_one_process(parts, ray_cluster) -> None:
    model, plan = parts
    oracle = oracle_of(model)
    orders = step_orders(plan, model, STEPS, False, False)
    with ParallelModel(model, plan, optimizer=OPTIMIZER) as parallel:
        ordered = Ordered(parallel, orders)
        check_gradients(ordered, oracle, *STEPS)  # type: ignore[arg-type]
        check_training(ordered, oracle, [[STEPS[0]], STEPS, [STEPS[1]]])  # type: ignore[arg-type]
        assert len(parallel._programs) <= 2 * len(STEPS) * len(SCHEDULES)
    assert any(choice.order != (0, 1, 2, 3) for choice in ordered.choices)
    assert [c.order for c in ordered.choices] == [
        orders.choose(parallel.prepare(step)[1]).order
        for step in (*STEPS, STEPS[0], *STEPS, STEPS[1])
    ]


def test_steps_of_a_vlm_folder_equal_its_own_forward(tmp_path, ray_cluster) -> None:
    made, microbatches = whole("LlavaForConditionalGeneration")
    made.materialize().save_pretrained(tmp_path / "folder")
    model = raymm.from_pretrained(tmp_path / "folder", microbatches[0])
    step = [microbatches[-1], *microbatches]
    plan = raymm.plan(
        model, ranks=3, microbatches=len(step), microbatch=step[1], device="H100", dtype="fp32",
        schedules=SCHEDULES, per_batch=True,
    ).plan
    reference = model.materialize()
    trained = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(
        trainer_groups(reference, VLM_OPTIMIZER.weight_decay), lr=VLM_OPTIMIZER.lr,
        betas=VLM_OPTIMIZER.betas, eps=VLM_OPTIMIZER.eps,
    )
    with ParallelModel(model, plan, optimizer=VLM_OPTIMIZER) as parallel:
        ordered = Ordered(parallel, step_orders(plan, model, [step], False, False))
        for update in range(3):
            optimizer.zero_grad()
            loss = model.loss(step)
            loss.backward()
            if not update:
                assert ordered.execute(step).loss == pytest.approx(loss.item(), rel=1e-6)
                due = {name: p.grad for name, p in trained.items()}
                assert gradient_problems(parallel.gradients(), due) == []
                parallel.zero_grad()
            torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
            optimizer.step()
            assert ordered.train_step(step).loss == pytest.approx(loss.item(), rel=1e-5)
        after = parallel.parameters()
    assert any(choice.order != tuple(range(len(step))) for choice in ordered.choices)
    for name, parameter in trained.items():
        moved = (parameter.detach() - before[name]).norm()
        assert (after[name] - parameter.detach()).norm() <= 1e-3 * moved + 1e-8, name


def meta_of(model: Any, plan: Plan, step: Any) -> Any:
    from raymm.batch.batches import batches_of

    return batches_of(model, plan, None, {}).prepare(step)[1]


def test_loads_are_those_of_the_profile(parts) -> None:
    """The profile is that of a microbatch with two rows of 13 tokens and an image of 4 tokens."""
    model, plan = parts
    orders = StepOrders(plan, model, count_flops(model), SCHEDULES)
    same = orders.loads(meta_of(model, plan, [STEPS[0][3]] * 4))
    assert all(load == pytest.approx(np.ones(4)) for load in same.values())
    loads = orders.loads(meta_of(model, plan, STEPS[0]))
    assert loads["vision"].tolist() == pytest.approx([3, 0, 1, 1])
    # Microbatch 1 pads to 14 tokens twice, microbatch 2 has 3 tokens and an image.
    assert loads["llm"][2] < 0.35 < 0.8 < loads["llm"][1] < 1


def test_expected_seconds_are_summed_over_steps(parts) -> None:
    model, plan = parts
    orders = StepOrders(plan, model, count_flops(model), SCHEDULES)
    expected = ExpectedSteps(plan, model, lambda: orders.flops, orders)
    rows = []
    for number, step in enumerate(STEPS, start=1):
        meta = meta_of(model, plan, step)
        choice = orders.choose(meta)
        rows.append({"step": number, **expected.after_step(meta, choice, due=False)})
        seconds = rows[-1][EXPECTED]
        assert seconds["plan"] >= seconds["per_batch"] >= seconds["bound"] * 0.999 > 0
    line = expected.line([{"step": 0, "heldout_loss": 1.0}, *rows])
    assert line is not None and line.startswith("expected seconds of 2 steps: ")
    total = sum(row[EXPECTED]["per_batch"] for row in rows)
    assert f"{total:.3g} with planning.per_batch" in line
    assert expected.line([{"step": 1}]) is None


def test_a_run_reports_orders_that_it_does_not_take(parts, monkeypatch) -> None:
    model, plan = parts
    plan, meta = replace(plan, step_schedules=()), meta_of(model, plan, STEPS[0])
    slow = ExpectedSteps(plan, model, lambda: count_flops(model), None)
    assert slow.after_step(meta, None, due=True) == {}  # it would take most of the time
    monkeypatch.setattr("raymm.training.step_orders.SHARE", float("inf"))
    expected = ExpectedSteps(plan, model, lambda: count_flops(model), None)
    assert expected.after_step(meta, None, due=False) == {}
    seconds = expected.after_step(meta, None, due=True)[EXPECTED]
    assert seconds["plan"] > seconds["per_batch"] >= seconds["bound"] * 0.999
    assert ExpectedSteps(plan, model, lambda: None, None).after_step(meta, None, due=True) == {}


def test_a_plan_without_a_profile_has_no_expected_seconds(parts) -> None:
    model, plan = parts
    plan = replace(plan, profile=None, step_schedules=())
    expected = ExpectedSteps(plan, model, lambda: count_flops(model), None)
    assert expected.after_step(meta_of(model, plan, STEPS[0]), None, due=True) == {}


def test_what_cannot_be_ordered_is_refused_by_name(parts) -> None:
    model, plan = parts
    rebalanced = DataConfig.model_validate({
        "train": "rows.jsonl", "tokenizer": "folder", "batch_size": 4, "microbatches": 4,
        "batching": {"method": "balanced", "rebalance": {}},
    })
    with pytest.raises(PlanError, match="per_batch is true, and data.batching.rebalance is given"):
        step_orders(plan, model, rebalanced, False, False)
    with pytest.raises(PlanError, match="per_batch is true, and cache.features is given"):
        step_orders(plan, model, STEPS, False, True)
    profile = plan.profile
    assert profile is not None
    without = replace(plan, profile=replace(profile, tokens={}))
    with pytest.raises(PlanError, match="profile has no tokens of .*'llm', 'vision'"):
        step_orders(without, model, STEPS, False, False)
    with pytest.raises(PlanError, match="planning.per_batch is True, and parallel.style 'auto'"):
        PlanRequest(style="auto", per_batch=True).check(model)
    with pytest.raises(PlanError, match="per_batch is true, and cache.features is given"):
        PlanRequest(keeps_features=True, per_batch=True).check(model)
    with pytest.raises(PlanError, match="it has no profile"):
        chosen_per_batch(replace(plan, profile=None), SCHEDULES)
    graph = raymm.ModuleDag({
        "one": raymm.DagModule(torch.nn.Linear(4, 3), reads={"input": "x"}),
        "loss": raymm.DagLoss(torch.nn.Identity(), inputs={"input": "one"}),
    })
    with pytest.raises(ModelError, match="planning.per_batch is true"):
        step_orders(plan, graph, STEPS, False, False)


def test_compiled_blocks_exclude_schedules_that_split_the_backward(parts) -> None:
    model, plan = parts
    plan = replace(plan, schedule="1f1b", policy=None, activation_limits=None)
    orders = step_orders(plan, model, STEPS, True, False)
    assert set(orders._chooser._plans) == {"1f1b", "gpipe"}


