"""Limits on calls of raymm's own Python functions per instruction.

A step must not get slower unnoticed, nor through features that its plan does not use.
"""

import sys

import pytest
import torch

from benchmarks.instruction_calls import MICROBATCHES, calls, middle_rank
from raymm.actors.executor.step_meta import StepMeta

# A receive includes the posting of a later one, a send the release of an earlier one.
MOST = {"recv": 6, "forward": 9, "send": 7, "backward": 11}
MOST_PER_STEP = 60


def test_an_instruction_takes_few_calls():
    counted = calls()
    assert set(counted) == {*MOST, "the end of a step"}
    for op, most in MOST.items():
        assert 1 <= counted[op]["python"] <= most, (op, counted[op])
    assert counted["the end of a step"]["python"] <= MOST_PER_STEP


@pytest.mark.parametrize("named", ["Draws", "ExitStack", "autocast", "Place"])
def test_unused_features_are_not_called(named):
    """Use a stage without random numbers, in full precision, with finite values."""
    executor, prepared, _ = middle_rank()
    meta = StepMeta(0, 1, ("shape",) * MICROBATCHES)
    executor.run(prepared, {}, meta)
    seen = set()

    def event(frame, event, argument):
        seen.add(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))

    sys.setprofile(event)
    try:
        executor.run(prepared, {}, meta)
    finally:
        sys.setprofile(None)
    assert any(name.startswith("SendChannel.") for name in seen)
    assert not [name for name in seen if name.startswith(named)]
    assert torch.is_grad_enabled()
