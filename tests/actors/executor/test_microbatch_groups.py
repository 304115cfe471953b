"""Microbatches that share one forward."""

import torch

from raymm.actors.executor.microbatch_groups import GroupRun, group_of, joined_inputs
from raymm.actors.modules.message import Message


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
