"""EfficientNet-Lite0 as transformers' ``EfficientNetModel``: the same function, other names.

The Lite variant has no squeeze-and-excitation, which that class has in every block. Weights of
zero and a large bias make it multiply by a sigmoid that is 1 to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import EfficientNetConfig, EfficientNetModel

WIDTH = 1280  # of its features
STRIDE = 32  # pixels of a side that a feature stands for
# The sigmoid of it is 1 in fp32, and in bf16.
_OPEN = 30.0
_OUTSIDE = {
    "conv_stem": "embeddings.convolution", "bn0": "embeddings.batchnorm",
    "conv_head": "encoder.top_conv", "bn1": "encoder.top_bn",
}
_INSIDE = {
    "expand_conv": "expansion.expand_conv", "bn0": "expansion.expand_bn",
    "depthwise_conv": "depthwise_conv.depthwise_conv", "bn1": "depthwise_conv.depthwise_norm",
    "project_conv": "projection.project_conv", "bn2": "projection.project_bn",
}


def config(image_size: int) -> EfficientNetConfig:
    """Configuration of the tower.

    Args:
        image_size: pixels of a side, a multiple of :data:`STRIDE`.
    """
    return EfficientNetConfig(
        image_size=image_size, width_coefficient=1.0, depth_coefficient=1.0, hidden_act="relu6",
        hidden_dim=WIDTH, hidden_size=WIDTH, batch_norm_eps=1e-3, drop_connect_rate=0.0,
        dropout_rate=0.0,
    )  # fmt: skip


def state_dict(lite: Mapping[str, Tensor], image_size: int) -> dict[str, Tensor]:
    """Weights of ``EfficientNetModel``.

    Args:
        lite: those of :class:`examples.alignment.efficientnet_lite.EfficientNetLite0`.
        image_size: as for :func:`config`.

    Raises:
        ValueError: they are not, by the first name that is left over, missing or of another shape.
    """
    state = {_name(name): tensor for name, tensor in lite.items()}
    with torch.device("meta"):
        expected = EfficientNetModel(config(image_size)).state_dict()
    for name, tensor in expected.items():
        if "squeeze_excite" in name:
            value = _OPEN if name.endswith("expand.bias") else 0.0
            state[name] = torch.full(tensor.shape, value)
    for name in sorted(state.keys() | expected.keys()):
        own, due = (None if t is None else tuple(t.shape) for t in (
            state.get(name), expected.get(name)
        ))  # fmt: skip
        if own != due:
            raise ValueError(f"EfficientNet-Lite0: {name!r} has shape {own}, expected {due}")
    return state


def _name(lite: str) -> str:
    block = re.fullmatch(r"(blocks\.\d+)\.(\w+)\.(\w+)", lite)
    if block:
        return f"encoder.{block[1]}.{_INSIDE[block[2]]}.{block[3]}"
    module, _, tensor = lite.rpartition(".")
    return f"{_OUTSIDE[module]}.{tensor}"
