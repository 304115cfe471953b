"""Interface of planners and mappings of other projects that raymm is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from raymm.errors import InputError

Problem = TypeVar("Problem")
Solution = TypeVar("Solution")


@dataclass(frozen=True)
class Baseline(Generic[Problem, Solution]):
    """Solver of another project for a problem that raymm solves.

    Attributes:
        solve: solves the problem that raymm's own solver gets, with a solution of the same kind;
            raises :class:`raymm.errors.InputError` if it has none.
    """

    name: str
    source: str
    solve: Callable[[Problem], Solution]


def solutions(
    baselines: Iterable[Baseline[Problem, Solution]], problem: Problem
) -> dict[str, Solution | str]:
    """Return each baseline's solution, or the reason why it has none, by name."""
    solved: dict[str, Solution | str] = {}
    for baseline in baselines:
        try:
            solved[baseline.name] = baseline.solve(problem)
        except InputError as error:
            solved[baseline.name] = str(error)
    return solved
