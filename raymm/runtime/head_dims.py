"""Heads that are wider than attention kernels on a GPU can be, refused before anything runs."""

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
    """Refuse heads that raymm's kernels cannot compute, where nothing else may take their place.

    Args:
        model: the description.
        options: how it runs.
        modules: by name, those whose attention raymm computes: under a mask, packed, or with
            tokens that processes share.

    Raises:
        ModelError: naming module, attention and width.
    """
    if options.device != "cuda" or options.kernels == "auto":
        return
    for name in modules:
        for place, head_dim in _head_dims(model.spec(name).source.skeleton()):
            if head_dim > LARGEST_HEAD_DIM:
                raise ModelError(
                    f"{name}: {place} has head dimension {head_dim}; accepted on cuda: at most "
                    f"{LARGEST_HEAD_DIM}, or run.kernels: auto, which selects a suitable kernel"
                )


def _head_dims(module: nn.Module) -> Iterable[tuple[str, int]]:
    """What attention modules say of their heads' width."""
    for place, child in module.named_modules():
        if "attention" in type(child).__name__.lower():
            for name in _HEAD_DIMS:
                if isinstance(head_dim := getattr(child, name, None), int):
                    yield place, head_dim
