"""Check for attention heads that are too wide for raymm's GPU kernels."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from raymm.errors import ModelError
from raymm.kernels.flash.gpu.launch_configs import LARGEST_HEAD_DIM
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions

_HEAD_DIMS = ("head_dim", "qk_head_dim", "v_head_dim", "attention_head_size")


def check_head_dims(
    model: MultimodalModule, options: RuntimeOptions, modules: Iterable[str]
) -> None:
    """Reject attention heads that raymm's kernels cannot compute, unless another kernel may be
    used.

    Args:
        modules: names of modules whose attention raymm computes: with a mask, packed, or with
            tokens split over processes.

    Raises:
        ModelError: a head is too wide. Names module, attention layer and width.
    """
    if options.device != "cuda" or options.kernels == "auto":
        return
    for name in modules:
        for layer, head_dim in _head_dims(model.spec(name).source.skeleton()):
            if head_dim > LARGEST_HEAD_DIM:
                raise ModelError(
                    f"{name}: {layer} has head dimension {head_dim}; accepted on cuda: at most "
                    f"{LARGEST_HEAD_DIM}, or run.kernels: auto, which selects a suitable kernel"
                )


def _head_dims(module: nn.Module) -> Iterable[tuple[str, int]]:
    """Yield (name, head dimension) of attention modules that state it."""
    for layer, child in module.named_modules():
        if "attention" in type(child).__name__.lower():
            for name in _HEAD_DIMS:
                if isinstance(head_dim := getattr(child, name, None), int):
                    yield layer, head_dim
