"""Export and reload of a model that is assembled from its stages."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import ConfigSource
from raymm.errors import Error
from raymm.storage.model_folder import SOURCE, ModelFolder


def reload_problem(
    source: ConfigSource, parameters: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the problem of an exported folder; None if it gives the same logits bit for bit.

    Args:
        parameters: parameters of all stages, by name.
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
    # rounding of products depends on the memory alignment of their factors
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        before, after = (_logits(m, batch) for m in (model, again.eval()))
    if not torch.equal(before, after):
        return "its folder read again gives other logits"
    return _export_problem(model, batch)


def _export_problem(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> str | None:
    """Compare a bf16 export with its source folder, and a second export with the first.

    Args:
        model: fp32 model with trained weights.

    Returns:
        The difference; None if all files are equal byte for byte.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with tempfile.TemporaryDirectory() as place:
        source, same, first, second = (Path(place) / n for n in ("source", "same", "1", "2"))
        cast(Any, copy.deepcopy(model)).to(torch.bfloat16).save_pretrained(source)
        read = PretrainedSource(str(source), type(model).__name__).build()
        trained = copy.deepcopy(read)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        try:
            ModelFolder(str(source), SOURCE).save(cast(Any, read), same, inputs)
            ModelFolder(str(source), SOURCE).save(cast(Any, trained), first, inputs)
            again = PretrainedSource(str(first), type(model).__name__).build()
            ModelFolder(str(first), SOURCE).save(cast(Any, again), second, inputs)
        except Error as error:
            return str(error)
        for expected, actual, what in (
            (source, same, "its exported folder differs from the bf16 source in"),
            (first, second, "a second export differs from the first in"),
        ):
            if names := _unequal_files(expected, actual):
                return f"{what} {', '.join(names)}"
    return None


def _unequal_files(expected: Path, actual: Path) -> list[str]:
    contents = [{f.name: f.read_bytes() for f in each.iterdir()} for each in (expected, actual)]
    return sorted({name for name, _ in contents[0].items() ^ contents[1].items()})


def _logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, use_cache=False).logits
