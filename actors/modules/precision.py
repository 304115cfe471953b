"""Mixed precision: what autocast would cast anew in every forward, cast once."""

from __future__ import annotations

import torch
from torch import nn

# Modules whose weights autocast casts at every use.
_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep frozen matrix-product weights in ``dtype``, in place.

    Autocast caches only the casts of trainable weights, so a frozen one is cast in every
    forward: for small microbatches that is a large part of the time. Numbers stay exactly
    those of autocast: the same values are rounded once, only earlier, and what autocast
    leaves in fp32 (norms, embeddings) is left alone. An embedding tied to a head keeps its
    fp32 weight; the head gets its own copy.

    Args:
        module: a stage; its fp32 values of the cast weights are lost.
        dtype: autocast's dtype.
    """
    cast: dict[int, nn.Parameter] = {}
    for child in module.modules():
        if not isinstance(child, _CAST_BY_AUTOCAST):
            continue
        for name, parameter in child._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if parameter.dtype == torch.float32:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
                child._parameters[name] = cast[id(parameter)]
    return module
