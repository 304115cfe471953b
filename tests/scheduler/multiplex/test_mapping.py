"""Mappings: rejections with reasons, and the problem's own checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.multiplex.mapping import (
    Mapping,
    MultiplexStage,
    Placement,
    module_seconds,
    predicted_stage,
)
from raymm.scheduler.multiplex.problem import MappingProblem


def flat(name: str, seconds: float, memory: int = 4) -> ScalingSurface:
    """Return perfect scaling on up to 4 GPUs in quarters; memory falls with the degree."""
    return ScalingSurface(
        name, (1, 2, 4), (1, 2, 3, 4), 4,
        tuple(tuple(seconds * 4 / (d * q) for q in (1, 2, 3, 4)) for d in (1, 2, 4)),
        (memory, memory // 2, memory // 4), (0.2, 0.4, 0.6, 0.8),
    )


PROBLEM = MappingProblem(
    (flat("vision", 1.0), flat("audio", 2.0), flat("llm", 4.0)),
    (("vision", "llm"), ("audio", "llm")), 4, 4, 6, Interference(0.0, 0.5, 0.5),
)
ENCODERS = (Placement("vision", (0, 1), 1), Placement("audio", (1, 2, 3, 0)[1:3], 3))
LLM = (Placement("llm", (0, 1, 2, 3), 4),)


def mapping(*stages: tuple[Placement, ...], **fields) -> Mapping:
    return Mapping(
        PROBLEM.gpus, PROBLEM.steps, tuple(predicted_stage(PROBLEM, s) for s in stages), **fields
    )


def test_seconds_by_hand() -> None:
    made = mapping(ENCODERS, LLM)
    made.check(PROBLEM)
    # vision 1 / (2 * 1/4) and audio 2 / (2 * 3/4), both slowed down on none or one of their GPUs:
    # GPUs 0, 1 and 2, 3 are disjoint here.
    assert module_seconds(PROBLEM, ENCODERS) == pytest.approx([2.0, 2 / 1.5])
    assert made.seconds == pytest.approx(2.0 + 1.0)
    shared = (Placement("vision", (0, 1), 1), Placement("audio", (1, 2), 3))
    slower = 1 + 0.5 * (0.2 + 0.6) + 0.5 * 0.2 * 0.6
    assert module_seconds(PROBLEM, shared) == pytest.approx([2 * slower, 2 / 1.5 * slower])


@pytest.mark.parametrize(("stages", "words"), [
    (((Placement("vision", (0,), 3), Placement("audio", (0,), 2)), LLM),
     r"stages\[0\].placements: quotas on GPU 0 add up to 5; accepted: at most 4"),
    (((Placement("vision", (0,), 0),), LLM), r"quota of 'vision' is 0.*granularity, 1/4"),
    (((Placement("vision", (0,), 0.5),), LLM), r"quota of 'vision' is 0.5.*whole number"),
    (((Placement("vision", (0, 1, 2), 1),), LLM), "has 3 GPUs; accepted: a power of two"),
    (((Placement("vision", (1, 0), 1),), LLM), r"gpus of 'vision' is \[1, 0\].*ascending"),
    (((Placement("vision", (4,), 1),), LLM), "gpus of 'vision' is 4.*from 0 to 3"),
    (((Placement("vision", (), 1),), LLM), "at least one GPU"),
    (((Placement("vision", (0,), 1), Placement("vision", (1,), 1)), LLM), "a second time"),
    (((Placement("vision", (0,), 1, 2),), LLM), "slices is 2.*from 1 to 1"),
    (((), LLM), r"stages\[0\].placements is empty"),
    ((), "stages is empty"),
])
def test_impossible_mappings_are_refused(stages, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Mapping(4, 4, tuple(MultiplexStage(stage, 1.0) for stage in stages))


@pytest.mark.parametrize(("stages", "words"), [
    ((LLM, ENCODERS), "'llm', which depends on 'vision'.*earlier stage"),
    (((*ENCODERS[:1], Placement("llm", (3,), 1)), ENCODERS[1:]), "depends on 'vision'"),
    ((ENCODERS,), r"do not complete \['llm'\]"),
    ((ENCODERS, ENCODERS[:1], LLM), "'vision', which is already complete"),
    (((*ENCODERS, ), (Placement("text", (0,), 1),)), "module is 'text'; modules are"),
    (((Placement("vision", (0,), 1), Placement("audio", (0,), 3)), LLM),
     "needs 8 bytes on GPU 0; accepted: at most memory_bytes, 6"),
])
def test_mappings_of_another_problem_are_refused(stages, words: str) -> None:
    made = Mapping(4, 4, tuple(MultiplexStage(stage, 1.0) for stage in stages))
    with pytest.raises(PlanError, match=words):
        made.check(PROBLEM)


def test_other_seconds_or_pools_are_refused() -> None:
    made = mapping(ENCODERS, LLM)
    wrong = replace(made, stages=(replace(made.stages[0], seconds=1.9), made.stages[1]))
    with pytest.raises(PlanError, match=r"stages\[0\].seconds is 1.9; the model predicts 2.0"):
        wrong.check(PROBLEM)
    with pytest.raises(PlanError, match="gpus is 8; the problem has 4"):
        replace(made, gpus=8).check(PROBLEM)


def test_slices_add_up_and_dependencies_hold_between_them() -> None:
    half = (Placement("vision", (0, 1), 4, 1), Placement("audio", (2, 3), 4, 2))
    stages = [half, (Placement("vision", (0, 1, 2, 3), 4, 1),),
              (Placement("llm", (0, 1, 2, 3), 4, 2),)]
    made = Mapping(4, 4, tuple(predicted_stage(PROBLEM, s, 2) for s in stages), slices=2)
    made.check(PROBLEM)
    assert made.seconds == pytest.approx(1.0 + 0.125 + 1.0)
    early = Mapping(
        4, 4, tuple(predicted_stage(PROBLEM, s, 2) for s in (stages[0], stages[2], stages[1])),
        slices=2,
    )
    with pytest.raises(PlanError, match="depends on 'vision'; that must be complete"):
        early.check(PROBLEM)


def test_gap() -> None:
    made = mapping(ENCODERS, LLM, bound=2.4, method="test")
    assert made.gap == pytest.approx(0.2) and not made.optimal
    assert replace(made, bound=made.seconds).optimal


@pytest.mark.parametrize(("field", "value", "words"), [
    ("gpus", 0, "gpus is 0"), ("steps", "4", "steps is '4'"), ("bound", -1, "bound is -1"),
    ("method", "", "method is ''"),
    ("stages", (MultiplexStage((Placement("m", ("0",), 1),), 1.0),),  # type: ignore[arg-type]
     "gpus of 'm' is '0'.*whole number"),
])
def test_fields_that_do_not_fit_are_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(mapping(ENCODERS, LLM), **{field: value})


def test_problems_that_cannot_be_mapped_are_refused() -> None:
    with pytest.raises(PlanError, match="memory_bytes is 6, but module 'big'.*least 10"):
        MappingProblem((flat("big", 1.0, 40),), (), 4, 4, 6)
    with pytest.raises(PlanError, match="'big' needs at least 40"):
        MappingProblem((flat("big", 1.0, 40),), (), 1, 4, 6)
    two = (flat("a", 1.0), flat("b", 1.0))
    with pytest.raises(PlanError, match="edges have a cycle"):
        MappingProblem(two, (("a", "b"), ("b", "a")), 4, 4)
    with pytest.raises(PlanError, match=r"edges\[0\] names module 'c'"):
        MappingProblem(two, (("a", "c"),), 4, 4)
    with pytest.raises(PlanError, match="name must differ"):
        MappingProblem(two[:1] * 2, (), 4, 4)
    with pytest.raises(PlanError, match="accepted: 1 to 60"):
        MappingProblem((), (), 4, 4)
    coarse = replace(two[0], degrees=(3, 5, 6))
    with pytest.raises(PlanError, match=r"a was sampled at degrees \(3, 5, 6\)"):
        MappingProblem((coarse,), (), 2, 4)


def test_tables_and_levels() -> None:
    assert PROBLEM.seconds.shape == (3, 3, 5)
    assert np.isinf(PROBLEM.seconds[:, :, 0]).all()
    assert PROBLEM.seconds[1, 1, 2] == pytest.approx(2.0)
    assert PROBLEM.ancestors == (0, 0, 0b11)
    assert PROBLEM.related == (0b100, 0b100, 0b11)
    assert PROBLEM.levels == (0b011, 0b100)
