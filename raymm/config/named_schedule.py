"""Schedules that a configuration or an option names."""

from __future__ import annotations

from raymm.errors import ConfigError, ModelError, PlanError
from raymm.packages import import_object
from raymm.scheduler.schedules.registry import register


def named_schedule(field: str, name: str) -> str:
    """Return a schedule's name. Import and register the custom schedule that ``module:name`` names,
    a class or an object.

    Raises:
        ConfigError: there is no such object.
        PlanError: the object is no schedule.
    """
    if ":" not in name:
        return name
    try:
        return register(import_object(name), name)
    except ModelError as error:
        raise ConfigError(f"{field}: {error}") from None
    except PlanError as error:
        raise PlanError(f"{field} is {name!r}: {error}") from None
