"""Checkpoint shards of a GPU of a multiplexed program, in the format that ranks of a pipeline
write and read (:mod:`raymm.actors.optimizer.checkpoint_shards`): a run can go on in the other
style."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from raymm.actors.multiplexed.device import Device
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    ShardFile,
    StoredTensors,
    WrittenShard,
    copy_tensors,
    write_shard,
)
from raymm.scheduler.plan.stage import StageId


def save_shards(
    folder: Path, gpu: int, here: Device, saved_nodes: Collection[str], skip_frozen: Collection[str]
) -> dict[str, WrittenShard]:
    """Write the modules that this GPU, of all with a copy, writes, and their optimizer state.

    Args:
        folder: an existing folder that is not committed yet.
        gpu: its number.
        here: the GPU.
        saves: the modules.
        skip_frozen: modules whose frozen weights are elsewhere and need no copy.

    Returns:
        What is in the shards, per file.
    """
    tensors: dict[str, torch.Tensor] = {}
    for node in sorted(saved_nodes):
        seen: set[int] = set()
        trained = any(p.requires_grad for p in here.modules[node].parameters())
        for name, tensor in here.modules[node].state_dict(keep_vars=True).items():
            # Running statistics of what is trained change, though nothing has their gradient.
            changes = tensor.requires_grad or (not isinstance(tensor, nn.Parameter) and trained)
            if changes or node not in skip_frozen:
                # Safetensors refuses tensors that share memory: of tied ones the others are copied.
                tied = tensor.data_ptr() in seen
                seen.add(tensor.data_ptr())
                tensors[f"{node}/{name}"] = tensor.detach().clone() if tied else tensor.detach()
    state = {
        f"optimizer/{stage.module}/{name}/{key}": value
        for (stage, name, key), value in here.optimizer.state_tensors().items()
        if stage.module in saved_nodes
    }
    files = {}
    for kind, found in (("model", tensors), ("optimizer", state)):
        if found:
            file = f"{kind}-rank{gpu}.safetensors"
            files[file] = write_shard(folder / file, found)
    return files


def load_shards(
    folder: Path, index: Mapping[str, str], files: Mapping[str, ShardFile], here: Device, step: int
) -> Loaded:
    """Read parameters, buffers and optimizer state.

    Args:
        folder: of the checkpoint.
        index: file of every stored name.
        files: what the files must be.
        here: the GPU.
        step: optimizer steps taken.

    Raises:
        ShardError: a file is missing, torn or changed, or shapes or dtypes differ.
    """
    stored = StoredTensors(folder, index, files)
    own = [
        (f"{node}/{name}", tensor.detach())
        for node, module in here.modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    read = stored.read(dict.fromkeys(name for name, _ in own))
    copy_tensors(read, own)
    taken = list(read)
    keys = stored.optimizer_keys()
    state: dict[tuple[StageId, str, str], torch.Tensor] = {}
    for stage, name in here.optimizer.updated:
        base = f"optimizer/{stage.module}/{name}"
        wanted = dict.fromkeys(f"{base}/{key}" for key in keys.get(base, ()))
        for full, value in stored.read(wanted).items():
            state[stage, name, full.rpartition("/")[2]] = value
            taken.append(full)
    here.optimizer.load_state_tensors(state, step)
    lacking = [
        f"{stage.module}/{name}" for stage, name in here.optimizer.parameters
        if f"{stage.module}/{name}" not in read
    ]
    return Loaded(lacking, taken)
