"""Plan passes: functions of users that change a plan that raymm has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from raymm.errors import USER_CODE_RAISES, PlanError
from raymm.layout.plan_check import check_fits, differences
from raymm.packages import user_function
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.lower import full_program

ACCEPTED = "module:function, which returns a raymm.Plan for a raymm.Plan"


class PlanPass(Protocol):
    """Function that returns a changed plan, in ``planning.passes`` or
    ``raymm.PlanRequest(passes=...)``.

    Passes run in their order, after raymm has made a plan. The result must be a plan of the same
    modules and microbatches that fits in memory. It is saved with the names of its passes, and a
    resumed run keeps it if these names are the same. Otherwise the run plans again, and the passes
    run again.
    """

    def __call__(self, plan: Plan, /) -> Plan: ...


def pass_names(passes: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of passes, as ``module:function``."""
    return tuple(
        each if isinstance(each, str)
        else f"{each.__module__}:{getattr(each, '__qualname__', type(each).__qualname__)}"
        for each in passes
    )


def check_passes(passes: Sequence[Any]) -> None:
    """Raise a ConfigError, which names the field, for a pass that cannot be imported or called."""
    for number, each in enumerate(passes):
        user_function(_field(number), each, ACCEPTED)


def run_passes(plan: Plan, passes: Sequence[Any]) -> Plan:
    """Return a plan after its passes.

    Raises:
        ConfigError: see :func:`check_passes`.
        PlanError: a pass raises, or its result cannot run; names the field, the value and what is
            accepted.
    """
    for number, each in enumerate(passes):
        function = user_function(_field(number), each, ACCEPTED)
        try:
            changed = function(plan)
            _check(plan, changed)
        except USER_CODE_RAISES as error:
            kind = "" if isinstance(error, PlanError) else f"{type(error).__name__}: "
            raise PlanError(
                f"{_field(number)} is {pass_names([each])[0]!r}: {kind}{error}; accepted: "
                f"{ACCEPTED}, with the same modules and microbatches"
            ) from error
        plan = changed
    return replace(plan, passes=pass_names(passes))


def _check(plan: Plan, changed: Any) -> None:
    if not isinstance(changed, Plan):
        raise PlanError(f"it returned {type(changed).__name__}")
    if texts := differences(changed.graph, plan.graph):
        raise PlanError(f"its plan is for a different model: {'; '.join(texts)}")
    if changed.num_microbatches != plan.num_microbatches:
        raise PlanError(
            f"its plan has {changed.num_microbatches} microbatches, and the plan before it "
            f"{plan.num_microbatches}"
        )
    full_program(changed)
    check_fits(changed)


def _field(number: int) -> str:
    return f"planning.passes[{number}]"
