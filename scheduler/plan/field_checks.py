"""Checks of fields of plans that several of their makers need."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.errors import PlanError


def check_number(field: str, value: int, least: int = 1, most: int | None = None) -> None:
    """
    Args:
        field: its name, for errors.
        value: what is given.
        least: the smallest that is accepted.
        most: the largest, if there is one.

    Raises:
        PlanError: if a value is no whole number, or out of bounds. Plan files know whole
            numbers only, so a plan must not be made with another one.
    """
    if type(value) is not int or value < least:
        raise PlanError(f"{field} is {value!r}; it must be a whole number, at least {least}")
    if most is not None and value > most:
        raise PlanError(f"{field} is {str(value):.30}; it must be at most {most}")


def check_choices(field: str, chosen: Sequence[str], accepted: Sequence[str]) -> None:
    """
    Args:
        field: its name, for errors.
        chosen: what is given.
        accepted: what may be.

    Raises:
        PlanError: if something chosen is not accepted, or nothing is chosen.
    """
    for name in chosen:
        if name not in accepted:
            raise PlanError(f"{field} has {name!r}; accepted: {', '.join(accepted)}")
    if not chosen:
        raise PlanError(f"{field} is empty; accepted: {', '.join(accepted)}")
