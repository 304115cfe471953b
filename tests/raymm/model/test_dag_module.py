"""Modules and losses of a graph."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers as hf
from torch import nn

from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag
from tests.support.multiplex_models import (
    MeanSquare,
)


def test_modules_come_from_configurations_too():
    config = hf.CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4, projection_dim=6,
    )
    dag = ModuleDag({
        "image": DagModule(
            config, model_class="CLIPVisionModelWithProjection", reads="pixel_values",
            outputs="image_embeds", frozen=True, seed=3,
        ),
        "head": DagModule(nn.Linear(6, 2), inputs={"input": "image.image_embeds"}),
        "error": DagLoss(MeanSquare(), inputs={"x": "head"}),
    })
    assert dag.graph.backward == {"head", "error"}
    spec = pickle.loads(pickle.dumps(dag.spec("image")))
    built, here = spec.source.build(), dag.materialize().image
    for (name, mine), (_, theirs) in zip(
        built.named_parameters(), here.named_parameters(), strict=True
    ):
        assert torch.equal(mine, theirs) and not mine.requires_grad, name
    assert dag({"pixel_values": torch.randn(2, 3, 8, 8)}).loss.requires_grad


def test_losses_are_weighted_and_divided():
    dag = ModuleDag({
        "a": DagModule(nn.Identity(), reads={"input": "x"}),
        "mean": DagLoss(MeanSquare(), inputs={"x": "a"}, weight=3.0),
        "each": DagLoss(MeanSquare(), inputs={"x": "a"}, divide_by="count"),
    })
    x = torch.tensor([[1.0], [2.0], [3.0]])
    output = dag({"x": x, "count": torch.tensor([4, 0, 3])})
    assert output.losses["mean"].item() == pytest.approx(3 * 14 / 3)
    assert output.losses["each"].item() == pytest.approx(14 / 7)
    assert output.loss.item() == pytest.approx(16.0)
