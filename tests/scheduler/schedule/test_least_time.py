"""Bounds and zero-bubble schedules compared with the least time of any schedule.

OR-tools finds it: every task is an interval, ranks do not overlap, activations stay within limits.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.bounds import lower_bound
from raymm.scheduler.schedule.lower import full_program, one_f_one_b_limits, refine
from raymm.scheduler.schedule.memory import activation_peaks
from raymm.scheduler.schedule.stage_costs import stage_costs
from raymm.scheduler.schedule.step_graph import active_stages, full_step
from tests.support.random_plans import profiled_plans

SLOW_S = 20.0


class _Least:
    """Model of a step whose seconds are whole numbers."""

    def __init__(self, plan: Plan, limits: tuple[int, ...], within: int) -> None:
        self.model, self.within = cp_model.CpModel(), within
        self.end = self.model.new_int_var(0, within, "end")
        self.tasks: dict[tuple[object, int, str], tuple] = {}
        self.of_rank: list[list] = [[] for _ in limits]
        self.held: list[list] = [[] for _ in limits]
        active = active_stages(plan, full_step(plan))
        for microbatch, one in enumerate(active):
            for stage in plan.stages:
                if stage.id in one.stages:
                    self._add(plan, stage, microbatch, one)
        for (name, microbatch, kind), (start, _) in self.tasks.items():
            stage = plan.by_id[name]
            for producer in plan.stage_producers[name]:
                if kind == "F" and (producer, microbatch, "F") in self.tasks:
                    self.model.add(start >= self.tasks[producer, microbatch, "F"][1])
                if kind == "B" and (producer, microbatch, "B") in self.tasks:
                    self.model.add(self.tasks[producer, microbatch, "B"][0]
                                   >= self.tasks[name, microbatch, "B"][1])
            earlier = [m for (n, m, k) in self.tasks if (n, k) == (name, kind) and m < microbatch]
            if earlier:  # messages of an edge keep their order
                self.model.add(start >= self.tasks[stage.id, max(earlier), kind][1])
        for intervals in self.of_rank:
            self.model.add_no_overlap(intervals)
        for held, limit in zip(self.held, limits, strict=True):
            self.model.add_cumulative([i for i, _ in held], [size for _, size in held], limit)
        self.model.minimize(self.end)

    def _add(self, plan, stage, microbatch, one) -> None:
        cost, rank = stage_costs(plan)[stage.id], stage.rank

        def task(kind: str, seconds: float, after=None):
            start = self.model.new_int_var(0, self.within, "")
            end = self.model.new_int_var(0, self.within, "")
            interval = self.model.new_interval_var(start, int(seconds), end, "")
            self.of_rank[rank].append(interval)
            self.model.add(end <= self.end)
            if after is not None:
                self.model.add(start >= after[1])
            self.tasks[stage.id, microbatch, kind] = start, end
            return start, end

        last = forward = task("F", cost.forward)
        if stage.id not in one.needs_backward:
            return
        if stage.recompute:
            last = again = task("R", cost.forward, forward)
        if plan.trainable(stage) and stage.id in one.needs_input_grad:
            last = task("W", cost.backward_weight, task("B", cost.backward_input, last))
        else:
            last = task("B", cost.backward_input + cost.backward_weight, last)
        kept = cost.input_bytes if stage.recompute else cost.activation_bytes
        spans = [(forward, kept), (again, cost.activation_bytes)] if stage.recompute else [
            (forward, kept)]
        for (start, _), size in spans:
            length = self.model.new_int_var(0, self.within, "")
            interval = self.model.new_interval_var(start, length, last[1], "")
            self.held[rank].append((interval, size))

    def seconds(self) -> tuple[float, bool]:
        """Return the least feasible seconds found, and True if they are optimal."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = SLOW_S
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return solver.objective_value, status == cp_model.OPTIMAL


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_least_time_is_between_bound_and_schedule(data: st.DataObject) -> None:
    plan = data.draw(profiled_plans().filter(lambda plan: len(plan.stages) <= 8))
    plan = replace(plan, num_microbatches=min(plan.num_microbatches, 4), schedule="zero_bubble")
    sizes = stage_costs(plan)
    baseline = full_program(replace(plan, schedule="1f1b"))
    limits = one_f_one_b_limits(plan, baseline, sizes)
    if data.draw(st.booleans()):
        peaks = activation_peaks(baseline, sizes)
        limits = tuple(map(min, zip(limits, peaks, strict=True)))
    # 1F1B itself may temporarily need more, for no microbatch, than the limits leave.
    work = sum(cost.forward * 2 + cost.backward_input + cost.backward_weight
               for cost in sizes.values())
    bound = lower_bound(plan, None, dict(enumerate(limits)))
    _, seconds = refine(plan)
    least, optimal = _Least(plan, limits, int(work * plan.num_microbatches) + 1).seconds()
    if optimal:
        assert bound <= least + 1e-6
        assert least <= seconds + 1e-6 or limits != one_f_one_b_limits(plan, baseline, sizes)
