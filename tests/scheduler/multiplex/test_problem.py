"""Mapping problems: their tables and relations, and fields that are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from benchmarks.shared.mapping_instances import random_problem
from raymm.errors import PlanError
from raymm.scheduler.multiplex.problem import bits
from tests.support.mapping_problems import problems


def test_wrong_fields_are_refused() -> None:
    problem = random_problem(0, "parallel", 2, 2)
    with pytest.raises(PlanError, match="memory_over is 'day'; accepted: iteration, stage"):
        replace(problem, memory_over="day")
    with pytest.raises(PlanError, match="allowed has 1 entries; there are 2 modules"):
        replace(problem, allowed=((1,),))


@given(problems(most=4))
def test_relations_equal_a_search_of_paths(problem) -> None:
    count = len(problem.names)

    def precedes(a: int, b: int) -> bool:
        name = problem.names[a]
        return any(
            problem.names.index(end) == b or precedes(problem.names.index(end), b)
            for start, end in problem.edges if start == name
        )

    for m in range(count):
        earlier = {a for a in range(count) if precedes(a, m)}
        later = {b for b in range(count) if precedes(m, b)}
        assert set(bits(problem.ancestors[m])) == earlier
        assert set(bits(problem.related[m])) == earlier | later
    levels = [set(bits(level)) for level in problem.levels]
    assert sorted(m for level in levels for m in level) == list(range(count))
    for number, level in enumerate(levels):
        for m in level:
            before = set(bits(problem.ancestors[m]))
            assert all(before & earlier for earlier in levels[:number])
            assert not before & level


@given(problems(most=3, limits=(None, 3, 5)))
def test_tables_hold_the_samples_that_fit(problem) -> None:
    for m, surface in enumerate(problem.surfaces):
        for j, degree in enumerate(problem.degrees):
            assert problem.memory[m, j] == surface.memory_at(degree)
            fits = problem.memory_bytes is None or problem.memory[m, j] <= problem.memory_bytes
            for q in range(1, problem.steps + 1):
                expected = surface.seconds_at(degree, q, problem.steps) if fits else math.inf
                assert problem.seconds[m, j, q] == expected
                assert problem.bandwidth[m, q] == surface.bandwidth_at(q, problem.steps)


def test_impossible_problems_are_refused() -> None:
    problem = random_problem(0, "parallel", 2, 2)
    for changes, message in (
        ({"edges": (("m0", "x"),)}, "names module 'x'"),
        ({"edges": (("m0", "m1"), ("m1", "m0"))}, "edges have a cycle"),
        ({"surfaces": problem.surfaces[:1] * 2}, "must differ"),
        ({"surfaces": ()}, "accepted: 1 to 60"),
        ({"memory_bytes": 1}, "needs at least .* bytes on every GPU"),
        ({"edges": ("m0",)}, "must be a pair"),
    ):
        with pytest.raises(PlanError, match=message):
            replace(problem, **changes)
