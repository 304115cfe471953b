"""Losses by source of a step, compared with sums over the parts of all processes."""

import pytest

from raymm.actors.executor.step_meta import StepResult
from raymm.runtime.parallel_module import grad_norm, source_losses


def result(**parts):
    return StepResult(
        by_source={("llm", int(name[1:])): sums for name, sums in parts.items()}
    )


def test_means_are_over_the_labels_of_all_parts():
    parts = [result(m1={0: (1.0, 2), 3: (8.0, 4)}), result(m0={0: (5.0, 1)}), result()]
    due = {0: (pytest.approx((1.0 + 5.0) / 3), 3), 3: (2.0, 4)}
    assert source_losses(parts) == due and list(source_losses(parts)) == [0, 3]
    assert source_losses([]) == {}


def test_sums_do_not_depend_on_the_order_of_processes():
    parts = [result(**{f"m{n}": {0: (value, 1)}}) for n, value in enumerate((1e16, -1e16, 1.0))]
    assert source_losses(parts) == source_losses(parts[::-1])


def test_the_norm_is_that_of_a_process_that_has_one():
    norms = [StepResult(grad_norm=norm) for norm in (None, 0.0, 0.0)]
    assert grad_norm(norms) == 0.0 and grad_norm(norms[:1]) is None
