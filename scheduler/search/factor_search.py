"""Search for the number of microbatches that share a forward of an encoder.

A larger factor divides the fixed seconds of a forward by more microbatches
(:attr:`~raymm.scheduler.costs.layer_costs.CostProfile.fixed`), holds the activations of all of
them, and delays the first message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raymm.errors import PlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.progress.search_control import SearchControl
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import Option, evaluate


def with_factor(plan: Plan, module: str, factor: int) -> Plan:
    """Return a plan with another ``microbatch_factor`` of a module; raise ``PlanError`` if the
    module, its layout or the schedule does not support it."""
    return replace(plan, stages=tuple(
        replace(stage, microbatch_factor=factor) if stage.module == module else stage
        for stage in plan.stages
    ))


def search_factors(
    option: Option, network: Network, modules: Sequence[str], control: SearchControl
) -> Option:
    """Return the fastest option that fits in memory. The factor of one module at a time is changed
    to another power of two, until no such change is faster.

    Args:
        modules: modules that may share forwards.
    """
    best, improved = option, True
    while improved:
        improved = False
        for module in modules:
            for plan in _plans(best.plan, module):
                if control.should_stop():
                    return best
                tried, unfit = evaluate(plan, network, option.layout)
                if unfit is None and tried.seconds < best.seconds:
                    best, improved = tried, True
    return best


def _plans(plan: Plan, module: str) -> Iterator[Plan]:
    """Yield the plan with all other factors of a module that it supports."""
    now, factor = plan.module_stages(module)[0].microbatch_factor, 1
    while factor <= plan.num_microbatches:
        if factor != now:
            try:
                yield with_factor(plan, module, factor)
            except PlanError:
                return
        factor *= 2
