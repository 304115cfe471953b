"""Loading of checkpoints into running processes, or into a model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path

import torch

from raymm.actors.optimizer.averages import AVERAGE_NAME
from raymm.actors.optimizer.checkpoint_shards import copy_tensors, stored_names
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.errors import CheckpointError
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.storage.checkpoint import call_ranks
from raymm.storage.manifest import Manifest, read_manifest

# Maximum number of parameters that an error names.
NAMES_SHOWN = 5


def restore(
    parallel: ParallelModule, folder: Path | str, dropped: tuple[str, ...] = ()
) -> Manifest:
    """Load a checkpoint into running processes. Each process verifies the files that it reads.
    Raise a ``CheckpointError`` if the checkpoint is damaged, lacks trainable parameters of the
    model, has tensors that the model lacks or does not train, has other shapes or dtypes, or is not
    finite.

    Args:
        dropped: name prefixes of tensors that are not needed any more.
    """
    manifest = read_manifest(folder)
    try:
        loaded = call_ranks(
            parallel.group, "load", str(folder), manifest.index, manifest.shards, manifest.step
        )
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    _check_both_ways(
        folder, {name for loaded_names in loaded for name in loaded_names.lacking},
        {
            name for name in stored_names(manifest.index) if not name.startswith(dropped)
        } - {name for loaded_names in loaded for name in loaded_names.taken},
    )
    if names := parallel.not_finite_tensors():
        raise CheckpointError(
            f"{folder} has tensors that are not finite: {', '.join(names[:MAX_NAMED])}"
        )
    parallel.restore_step(manifest.step)
    parallel.restore_kernels(manifest.kernels)
    return manifest


@singledispatch
def load_into_model(model: Model, folder: Path | str, averaged: bool = False) -> Manifest:
    """Load a checkpoint's weights into a model, which is materialized in this process.

    Raises:
        CheckpointError: as in :func:`restore`, or the checkpoint has no averages.
    """
    raise TypeError(f"models of class {type(model).__name__} are not loaded in one process")


@load_into_model.register
def _(model: PretrainedVlm, folder: Path | str, averaged: bool = False) -> Manifest:
    tensors = model.materialize().state_dict(keep_vars=True)
    return _load_parts({
        module: (
            {f"{module}/module.{name}": tensor for name, tensor in tensors.items()},
            {f"{module}/module.{name}" for name in trained},
        )
        for module, trained in model.trained.items()
    }, folder, averaged)


@load_into_model.register
def _(model: MultimodalModule, folder: Path | str, averaged: bool = False) -> Manifest:
    model.materialize()
    return _load_parts({
        name: (
            {f"{name}/{key}": t for key, t in modality.state_dict(keep_vars=True).items()},
            {f"{name}/{key}" for key, p in modality.named_parameters() if p.requires_grad},
        )
        for name, modality in model.modalities.items()
    }, folder, averaged)


def _load_parts(
    parts: Mapping[str, tuple[Mapping[str, torch.Tensor], set[str]]], folder: Path | str,
    averaged: bool,
) -> Manifest:
    """Load tensors in place. ``parts``: per module, tensors by stored name, and names of trained
    ones."""
    manifest = read_manifest(folder)
    stored = StoredTensors(folder, manifest.index, manifest.shards)
    unread = {name for name in stored_names(manifest.index) if not name.startswith("optimizer/")}
    lacking: set[str] = set()
    copied = 0
    for tensors, trained in parts.values():
        try:
            read = stored.read(dict.fromkeys(tensors))
            copy_tensors(read, tensors.items())
            copied += _copy_averages(stored, tensors) if averaged else 0
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        lacking |= trained - set(read)
        unread -= set(read)
    _check_both_ways(folder, lacking, unread)
    _check_averages(folder, averaged, copied)
    return manifest


def _copy_averages(stored: StoredTensors, own: Mapping[str, torch.Tensor]) -> int:
    """Replace parameters by their averages in the checkpoint; return their number."""
    averages = stored.read({f"optimizer/{name}/{AVERAGE_NAME}": None for name in own})
    named = {f"optimizer/{name}/{AVERAGE_NAME}": tensor for name, tensor in own.items()}
    rounded = {name: value.to(named[name].dtype) for name, value in averages.items()}
    copy_tensors(rounded, named.items())
    return len(averages)


def _check_averages(folder: Path | str, averaged: bool, copied: int) -> None:
    if averaged and not copied:
        raise CheckpointError(
            f"{folder} has no averaged weights; a run saves them if optimizer.ema is set"
        )


def _check_both_ways(folder: Path | str, lacking: set[str], left: set[str]) -> None:
    if lacking:
        raise CheckpointError(
            f"{folder} lacks {len(lacking)} trainable parameter(s) of this model: {_few(lacking)}"
        )
    if left:
        state = {name for name in left if name.startswith("optimizer/")}
        lost = left - state or state
        description = "tensor(s) that this model lacks"
        if lost == state:
            description = "optimizer tensor(s) of parameters that this model does not train"
        raise CheckpointError(
            f"{folder} has {len(lost)} {description}, which would be lost: {_few(lost)}"
        )


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
