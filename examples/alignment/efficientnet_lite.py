"""EfficientNet-Lite0 as a plain ``nn.Module`` feature extractor (3.4 M parameters).

EfficientNet (Tan & Le, 2019) in its Lite variant: no squeeze-and-excitation, ReLU6 instead of
swish, and stem and head that do not scale with the width. Hugging Face has no such class; it
stands here for every encoder that people bring themselves.

Shapes: ``B`` images, 224 x 224 pixels in, a 7 x 7 grid of 1280 features out.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BN_EPS = 1e-3  # TensorFlow's EfficientNet values, which the published weights were trained with
BN_MOMENTUM = 0.01


class _BlockGroup(NamedTuple):
    """Consecutive MBConv blocks; only the first of them strides and changes the width."""

    repeats: int
    kernel: int
    stride: int
    expand: int  # ratio of the hidden width to the input width
    width_in: int
    width_out: int


_GROUPS = (
    _BlockGroup(1, 3, 1, 1, 32, 16),
    _BlockGroup(2, 3, 2, 6, 16, 24),
    _BlockGroup(2, 5, 2, 6, 24, 40),
    _BlockGroup(3, 3, 2, 6, 40, 80),
    _BlockGroup(3, 5, 1, 6, 80, 112),
    _BlockGroup(4, 5, 2, 6, 112, 192),
    _BlockGroup(1, 3, 1, 6, 192, 320),
)


class SamePadConv2d(nn.Conv2d):
    """``Conv2d`` without bias under TensorFlow's SAME padding (the odd pixel goes right/below)."""

    def __init__(
        self, width_in: int, width_out: int, kernel: int, stride: int = 1, groups: int = 1
    ):
        super().__init__(width_in, width_out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padding = []
        for size, kernel, stride in zip(x.shape[:1:-1], self.kernel_size, self.stride, strict=True):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(x, padding) if any(padding) else x)


class FreezableBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` that uses its running statistics whenever its weight is frozen.

    A frozen encoder must stay the function it was pretrained as, whatever ``train()`` calls
    its surroundings make.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            return super().forward(x)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


def _batch_norm(width: int) -> FreezableBatchNorm2d:
    return FreezableBatchNorm2d(width, eps=BN_EPS, momentum=BN_MOMENTUM)


class MBConvBlock(nn.Module):
    """Inverted bottleneck: 1x1 expansion, depthwise convolution, linear 1x1 projection."""

    def __init__(self, width_in: int, width_out: int, kernel: int, stride: int, expand: int):
        super().__init__()
        hidden = width_in * expand
        self.expand_conv = SamePadConv2d(width_in, hidden, 1) if expand != 1 else None
        self.bn0 = _batch_norm(hidden) if expand != 1 else None
        self.depthwise_conv = SamePadConv2d(hidden, hidden, kernel, stride, groups=hidden)
        self.bn1 = _batch_norm(hidden)
        self.project_conv = SamePadConv2d(hidden, width_out, 1)
        self.bn2 = _batch_norm(width_out)
        self.has_skip = stride == 1 and width_in == width_out

    def forward(self, x: Tensor) -> Tensor:
        """(B, width_in, H, W) -> (B, width_out, H / stride, W / stride)."""
        h = x
        if self.expand_conv is not None:
            h = F.relu6(self.bn0(self.expand_conv(h)))
        h = F.relu6(self.bn1(self.depthwise_conv(h)))
        h = self.bn2(self.project_conv(h))
        return x + h if self.has_skip else h


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 without pooling and classifier.

    ``forward(pixel_values)``: (B, 3, 224, 224) float, ``(x - 127) / 128`` of 0..255 RGB,
    to features (B, 1280, 7, 7). Other sizes work too and give ceil(size / 32) cells.
    """

    hidden_size = 1280

    def __init__(self):
        super().__init__()
        self.conv_stem = SamePadConv2d(3, 32, 3, stride=2)
        self.bn0 = _batch_norm(32)
        self.blocks = nn.ModuleList(
            MBConvBlock(
                group.width_in if i == 0 else group.width_out,
                group.width_out,
                group.kernel,
                group.stride if i == 0 else 1,
                group.expand,
            )
            for group in _GROUPS
            for i in range(group.repeats)
        )
        self.conv_head = SamePadConv2d(320, self.hidden_size, 1)
        self.bn1 = _batch_norm(self.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        h = F.relu6(self.bn0(self.conv_stem(pixel_values)))
        for block in self.blocks:
            h = block(h)
        return F.relu6(self.bn1(self.conv_head(h)))


def build() -> EfficientNetLite0:
    """A randomly initialised model; the weights come from a safetensors file."""
    return EfficientNetLite0()


def convert_state_dict(published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the published weights (``_blocks.0._bn1.weight``) to this module's names.

    Drops the classifier ``_fc``. Raises ``ValueError`` where names or shapes do not match.
    """
    converted = {
        ".".join(part.removeprefix("_") for part in name.split(".")): tensor.contiguous()
        for name, tensor in published.items()
        if not name.startswith("_fc.")
    }
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in build().state_dict().items()}
    found = {name: tensor.shape for name, tensor in converted.items()}
    if found != expected:
        wrong = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        raise ValueError(
            f"EfficientNet-Lite0 weights: {len(wrong)} tensors missing, unknown or of another "
            f"shape, first {wrong[0]!r}: found {found.get(wrong[0])}, "
            f"expected {expected.get(wrong[0])}"
        )
    return converted
