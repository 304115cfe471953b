"""The contrastive loss equals torch's cross-entropy over all pairs, and CLIP's nodes its model."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import CLIPConfig, CLIPModel

from raymm.errors import ModelError
from raymm.model.contrastive import ContrastiveLoss, clip_dag


def embeddings(count):
    torch.manual_seed(0)
    return torch.randn(count, 5), torch.randn(count, 5)


def test_the_mean_is_that_of_both_directions():
    first, second = embeddings(6)
    losses = ContrastiveLoss(2.0)(first, second)
    unit = [value / value.norm(dim=-1, keepdim=True) for value in (first, second)]
    logits, right = math.exp(2.0) * unit[0] @ unit[1].T, torch.arange(6)
    due = (cross_entropy(logits, right) + cross_entropy(logits.T, right)) / 2
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), due)


def test_some_samples_have_the_same_losses():
    first, second = embeddings(6)
    loss = ContrastiveLoss()
    torch.testing.assert_close(loss(first, second, slice(2, 5)), loss(first, second)[2:5])


def test_a_fixed_factor_has_no_gradient():
    assert not ContrastiveLoss(learnable=False).logit_scale.requires_grad
    assert ContrastiveLoss().logit_scale.exp().item() == pytest.approx(1 / 0.07)


def test_towers_of_different_numbers_are_refused():
    with pytest.raises(ModelError, match="first has 3 samples and second 2; accepted: the same"):
        ContrastiveLoss()(embeddings(3)[0], embeddings(2)[1])


def test_the_nodes_of_clip_compute_its_loss():
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2}
    text = {**small, "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 15, "pad_token_id": 0}
    model = CLIPModel(CLIPConfig(
        text_config=text, vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=4,
    )).eval()
    torch.manual_seed(0)
    ids = torch.randint(2, 15, (3, 5))
    ids[:, -1] = 15
    batch = {"pixel_values": torch.randn(3, 3, 8, 8), "input_ids": ids,
             "attention_mask": torch.ones_like(ids)}
    due = model(**batch, return_loss=True).loss
    torch.testing.assert_close(clip_dag(model)(batch).loss, due)
