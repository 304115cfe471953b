"""Steps of unequal microbatches on stages that sleep, and their predictions."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.devices.sleeping_stages import Overheads, SleepingPipeline
from benchmarks.shared.common import local_ray
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.minibatch.step_choice import Groups, choose_step, given_groups, planned_step
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds

# A vision encoder of one stage and a language model of three, one per rank.
ENCODER_SECONDS, LANGUAGE_SECONDS, LANGUAGE_STAGES = 0.03, 0.03, 3
MICROBATCHES, SAMPLES, STEPS = 8, 32, 3
SCHEDULES = ("1f1b", "megatron", "mimo", "entrain", "dip", "optimus", "zero_bubble")


def _plan() -> Plan:
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * LANGUAGE_STAGES)),
        (("vision", "llm"),),
    )
    encoder, language = (
        LayerCost(seconds, seconds, seconds, 1000, 1000, 100)
        for seconds in (ENCODER_SECONDS, LANGUAGE_SECONDS)
    )
    profile = CostProfile({"vision": (encoder,), "llm": (language,) * LANGUAGE_STAGES})
    stages = (Stage("vision", 0, (0, 1), 0),) + tuple(
        Stage("llm", i, (i, i + 1), i + 1) for i in range(LANGUAGE_STAGES)
    )
    return Plan(graph, stages, MICROBATCHES, "1f1b", profile)


def _predicted(step: PlannedStep, overheads: Overheads) -> float:
    """Return the simulated seconds of a step with the overheads of instructions."""
    plan, program = step.plan, step.program
    nominal = op_seconds(plan)
    costs = overheads.added_to(nominal, program)
    per_microbatch = {
        (stage, op, number): seconds + nominal[stage, op] * (
            float(step.loads[stage.module][number]) - 1
        )
        for (stage, op), seconds in costs.items() for number in range(step.num_microbatches)
    }
    latency = overheads.latency
    return simulate(
        program, costs, latency, microbatch_costs=per_microbatch, posted=plan.posted_receives
    ).makespan


def emulated_errors() -> dict[str, float]:
    """Return the relative errors of predicted steps by schedule, and of the chosen program."""
    plan = _plan()
    draws = np.random.default_rng(5)
    work = {
        name: draws.lognormal(0.0, 0.6, SAMPLES) * MICROBATCHES / SAMPLES
        for name in ("vision", "llm")
    }
    in_order = given_groups(SAMPLES, MICROBATCHES)
    choice = choose_step(plan, work, ("zero_bubble", "entrain"))
    cases: dict[str, tuple[str, Groups]] = {name: (name, in_order) for name in SCHEDULES}
    cases["auto"] = choice.schedule, choice.groups
    errors = {}
    with local_ray(num_cpus=plan.num_ranks):
        pipeline = SleepingPipeline(plan.num_ranks)
        try:
            overheads = pipeline.overheads()
            for case, (schedule, groups) in cases.items():
                step = planned_step(replace(plan, schedule=schedule), work, groups)
                timelines = pipeline.run(step.plan, step.program, STEPS + 1, loads=step.loads)[1:]
                measured = statistics.median(timeline.makespan for timeline in timelines)
                errors[case] = _predicted(step, overheads) / measured - 1
        finally:
            pipeline.close()
    return errors
