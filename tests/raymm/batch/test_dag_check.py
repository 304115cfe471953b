"""Batches for graphs of modules that the driver rejects, without a process."""

import pytest
import torch
from torch import nn

from raymm.batch.batches import DagCheck
from raymm.errors import DataError, ModelError
from raymm.model.contrastive import ContrastiveLoss
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag
from tests.support.multiplex_models import V, clip_batch, clip_model


def towers() -> ModuleDag:
    """Return a CLIP's two towers; the projections give them equal widths."""
    clip = clip_model()
    return ModuleDag({
        "image": DagModule(clip.vision_model, reads="pixel_values", outputs="pooler_output"),
        "text": DagModule(
            clip.text_model, reads=("input_ids", "attention_mask"), outputs="pooler_output"
        ),
        "of_image": DagModule(clip.visual_projection, inputs={"input": "image"}),
        "of_text": DagModule(clip.text_projection, inputs={"input": "text"}),
        "loss": DagLoss(
            ContrastiveLoss(), inputs={"first": every("of_image"), "second": every("of_text")}
        ),
    })


def test_wrong_entries_are_refused_by_name():
    check = DagCheck(towers())
    batch = clip_batch(4, 0)
    check(batch)
    check(clip_batch(3, 1))
    ids, pixels = batch["input_ids"], batch["pixel_values"]
    for change, said in (
        ({"pixel_values": pixels.numpy()}, "'pixel_values' of the batch, which is a ndarray"),
        ({"pixel_values": pixels.to_sparse()}, "'pixel_values' is a sparse_coo tensor .*dense"),
        ({"pixel_values": pixels.clone().requires_grad_()}, "requires_grad"),
        ({"pixel_values": pixels.to("meta")}, "on meta"),
        ({"pixel_values": pixels[:3]}, "'pixel_values': 3"),
        ({"pixel_values": torch.zeros(4, 3, 12, 12)}, r"'image' does not .*\(4, 3, 12, 12\)"),
        ({"pixel_values": pixels[:, :1]}, "'image' does not accept .*channel"),
        ({"input_ids": ids.float()}, "'text' does not accept .*float32"),
        ({"input_ids": ids + V}, rf"'input_ids'\[0, 0\] is \d+; accepted: 0 to {V - 1}"),
        ({"input_ids": ids - 5}, f"accepted: 0 to {V - 1}"),
        ({"input_ids": torch.ones(4, 30).long()}, "'text' does not accept"),
        ({"attention_mask": None}, "'attention_mask' of the batch, which is missing"),
    ):
        with pytest.raises((DataError, ModelError), match=said):
            check({**batch, **change})
    with pytest.raises(DataError, match="the batch is a list of 1"):
        check([batch])
    check(batch)


class LooksAtValues(nn.Module):
    def forward(self, x):
        return x * float(x.sum())


def test_untriable_batches_are_left_to_the_processes():
    dag = ModuleDag({
        "one": DagModule(LooksAtValues(), reads="x"),
        "loss": DagLoss(nn.Flatten(0), inputs={"input": "one"}),
    })
    DagCheck(dag)({"x": torch.ones(3, 1)})
