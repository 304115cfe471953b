"""Schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from raymm.errors import PlanError
from raymm.scheduler.schedules.base import Schedule
from raymm.scheduler.schedules.bigmac import BigMac
from raymm.scheduler.schedules.dip import Dip
from raymm.scheduler.schedules.entrain import Entrain
from raymm.scheduler.schedules.gpipe import GPipe
from raymm.scheduler.schedules.megatron import Megatron
from raymm.scheduler.schedules.mimo import MimoColocated, MimoNonColocated
from raymm.scheduler.schedules.one_f_one_b import OneFOneB
from raymm.scheduler.schedules.optimus import Optimus
from raymm.scheduler.schedules.slots import Slots
from raymm.scheduler.schedules.zero_bubble import ZeroBubble

_BUILT_IN: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (
        OneFOneB(), ZeroBubble(), GPipe(), Megatron(), MimoNonColocated(), MimoColocated(),
        Entrain(), Dip(), BigMac(), Optimus(), Slots(),
    )
}
SCHEDULES = tuple(name for name, schedule in _BUILT_IN.items() if not schedule.uses_slots)
"""Names of the built-in schedules of pipelines."""
DEFAULT_SCHEDULE = OneFOneB.name
_registered = dict(_BUILT_IN)

ScheduleChoice = str | Schedule | type[Schedule]
"""A name, or a custom schedule."""


def find_schedule(name: str) -> Schedule:
    """Return the schedule with a name. Raise ``PlanError`` if there is none."""
    schedule = _registered.get(name) if isinstance(name, str) else None
    if schedule is None:
        raise _unknown(name, _registered)
    return schedule


def pipeline_schedules() -> tuple[str, ...]:
    """Return the names of all schedules of pipelines, with registered ones."""
    return tuple(name for name, schedule in _registered.items() if not schedule.uses_slots)


def schedule_name(schedule: ScheduleChoice) -> str:
    """Return the name of a schedule for plans. A name must be known; an object or a class is
    registered.

    Raises:
        PlanError: there is no such schedule, or another schedule has its name.
    """
    if isinstance(schedule, Schedule | type):
        return register(schedule)
    find_schedule(schedule)
    return schedule


def pipeline_schedule(schedule: ScheduleChoice) -> str:
    """Return :func:`schedule_name` of a schedule of pipelines. Raise ``PlanError`` for another."""
    name = schedule if isinstance(schedule, str) else schedule_name(schedule)
    if name not in pipeline_schedules():
        raise _unknown(name, pipeline_schedules())
    return name


def _unknown(name: object, accepted: Iterable[str]) -> PlanError:
    return PlanError(
        f"schedule is {name!r}; accepted: {', '.join(accepted)}, or a custom one, as module:Class "
        "in a configuration or as an object in Python"
    )


def register(schedule: Schedule | type[Schedule], name: str | None = None) -> str:
    """Register a custom schedule for this process; return its name.

    Args:
        schedule: an object, or a class that is created without arguments.
        name: by default the schedule's ``name``, or else ``module:Class``.

    Raises:
        PlanError: ``schedule`` is no schedule, or a different one has the name.
    """
    kind = schedule if isinstance(schedule, type) else type(schedule)
    if not issubclass(kind, Schedule) or inspect.isabstract(kind):
        raise PlanError(
            f"schedule is {schedule!r:.80}; accepted: a subclass of raymm.Schedule that defines "
            "order, or an object of one"
        )
    path = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(schedule, type):
        try:
            schedule = schedule()
        except TypeError as error:
            raise PlanError(
                f"schedule {path} cannot be created without arguments: {error}; pass an object"
            ) from None
    name = name or schedule.name or path
    other = _registered.get(name, schedule)
    if other is not schedule and (name in _BUILT_IN or not _equal(other, schedule)):
        raise PlanError(
            f"schedule {path} has the name {name!r} of another schedule; set its attribute "
            "name to another one"
        )
    _registered[name] = schedule
    return name


def _equal(first: Schedule, second: Schedule) -> bool:
    """Return True if two schedules are objects of the same class with equal attributes. A class
    that a notebook defines again counts as the same."""
    kinds = [(type(s).__module__, type(s).__qualname__) for s in (first, second)]
    return kinds[0] == kinds[1] and vars(first) == vars(second)
