"""Checkpoint shards of a GPU of a multiplexed program, in the format that ranks of a pipeline
write and read (:mod:`raymm.actors.optimizer.checkpoint_shards`): a run can go on in the other
style."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from raymm.actors.multiplexed.device import Device
from raymm.actors.optimizer.checkpoint_shards import (
    Loaded,
    ShardFile,
    copy_tensors,
)
from raymm.actors.optimizer.checkpoint_writer import Files
from raymm.actors.optimizer.stored_tensors import StoredTensors
from raymm.scheduler.plan.stage import StageId


def files_to_save(
    gpu: int, device: Device, saved_nodes: Collection[str], skip_frozen: Collection[str],
) -> Files:
    """The modules that this GPU, of all with a copy, writes, and their optimizer state.

    Args:
        gpu: its number.
        device: the GPU.
        saved_nodes: the modules.
        skip_frozen: modules whose frozen weights are elsewhere and need no copy.
    """
    tensors: dict[str, torch.Tensor] = {}
    for node in sorted(saved_nodes):
        trained = any(p.requires_grad for p in device.modules[node].parameters())
        for name, tensor in device.modules[node].state_dict(keep_vars=True).items():
            # Running statistics of what is trained change, though nothing has their gradient.
            changes = tensor.requires_grad or (not isinstance(tensor, nn.Parameter) and trained)
            if changes or node not in skip_frozen:
                tensors[f"{node}/{name}"] = tensor.detach()
    state = {
        f"optimizer/{stage.module}/{name}/{key}": value
        for (stage, name, key), value in device.optimizer.state_tensors().items()
        if stage.module in saved_nodes
    }
    kinds = {"model": tensors, "optimizer": state}
    return {f"{kind}-rank{gpu}.safetensors": part for kind, part in kinds.items() if part}


def load_shards(
    folder: str, index: Mapping[str, str], files: Mapping[str, ShardFile], device: Device, step: int
) -> Loaded:
    """Read parameters, buffers and optimizer state.

    Args:
        folder: location of the checkpoint.
        index: file of every stored name.
        files: what the files must be.
        device: the GPU.
        step: optimizer steps taken.

    Raises:
        ShardError: a file is missing, torn or changed, or shapes or dtypes differ.
    """
    stored = StoredTensors(folder, index, files)
    own = [
        (f"{node}/{name}", tensor.detach())
        for node, module in device.modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    read = stored.read(dict.fromkeys(name for name, _ in own))
    copy_tensors(read, own)
    taken = list(read)
    keys = stored.optimizer_keys()
    state: dict[tuple[StageId, str, str], torch.Tensor] = {}
    for stage, name in device.optimizer.updated:
        base = f"optimizer/{stage.module}/{name}"
        stored_names = dict.fromkeys(f"{base}/{key}" for key in keys.get(base, ()))
        for full, value in stored.read(stored_names).items():
            state[stage, name, full.rpartition("/")[2]] = value
            taken.append(full)
    device.optimizer.load_state_tensors(state, step)
    lacking = [
        f"{stage.module}/{name}" for stage, name in device.optimizer.parameters
        if f"{stage.module}/{name}" not in read
    ]
    return Loaded(lacking, taken)
