"""Checkpoint shards: what one rank writes and reads, as safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


class ShardError(RuntimeError):
    """A checkpoint shard that is missing, torn, or does not fit the plan."""


def write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors to ``path`` and force them to disk. Not atomic by itself: a checkpoint
    counts only once its manifest is committed."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def read_tensors(folder: Path, index: dict[str, str], names: list[str]) -> dict[str, torch.Tensor]:
    """Read tensors by name.

    Args:
        folder: the checkpoint.
        index: file name per tensor name.
        names: what to read; names that are not in the index are left out.

    Raises:
        ShardError: if a file is missing or torn.
    """
    by_file: dict[str, list[str]] = {}
    for name in names:
        if name in index:
            by_file.setdefault(index[name], []).append(name)
    tensors = {}
    for file, wanted in by_file.items():
        try:
            with safe_open(folder / file, framework="pt") as handle:
                for name in wanted:
                    tensors[name] = handle.get_tensor(name)
        except Exception as error:  # OSError, or safetensors' own error type
            raise ShardError(f"cannot read {folder / file}: {error}") from None
    return tensors


def copy_tensors(
    stored: Mapping[str, torch.Tensor], own: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy stored tensors into a model's, in place.

    Args:
        stored: by name.
        own: (name, tensor), where a name may occur more than once; those that are not stored
            stay as they are.

    Raises:
        ShardError: if shapes differ; nothing was copied then.
    """
    pairs = [(name, stored[name], tensor) for name, tensor in own if name in stored]
    for name, there, here in pairs:
        if here.shape != there.shape:
            raise ShardError(
                f"{name} is {tuple(there.shape)} in the checkpoint, but {tuple(here.shape)} "
                "in the model"
            )
    with torch.no_grad():
        for _, there, here in pairs:
            here.copy_(there)
