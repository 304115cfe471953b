"""Results of a step, collected from its microbatches."""


import torch

from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.executor.step_state import GroupRun, StepState, group_of, joined_inputs
from raymm.actors.modules.message import Message, Routed
from raymm.scheduler.plan.stage import StageId


def row(items, width=3, **plain):
    return {"pixels": torch.randn(items, width), **plain}


def test_members_have_inputs_of_the_same_form():
    rows = [row(2), row(1), row(1, 5), row(3, scale=2), row(1)]
    assert [group_of(rows, n, 4) for n in range(5)] == [(0, 1), (0, 1), (2,), (3,), (4,)]
    assert group_of([None, None, row(1)], 1, 3) == (0, 1)


def test_gradients_equal_those_of_separate_forwards():
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(3, 2), [row(2, scale=3), row(1, scale=3)]
    losses = [layer(each["pixels"]).pow(2).sum() for each in rows]
    expected = torch.autograd.grad(losses[0] + 5 * losses[1], [layer.weight, layer.bias])

    inputs = joined_inputs(rows)
    assert inputs["scale"] == 3

    def split(message):
        parts = message.tensors[0].split([2, 1])
        return [message._replace(tensors=(part,)) for part in parts]

    run = GroupRun(Message((layer(inputs["pixels"]),), {}), split, True)
    last = []
    for part, weight in zip(run.parts, (1, 5), strict=True):
        (part.tensors[0].pow(2).sum() * weight).backward()
        last.append(run.last_use())
    assert last == [False, True]
    outputs, gradients = run.gradients()
    torch.autograd.backward(outputs, gradients)
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad], list(expected))


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
