"""Kubernetes' quantities: ``500m``, ``16Gi``."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}


class QuantityError(ValueError):
    """No quantity."""


def quantity(value: Any) -> float:
    """A quantity as a number.

    Raises:
        QuantityError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([A-Za-z]*)", str(value))
    if match is None or match[2] not in _UNITS:
        raise QuantityError(f"{value!r} is not a quantity; accepted: 2, 500m, 16Gi")
    return float(match[1]) * _UNITS[match[2]]
