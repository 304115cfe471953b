"""Overlap of modules by the spans of an account."""

from __future__ import annotations

from raymm.actors.quota import Account


def most_sms(account: Account) -> int:
    """Return the largest number of multiprocessors in use at one time."""
    spans = account.spans
    return max(
        first.partition.sms + sum(
            other.partition.sms for other in spans
            if other is not first and other.start <= first.start < other.end
        )
        for first in spans
    )


def seconds_together(account: Account, first: str, second: str) -> float:
    """Return the seconds in which two modules ran at the same time."""
    return sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start))
        for a in account.spans
        if a.partition.module == first
        for b in account.spans
        if b.partition.module == second
    )
