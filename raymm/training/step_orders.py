"""Order of the microbatches and schedule of each step by the real sizes of its samples, and what a
fixed plan loses (``planning.per_batch``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raymm.costs.step_flops import StepFlops, VlmStepFlops, count_flops
from raymm.data import DataConfig, MicrobatchMeta, local_steps
from raymm.errors import PlanError
from raymm.layout.plan_check import chosen_per_batch
from raymm.model.features import PLANS_PER_BATCH
from raymm.model.model import Model
from raymm.plural import plural
from raymm.scheduler.minibatch.step_choice import OrderChooser, StepOrder
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedules.registry import find_schedule
from raymm.scheduler.search.options import SEARCHED_SCHEDULES
from raymm.training.run_batches import Batch

# Entry of a metrics row, with expected seconds of its step by plan.
EXPECTED = "expected_step_s"
FIXED, PER_BATCH, BOUND = "plan", "per_batch", "bound"
# Estimated seconds of a first choice per stage and microbatch, in Python, and most share of a run's
# time for choices that it does not take.
SECONDS_PER_TASK = 1e-3
SHARE = 0.01
# Least load of a microbatch with input for a module.
LEAST_LOAD = 1e-9


class StepOrders:
    """Orders of a run's steps. They follow from the plan and the sizes of a step, so a run that
    resumes or recovers takes the same.

    Args:
        plan: plan with a profile, whose costs are those of a microbatch with load 1.
        flops: counts the work of a microbatch.
        schedules: names to choose from.

    Raises:
        PlanError: the plan's microbatches have no separate seconds, or its profile no tokens.
    """

    def __init__(
        self, plan: Plan, model: Model, flops: StepFlops | VlmStepFlops, schedules: Sequence[str]
    ) -> None:
        self._chooser = OrderChooser(plan, schedules)
        assert plan.profile is not None  # the chooser needs it
        names = [node.name for node in plan.graph.nodes]
        if lacking := sorted(set(names) - set(plan.profile.tokens)):
            raise PlanError(
                f"the plan's profile has no tokens of {lacking}; accepted: plans that raymm makes"
            )
        self.flops, self._profile, self._names = flops, plan.profile, names
        self._packed, self._text = model.packing, model.text_module
        self._chooser.choose({name: np.ones(plan.num_microbatches) for name in names})

    def loads(self, meta: Sequence[MicrobatchMeta]) -> dict[str, np.ndarray]:
        """Return the (M,) load of each microbatch by module.

        FLOPs relate the microbatches of the step to each other, with the attention of every row;
        tokens relate their mean to the microbatch of the profile.
        """
        padded = meta if self._packed else [  # padding takes as long as text
            replace(m, lengths=(max(m.lengths, default=0),) * len(m.lengths)) for m in meta
        ]
        flops = [self.flops.of([microbatch]) for microbatch in padded]
        tokens = [self.flops.tokens(microbatch) for microbatch in meta]
        result = {}
        for name in self._names:
            present = np.array([name == self._text or name in m.items for m in meta])
            work, counts = (
                np.array([by_module.get(name, 0.0) for by_module in values])
                for values in (flops, tokens)
            )
            load = np.zeros(len(meta))
            if work[present].any():
                fixed = self._profile.fixed.get(name, 0.0)
                planned = self._profile.tokens[name] * work[present].mean()
                load = fixed + (1 - fixed) * work * counts[present].mean() / planned
            result[name] = np.where(present, np.maximum(load, LEAST_LOAD), 0.0)
        return result

    def choose(self, meta: Sequence[MicrobatchMeta]) -> StepOrder:
        """Choose the order and the schedule of a step."""
        return self._chooser.choose(self.loads(meta))

    def ordered(self, batch: Batch) -> Batch:
        """Return a batch in the chosen order, with its schedule."""
        choice = self.choose(batch.meta)
        return replace(
            batch, parts=[batch.parts[number] for number in choice.order],
            meta=[batch.meta[number] for number in choice.order], choice=choice,
        )


def step_orders(
    plan: Plan, model: Model, data: Any, compiled: bool, keeps_features: bool
) -> StepOrders:
    """Return the orders of a run whose plan has ``step_schedules``. Raise the errors of
    :class:`StepOrders`, and for what a run cannot choose per batch, before its processes start.

    Args:
        data: a :class:`DataConfig`, whose first step is tried, or batches in memory.
        compiled: True if blocks are compiled, which excludes schedules that split the backward.
        keeps_features: True if features of frozen encoders are cached.
    """
    model.require(PLANS_PER_BATCH, "planning.per_batch is true")
    if keeps_features:
        raise PlanError(
            "planning.per_batch is true, and cache.features is given; accepted: one of both"
        )
    if isinstance(data, DataConfig) and data.batching.rebalance is not None:
        raise PlanError(
            "planning.per_batch is true, and data.batching.rebalance is given, which fits costs by "
            "the order of the data; accepted: one of both"
        )
    schedules = [
        name for name in plan.step_schedules
        if not (compiled and find_schedule(name).splits_backward)
    ]
    try:
        orders = StepOrders(plan, model, count_flops(model), schedules)
        if isinstance(data, DataConfig):
            for step in local_steps(data, steps=1):
                orders.choose(step.meta)
    except PlanError as error:
        raise PlanError(f"planning.per_batch is true, and {error}") from None
    return orders


class ExpectedSteps:
    """Expected seconds of steps under the plan, with the order and schedule of each step chosen by
    its sizes, and for the best possible order.

    Args:
        flops: returns what counts the work of a microbatch; None if the model's cannot be counted.
        orders: orders of the run; None if it takes those of the data.
    """

    def __init__(
        self, plan: Plan, model: Model, flops: Callable[[], StepFlops | VlmStepFlops | None],
        orders: StepOrders | None,
    ) -> None:
        self._plan, self._model, self._flops = plan, model, flops
        self._orders = orders
        self._began, self._spent = time.monotonic(), 0.0
        stages = math.inf if plan.profile is None else len(plan.stages)
        self._next = SECONDS_PER_TASK * stages * plan.num_microbatches

    def after_step(
        self, meta: Sequence[MicrobatchMeta], choice: StepOrder | None, due: bool
    ) -> dict[str, Any]:
        """Return a step's entry for ``metrics.jsonl``, see :data:`EXPECTED`.

        Args:
            choice: of the step, if the run takes it.
            due: True to choose an order that the run does not take, if that is quick enough.
        """
        if choice is None and due:
            choice = self._not_taken(meta)
        if choice is None:
            return {}
        seconds = {
            FIXED: choice.fixed_seconds, PER_BATCH: choice.seconds, BOUND: choice.bound
        }
        return {EXPECTED: {name: float(f"{value:.4g}") for name, value in seconds.items()}}

    def _not_taken(self, meta: Sequence[MicrobatchMeta]) -> StepOrder | None:
        began = time.monotonic()
        if self._spent + self._next > SHARE * (began - self._began):
            return None
        try:
            if self._orders is None:
                flops = self._flops()
                if flops is None:
                    self._spent = math.inf
                    return None
                schedules = chosen_per_batch(self._plan, SEARCHED_SCHEDULES).step_schedules
                self._orders = StepOrders(self._plan, self._model, flops, schedules)
            return self._orders.choose(meta)
        except PlanError:  # such plans, or steps, cannot be ordered by sizes
            self._spent = math.inf
            return None
        finally:
            self._next = time.monotonic() - began
            self._spent += self._next

    def line(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a line with the sums of :data:`EXPECTED` over the steps of a run that have it;
        None if none has."""
        expected = [row[EXPECTED] for row in rows if EXPECTED in row]
        if not expected:
            return None
        fixed, chosen, bound = (
            sum(row[name] for row in expected) for name in (FIXED, PER_BATCH, BOUND)
        )
        return (
            f"expected seconds of {plural(len(expected), 'step')}: {fixed:.3g} under the plan, "
            f"{chosen:.3g} with planning.per_batch, at least {bound:.3g} in any order: a fixed "
            f"plan takes {fixed / chosen - 1:.1%} longer"
        )
