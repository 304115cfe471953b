"""Contrastive losses between towers, and CLIP as a graph of modules."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from raymm.errors import ModelError
from raymm.model.dag_module import DagLoss, DagModule, every
from raymm.model.module_dag import ModuleDag


class ContrastiveLoss(nn.Module):
    """Symmetric InfoNCE as in CLIP: each sample of one tower against all samples of the other.

    Args:
        logit_scale: initial logarithm of the factor of the logits.
        learnable: True to train the factor.
    """

    def __init__(self, logit_scale: float = math.log(1 / 0.07), learnable: bool = True) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(float(logit_scale)), requires_grad=learnable)

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, own: slice | None = None
    ) -> torch.Tensor:
        """Return the losses of some samples, (b,): the mean of both directions per sample.

        Args:
            first, second: (B, D) embeddings of all samples of the batch.
            own: samples whose losses to return; all by default.

        Raises:
            ModelError: the towers have different numbers of samples.
        """
        if len(first) != len(second):
            raise ModelError(
                f"first has {len(first)} samples and second {len(second)}; accepted: the same "
                "number, one pair per sample"
            )
        own = own or slice(0, first.shape[0])
        first, second = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
        scale = self.logit_scale.exp()
        labels = torch.arange(own.start, own.stop, device=first.device)
        forth = F.cross_entropy(scale * first[own] @ second.T, labels, reduction="none")
        back = F.cross_entropy(scale * second[own] @ first.T, labels, reduction="none")
        return (forth + back) / 2


def clip_dag(model: CLIPModel) -> ModuleDag:
    """Return a CLIP model as nodes ``image``, ``text`` and ``contrastive``, which share its
    weights.

    The batch has ``pixel_values``, ``input_ids`` and ``attention_mask``. The loss equals that of
    ``model(..., return_loss=True)``.
    """
    with torch.device("meta"):
        vision = CLIPVisionModelWithProjection(cast(CLIPVisionConfig, model.config.vision_config))
        text = CLIPTextModelWithProjection(cast(CLIPTextConfig, model.config.text_config))
    vision.vision_model, vision.visual_projection = model.vision_model, model.visual_projection
    text.text_model, text.text_projection = model.text_model, model.text_projection
    loss = ContrastiveLoss()
    loss.logit_scale = model.logit_scale
    return ModuleDag({
        "image": DagModule(vision, reads="pixel_values", outputs="image_embeds"),
        "text": DagModule(text, reads=("input_ids", "attention_mask"), outputs="text_embeds"),
        "contrastive": DagLoss(
            loss, inputs={"first": every("image"), "second": every("text")}, draws=False
        ),
    })
