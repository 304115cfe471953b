"""A model put together of what its stages have, saved as a folder, and read again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.weights.source import ConfigSource


def reload_problem(
    source: ConfigSource, parameters: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> str | None:
    """What is wrong with the folder; None if its model gives the same logits bit for bit.

    Args:
        source: of the whole model.
        parameters: of all stages, by name.
        batch: inputs of its forward.
    """
    model = source.build().eval()
    named = dict(model.named_parameters())
    if missing := sorted(named.keys() - parameters.keys()):
        return f"no stage has {', '.join(missing[:3])}"
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(parameters[name])
    with tempfile.TemporaryDirectory() as folder:
        cast(Any, model).save_pretrained(folder)
        again, report = type(cast(Any, model)).from_pretrained(folder, output_loading_info=True)
    lost = [name for kind in ("missing_keys", "unexpected_keys") for name in report[kind]]
    if lost:
        return f"the folder it is saved as has other keys than its class: {', '.join(lost[:3])}"
    for parameter in again.parameters():  # products round by where in memory their factors begin
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        before, after = (_logits(m, batch) for m in (model, again.eval()))
    return None if torch.equal(before, after) else "its folder read again gives other logits"


def _logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False).logits
