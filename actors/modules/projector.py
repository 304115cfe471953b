"""Projectors: small modules between an encoder and the language model."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

KINDS = ("linear", "mlp")


class ProjectorConfig(PretrainedConfig):
    """Configuration of :class:`Projector`.

    Args:
        kind: ``"linear"``, or ``"mlp"`` (linear, GELU, linear).
        in_features: width of the encoder's output.
        out_features: width of the language model's embeddings.
        **kwargs: passed to ``transformers.PretrainedConfig``.
    """

    model_type = "raymm_projector"

    def __init__(
        self, kind: str = "mlp", in_features: int = 1, out_features: int = 1, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.kind = kind
        self.in_features = in_features
        self.out_features = out_features


class Projector(PreTrainedModel):
    """Maps encoder features (..., in_features) to embeddings (..., out_features).

    This is an ordinary Hugging Face model: ``Projector.from_pretrained(folder)`` reads the output
    of ``raymm export``.

    Raises:
        ValueError: ``config.kind`` is unknown.
    """

    config_class = ProjectorConfig
    base_model_prefix = "projector"

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__(config)
        if config.kind not in KINDS:
            raise ValueError(f"projector is {config.kind!r}; accepted: {', '.join(KINDS)}")
        layers: list[nn.Module] = [nn.Linear(config.in_features, config.out_features)]
        if config.kind == "mlp":
            layers += [nn.GELU(), nn.Linear(config.out_features, config.out_features)]
        self.layers = nn.Sequential(*layers)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)
