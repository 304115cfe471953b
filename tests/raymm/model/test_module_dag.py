"""Descriptions of graphs of modules, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raymm.errors import ModelError
from raymm.model.contrastive import ContrastiveLoss
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.modality_module import ModalityModule
from raymm.model.module_dag import ModuleDag
from tests.support.multiplex_models import (
    ImageBind,
    MeanSquare,
    Tower,
    Unified,
    imagebind_batch,
    unified_batch,
)


@pytest.mark.parametrize(
    ("model", "batch"), [(ImageBind, imagebind_batch), (Unified, unified_batch)]
)
def test_the_reference_is_the_model_called_by_hand(model, batch):
    model, batch = model(), batch(5, 0)
    dag = model.dag()
    output, due = dag(batch), model(batch)
    assert output.loss.item() == pytest.approx(due.item(), rel=1e-6)
    assert sum(v.item() for v in output.losses.values()) == pytest.approx(due.item(), rel=1e-6)
    due.backward()
    by_hand = {id(p): p.grad for p in model.parameters()}
    model.zero_grad()
    output.loss.backward()
    for name, parameter in dag.named_parameters():
        mine, theirs = parameter.grad, by_hand[id(parameter)]
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, msg=name)


def test_contrastive_losses_of_parts_equal_the_whole():
    loss, first, second = ContrastiveLoss(), torch.randn(7, 3), torch.randn(7, 3)
    parts = [loss(first, second, slice(a, b)) for a, b in ((0, 3), (3, 4), (4, 7))]
    torch.testing.assert_close(torch.cat(parts), loss(first, second))


def test_contrastive_towers_of_other_lengths_are_refused():
    for first, second in ((3, 2), (2, 3)):
        with pytest.raises(ModelError, match=f"first has {first} samples and second {second}"):
            ContrastiveLoss()(torch.randn(first, 3), torch.randn(second, 3))


def test_only_outputs_that_are_read_are_sent():
    """Check that other outputs need not be tensors."""
    def nodes(outputs=(), **inputs):
        return {
            "a": DagModule(Returns({"y": torch.ones(4, 2), "z": [1]}), reads={"input": "x"},
                           outputs=outputs),
            **{name: DagLoss(MeanSquare(), inputs={"x": one}) for name, one in inputs.items()},
        }  # fmt: skip

    dag = ModuleDag(nodes(one="a.y", other="a.y"))
    assert dag.specs()["a"].outputs == ("y",)
    assert dag({"x": torch.randn(4, 2)}).loss.item() == 2.0
    assert ModuleDag(nodes(one="a.y", other="a")).specs()["a"].outputs == ()
    with pytest.raises(ModelError, match="'one' reads output 'y' of 'a'; accepted: z"):
        ModuleDag(nodes("z", one="a.y"))


def test_a_loss_is_not_divided_by_zero():
    dag = ModuleDag({"l": DagLoss(MeanSquare(), reads="x", divide_by="count")})
    with pytest.raises(ModelError, match="loss 'l' is divided by entry 'count', which sums to 0"):
        dag({"x": torch.ones(2, 2), "count": torch.zeros(2)})


class Returns(nn.Module):
    """Module that returns its constructor argument."""

    def __init__(self, value) -> None:
        super().__init__()
        self.value = value

    def forward(self, input):
        return self.value


def chain(module: nn.Module, **options) -> ModuleDag:
    inputs = options.pop("inputs", {"x": "a"})
    return ModuleDag({
        "a": DagModule(module, reads={"input": "x"}, **options),
        "error": DagLoss(MeanSquare(), inputs=inputs),
    })


@pytest.mark.parametrize(
    ("dag", "message"),
    [
        (lambda: chain(Returns(torch.zeros(3, 2))), r"shape \(3, 2\) for 4 samples"),
        (lambda: chain(Returns(7)), "'a' returns int"),
        (lambda: chain(Returns({"y": [1]})), "'y' of 'a' is list; list the tensors"),
        (lambda: chain(Returns({"y": torch.zeros(4)}), outputs="z"), r"\['z'\].*outputs: y"),
        (lambda: chain(Returns((torch.zeros(4, 1), torch.zeros(4))), inputs={"x": "a.2"}),
         r"'a' does not return \['2'\]; accepted as outputs: 0, 1"),
        (lambda: ModuleDag({"l": DagLoss(nn.Linear(2, 1), reads={"input": "x"})}),
         "loss 'l' returns .*; accepted: one tensor"),
    ],
)
def test_outputs_of_modules_are_checked(dag, message):
    with pytest.raises(ModelError, match=message):
        dag()({"x": torch.randn(4, 2)})


def shared() -> dict[str, DagModule]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return {
        "a": DagModule(first, reads={"input": "x"}),
        "b": DagModule(second, inputs={"input": "a"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "b"}),
    }


def shared_projector() -> dict[str, DagModule]:
    projector = nn.Linear(4, 4)
    return {
        **{name: DagModule(ModalityModule(Tower(2, 4), projector, hidden_size=12), reads="x")
           for name in "ab"},
        "error": DagLoss(MeanSquare(), inputs={"x": "a", "y": "b"}),
    }  # fmt: skip


def loss(**options) -> dict[str, DagModule]:
    return {"l": DagLoss(MeanSquare(), **{"reads": "x", **options})}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (shared, "'weight' of module 'b' is 'weight' of module 'a'"),
        (shared_projector, "'weight' of module 'b projector' is 'weight' of module 'a projector'"),
        *(
            (lambda name=name: {name: DagLoss(MeanSquare(), reads="x")}, "accepted: an identifier")
            for name in ("graph", "nodes", "training", "specs", "batch_size", "scales")
        ),
        (lambda: loss(weight="2"), "weight is '2'; accepted: a finite number"),
        (lambda: loss(weight=float("nan")), "weight is nan"),
        (lambda: loss(divide_by=3), "divide_by is 3"),
        (lambda: loss(reads=3), "reads is 3; accepted"),
        (lambda: loss(reads=[3]), r"reads is \[3\]; accepted"),
        (lambda: loss(inputs=["a"]), r"inputs is \['a'\]; accepted: a mapping"),
        (lambda: loss(inputs={"y": 3}), "inputs have 3 for keyword 'y'"),
        (lambda: loss(inputs={"y": every(every("a"))}), "for keyword 'y'; accepted"),
        (lambda: loss(reads="own", inputs={"x": every("a")}), "keyword 'own' is in reads or"),
        (lambda: {"not a name": DagLoss(MeanSquare(), reads="x")}, "accepted: an identifier"),
        (lambda: {"forward": DagLoss(MeanSquare(), reads="x")}, "accepted: an identifier"),
        (lambda: {"l": MeanSquare()}, "'l' is a MeanSquare; accepted: DagModule"),
        (lambda: {"l": DagLoss(MeanSquare(), reads="x", inputs={"x": every("l")})}, "both reads"),
        (lambda: {"l": DagLoss(ModalityModule(Tower(2, 2), "linear"), reads="x")},
         "projector is 'linear'"),
        (lambda: {"l": DagLoss(ModalityModule(Tower(2, 2)), frozen=True)}, "given twice"),
        (lambda: loss(inputs={"y": "b"}), "'l' reads 'b'; accepted: l"),
        (lambda: {"a": DagModule(Tower(2, 2), reads="x")}, r"none of \['a'\] is a loss"),
        (lambda: {**loss(), "m": DagLoss(MeanSquare(), inputs={"x": "l"})}, "is a loss; accepted"),
    ],
)
def test_invalid_descriptions_are_refused(nodes, message):
    with pytest.raises(ModelError, match=message):
        ModuleDag(nodes())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "'text' reads entry 'text' of the batch, which is missing"),
        ({"imu": [1]}, "which is a list"),
        ({"audio": torch.randn(3, 7)}, "'audio': 3"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message):
    dag = ImageBind().dag()
    whole = imagebind_batch(4, 0)
    given = {k: v for k, v in whole.items() if batch or k != "text"} | batch
    with pytest.raises(ModelError, match=message):
        dag(given)
