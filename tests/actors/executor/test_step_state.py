"""Results of a step, collected from its microbatches."""

import torch

from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.executor.step_state import StepState
from raymm.actors.modules.message import Message, Routed
from raymm.scheduler.plan.stage import StageId

STAGE = StageId("llm", 1)


def test_results_are_summed_over_microbatches():
    state = StepState(2, 1, {}, StepMeta(0, 4, ()))
    for number in range(3):
        state.losses[STAGE, number] = torch.tensor(number / 4)
        state.routed[STAGE, number] = Routed(
            {"experts": torch.tensor([number, 1])}, torch.tensor([0.5, float(number)])
        )
    state.by_source[STAGE, 0] = {2: (torch.tensor(1.5), 4)}
    state.scores[STAGE, 1] = torch.tensor([1.0, 2.0])
    result = state.result(b"labels", b"times")
    assert result.losses == {(STAGE, 0): 0.0, (STAGE, 1): 0.25, (STAGE, 2): 0.5}
    assert result.loads == {"experts": [3, 3]}
    assert result.router_counts == [1.5, 3.0]
    assert result.by_source == {(STAGE, 0): {2: (1.5, 4)}}
    assert result.scores == {(STAGE, 1): [1.0, 2.0]}


def test_a_message_is_freed_when_it_is_taken():
    state = StepState(2, 0, {STAGE: [{"x": 1}, None]}, StepMeta(0, 4, ()))
    state.messages[1] = message = Message((), {})
    assert state.take(1) is message
    assert state.messages == [None, None]
    assert state.stage_inputs(STAGE, 0) == {"x": 1}
    assert state.stage_inputs(STAGE, 1) is None
    assert state.stage_inputs(StageId("vision", 0), 0) is None
