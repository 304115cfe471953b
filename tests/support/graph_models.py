"""Graphs of modules that contain transformers.

Encoders that feed encoders, a language model, and a flow-matching head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers as hf
from torch import nn
from transformers.models.clip.modeling_clip import CLIPEncoder

from raymm.actors.modules.noise import normal_noise, uniform_noise
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.module_dag import ModuleDag

WIDTH, VOCABULARY, LATENT = 12, 17, 5


class Compressed(nn.Module):
    """CLIP encoder on another encoder's feature maps (B, 16, 4, 4), at half their sides."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
            image_size=8, patch_size=4,
        )
        self.smaller = nn.Conv2d(16, WIDTH, 3, 2, 1)
        self.encoder = CLIPEncoder(cast(Any, self.config))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        tokens = self.smaller(maps).flatten(2).transpose(1, 2)
        return self.encoder(inputs_embeds=tokens).last_hidden_state


class Reading(nn.Module):
    """Language model on the features of both encoders, then text.

    Returns its samples' losses and its states (B, T, WIDTH).
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16,
        )  # fmt: skip
        self.into = nn.Linear(16 + WIDTH, WIDTH)
        self.model = hf.LlamaForCausalLM(self.config)

    def forward(
        self, maps: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Run on maps (B, 16, 4, 4), tokens (B, 4, WIDTH) and ids (B, T)."""
        pooled = nn.functional.avg_pool2d(maps, 2).flatten(2).transpose(1, 2)
        image = self.into(torch.cat([pooled, tokens], 2))
        embeds = torch.cat([image, self.model.get_input_embeddings()(ids)], 1)
        states = self.model.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        states = states[:, image.shape[1] - 1 : -1]
        losses = nn.functional.cross_entropy(
            self.model.lm_head(states).transpose(1, 2), ids, reduction="none"
        )
        return {"loss": losses.sum(1), "hidden": states}


def reading() -> ModuleDag:
    """Return a graph in which a SAM feeds a CLIP, and both feed a language model."""
    torch.manual_seed(0)
    sam = hf.SamVisionModel(hf.SamVisionConfig(
        hidden_size=8, output_channels=16, num_hidden_layers=3, num_attention_heads=2,
        image_size=16, patch_size=4, mlp_dim=12, window_size=2, global_attn_indexes=[1],
        num_pos_feats=4, initializer_range=0.1,
    ))  # fmt: skip
    maps = torch.randn(3, 16, 4, 4)
    example = {
        "maps": maps, "tokens": torch.randn(3, 4, WIDTH), "ids": torch.randint(0, 9, (3, 6))
    }
    return ModuleDag({
        "sam": DagModule(sam, reads="pixel_values", outputs="last_hidden_state"),
        "clip": DagModule(Compressed(), inputs={"maps": "sam"}, example_inputs={"maps": maps}),
        "llm": DagLoss(
            Reading(), reads="ids", inputs={"maps": "sam", "tokens": "clip"}, divide_by="count",
            example_inputs=example,
        ),
    })


def reading_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(7000 + seed)
    return {
        "pixel_values": torch.randn(size, 3, 16, 16),
        "ids": torch.randint(0, VOCABULARY, (size, 6)), "count": torch.full((size,), 6),
    }


class Speaking(nn.Module):
    """Language model that returns its samples' losses and its states (B, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.Qwen3Config(
            hidden_size=WIDTH, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, head_dim=6, vocab_size=VOCABULARY, max_position_embeddings=16,
        )  # fmt: skip
        self.model = hf.Qwen3ForCausalLM(self.config)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        losses = nn.functional.cross_entropy(
            self.model.lm_head(states[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return {"loss": losses.sum(1), "hidden": states}


class FlowLayer(nn.Linear):
    """Linear layer that also takes the time."""

    def forward(self, hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).tanh() + hidden * at.cos()


class Flow(nn.Module):
    """Squared error of the velocity from noise to latents (B, LATENT) at a time (B,).

    It is conditioned on a language model's states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(LATENT + WIDTH, WIDTH)
        self.layers = nn.ModuleList(FlowLayer(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, LATENT)

    def forward(
        self, states: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        at = time[:, None]
        hidden = self.into(torch.cat([noise + at * (latents - noise), states.mean(1)], 1))
        for layer in self.layers:
            hidden = layer(hidden, at)
        return (self.out(hidden) - (latents - noise)).square().mean(1)


def flowing() -> ModuleDag:
    """Return a graph of a language model and a flow-matching head that reads its states."""
    torch.manual_seed(2)
    example = {
        "states": torch.randn(2, 7, WIDTH), "latents": torch.randn(2, LATENT),
        "noise": torch.randn(2, LATENT), "time": torch.rand(2),
    }
    return ModuleDag({
        "llm": DagLoss(
            Speaking(), reads="ids", divide_by="count",
            example_inputs={"ids": torch.randint(0, VOCABULARY, (2, 7))},
        ),
        "flow": DagLoss(
            Flow(), reads="latents", inputs={"states": "llm.hidden"}, weight=0.5,
            noise={"noise": normal_noise("latents"), "time": uniform_noise()},
            example_inputs=example,
        ),
    })


def flow_batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(8000 + seed)
    return {
        "ids": torch.randint(0, VOCABULARY, (size, 7)), "count": torch.full((size,), 6),
        "latents": torch.randn(size, LATENT),
    }
