"""Held-out means, compared with sums over all tokens by hand."""

from types import SimpleNamespace

import pytest

from raymm.evaluation.heldout import HeldoutLoss
from raymm.runtime.parallel_module import StepOutput
from raymm.scheduler.program.timeline import Timeline


def step(number):
    return SimpleNamespace(microbatches=[] if number is None else [number], meta=[], skipped=[])


OUTPUTS = {
    0: StepOutput(
        2.0, 3, Timeline((), 1), source_losses={0: (2.0, 3)}, rewards={"r": 1.0}
    ),
    1: StepOutput(
        4.0, 1, Timeline((), 1), source_losses={0: (6.0, 1), 1: (4.0, 2)}, rewards={"r": -1.0}
    ),
}


def run(steps, in_flight):
    flying = []

    def submit(inputs, *, forward_only, keep):
        assert forward_only
        flying.append(inputs[0][0])
        assert len(flying) <= in_flight
        return SimpleNamespace(result=lambda: OUTPUTS[flying.pop(0)])

    return HeldoutLoss.of(submit, steps, in_flight, ["web", "books"])


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_means_are_over_label_tokens(in_flight):
    losses = run([step(0), step(None), step(1)], in_flight)
    losses.check()
    assert losses.row == {
        "heldout_loss": (2.0 * 3 + 4.0) / 4, "heldout_skipped": 0, "heldout_r": (3 - 1) / 4,
        "heldout_source_losses": {"web": (2.0 * 3 + 6.0) / 4, "books": 4.0},
        "heldout_source_label_tokens": {"web": 4, "books": 2},
    }


def test_no_data_has_an_empty_row():
    losses = run([], 1)
    losses.check()
    assert losses.row == {"heldout_loss": 0.0, "heldout_skipped": 0}
