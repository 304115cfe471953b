"""Visual tokens of cross attention, split over processes."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from raymm.actors.sharding.visual_tokens import own_visual_tokens, recomputes


@pytest.mark.parametrize("length", [1, 5, 8])
@pytest.mark.parametrize("size", [1, 3])
def test_processes_have_every_token_once(length, size):
    tokens = torch.arange(2.0 * length).view(2, length, 1)
    parts = []
    for rank in range(size):
        own, total = own_visual_tokens({"v": tokens}, SimpleNamespace(rank=rank, size=size))
        assert int(total) == length and own["v"].shape[1] >= 1
        parts.append(own["v"])
    if length >= size:
        assert torch.equal(torch.cat(parts, dim=1), tokens)
    else:  # processes without tokens have a zero
        assert torch.equal(sum(part.sum(1) for part in parts), tokens.sum(1))


def test_one_process_has_all_tokens():
    tokens = torch.zeros(2, 5, 1)
    own, total = own_visual_tokens({"v": tokens}, None)
    assert own["v"] is tokens and int(total) == 5


def test_keys_are_recomputed_if_they_dominate():
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    per_text, per_key = 6 * 8 + 3 * 16, 2 * 8
    assert recomputes(config, 10, 10 * per_text // per_key + 1)
    assert not recomputes(config, 10, 10 * per_text // per_key)
    grouped = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1
    )
    assert not recomputes(grouped, 10, 10 * per_text // per_key + 1)
