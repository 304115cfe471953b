"""Checks of plan fields that several modules use."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.errors import PlanError


def check_number(field: str, value: int, least: int = 1, most: int | None = None) -> None:
    """Raise ``PlanError`` unless ``value`` is a whole number in bounds. Plan files hold whole
    numbers only, so plans must not be made with other types."""
    if type(value) is not int or value < least:
        raise PlanError(f"{field} is {value!r}; it must be a whole number, at least {least}")
    if most is not None and value > most:
        raise PlanError(f"{field} is {str(value):.30}; it must be at most {most}")


def check_choices(field: str, chosen: Sequence[str], accepted: Sequence[str]) -> None:
    """Raise ``PlanError`` unless ``chosen`` is a non-empty sequence of accepted names."""
    for name in chosen:
        if name not in accepted:
            raise PlanError(f"{field} has {name!r}; accepted: {', '.join(accepted)}")
    if not chosen:
        raise PlanError(f"{field} is empty; accepted: {', '.join(accepted)}")
