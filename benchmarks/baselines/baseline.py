"""The interface of planners and mappings of other projects that raymm is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from raymm.errors import InputError

Problem = TypeVar("Problem")
Solution = TypeVar("Solution")


@dataclass(frozen=True)
class Baseline(Generic[Problem, Solution]):
    """A way to solve what raymm solves, as somebody else does.

    Attributes:
        name: what tables call it.
        source: whose it is, or where it is published.
        solve: from the problem that raymm's own solver gets to a solution of the same kind;
            raises an :class:`raymm.errors.InputError` where it has none.
    """

    name: str
    source: str
    solve: Callable[[Problem], Solution]


def solutions(
    baselines: Iterable[Baseline[Problem, Solution]], problem: Problem
) -> dict[str, Solution | str]:
    """Per baseline's name its solution, or why it has none."""
    solved: dict[str, Solution | str] = {}
    for baseline in baselines:
        try:
            solved[baseline.name] = baseline.solve(problem)
        except InputError as error:
            solved[baseline.name] = str(error)
    return solved
