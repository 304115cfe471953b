"""Export: a run's trained modules as ordinary Hugging Face folders, adapters as ``peft``'s."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from raymm.actors.adapters.lora import has_adapters, is_adapter, plain_copy
from raymm.actors.optimizer.finite import not_finite
from raymm.actors.storage.folder import PARTIAL
from raymm.actors.weights.parametrized import computes_weights, with_weights_of_its_class
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.conversations.text import load_tokenizer
from raymm.files.output import Output
from raymm.model.modality_module import ModalityModule
from raymm.model.module_kind import ModuleKind
from raymm.model.multimodal import MultimodalModule
from raymm.model.whole_model import WholeModel
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.storage.adapter_folder import save_adapters
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model, load_into_whole
from raymm.storage.manifest import CheckpointError


def export_model(
    model: MultimodalModule | WholeModel, storage: str, output: str, tokenizer: str | None = None,
    say: Callable[[str], None] = print,
    trust_remote_code: bool = False,
    merge: bool = False,
    shard_size: str = "5GB",
    averaged: bool = False,
) -> list[Path]:
    """Write the modules of the newest checkpoint that is whole.

    Args:
        model: the run's model description; it is materialized in this process.
        storage: the run's folder, or its URL.
        output: a folder that does not exist yet; it gets ``language_model/``,
            ``{encoder}_encoder/`` and ``{encoder}_projector/``; of a whole
            model it is the folder of its class, with the same keys, in shards.
        tokenizer: folder of a tokenizer to put with the language model, or of a whole model's
            processor, whose template and files are put beside its weights.
        say: is told of newer checkpoints that are corrupt.
        trust_remote_code: run Python files that the tokenizer's folder brings.
        merge: write modules with adapters as ordinary ones, whose weights have what the adapters
            add. Otherwise they become folders of ``peft``, which name the folder of the module
            without adapters; of one that is of no folder that is written, too, as
            ``{module}_base``. Of a whole model ``model/`` and ``adapters/``, or the latter alone,
            where nothing but adapters of a folder is trained.
        shard_size: of a whole model, that no file is to exceed, as transformers writes it.
        averaged: write moving averages of the weights that were trained (``optimizer.ema``).

    Returns:
        The folders written. Modules that Hugging Face has no class for are written as
        ``model.safetensors`` with their state dict.

    Raises:
        ConfigError: if ``output`` exists or cannot be made; before anything is read.
        CheckpointError: if there is no checkpoint, it has no averages, or a weight is not finite.
        CheckpointError: if no checkpoint is whole, or it is of another model.
    """
    place = Output.new_folder("output", output)
    place.check()
    target = place.target
    checkpoint = CheckpointStore(storage).newest()
    if checkpoint is None:
        raise CheckpointError(f"{storage!r} has no checkpoint")
    for line in checkpoint.warnings():
        say(line)
    whole: Any = None
    if isinstance(model, WholeModel):
        load_into_whole(model, checkpoint.folder, averaged)
        whole = model.materialize()
        _check_finite(whole, checkpoint.folder)
    else:
        load_into_model(model, checkpoint.folder, averaged)
        _check_finite(model, checkpoint.folder)
    temporary = target.with_name(f".{target.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    with place.writing():
        if isinstance(model, WholeModel):
            names = _write_whole(model, whole, temporary, target, merge, shard_size)
            if tokenizer is not None:
                ModelProcessor(tokenizer, trust_remote_code).save(temporary / names[0])
            temporary.rename(target)
            return [target / name for name in names]
        names = _Writer(temporary, target, merge).write(model)
        if tokenizer is not None:
            loaded = load_tokenizer(tokenizer, trust_remote_code)
            loaded.save_pretrained(temporary / "language_model")
        temporary.rename(target)
    return [target / name for name in names]


def _write_whole(
    model: WholeModel, whole: nn.Module, folder: Path, final: Path, merge: bool, shard_size: str
) -> list[str]:
    """A whole model as a folder of its class; with adapters, as one of ``peft`` beside it. Returns
    the names of the folders, the one that the processor goes with first."""
    def save(module: nn.Module, name: str) -> None:
        plain = _of_its_class(cast(PreTrainedModel, module))
        plain.save_pretrained(folder / name, max_shard_size=shard_size)

    if not model.adapters or merge:
        save(plain_copy(whole, merged=True) if model.adapters else whole, "")
        return [""]
    trained = frozenset().union(*model.trained.values())
    if isinstance(model.source, PretrainedSource) and all(map(is_adapter, trained)):
        save_adapters(whole, folder, model.source.path, causal=False)
        return [""]
    save(plain_copy(whole, merged=False), "model")
    save_adapters(whole, folder / "adapters", str(final / "model"), causal=False)
    return ["model", "adapters"]


def _check_finite(model: nn.Module, checkpoint: Path | str) -> None:
    """
    Raises:
        CheckpointError: weights of the checkpoint, or of a frozen module's own folder, that are not
            finite. Of buffers, only NaN: an additive mask is infinite.
    """
    tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    tensors += [
        (name, buffer) for name, buffer in model.named_buffers() if bool(buffer.isnan().any())
    ]
    if names := not_finite(tensors):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise CheckpointError(
            f"with {checkpoint} the model has weights that are not finite: "
            f"{', '.join(names[:MAX_NAMED])}{more}; nothing is written. Look at the folders that "
            "frozen modules come from, or export an earlier checkpoint (move later ones away)"
        )


class _Writer:
    """Writes modules.

    Args:
        folder: gets a folder for each.
        final: what that is called in the end.
        merge: whether adapters go into the weights.
    """

    def __init__(self, folder: Path, final: Path, merge: bool) -> None:
        self._folder, self._final, self._merge = folder, final, merge
        self._names: list[str] = []

    def write(self, model: MultimodalModule) -> list[str]:
        """Every module; returns the names of their folders."""
        language = model.language_model
        self._add("language_model", language.materialize(ModuleKind.LANGUAGE_MODEL), language)
        for name, encoder in model.encoders.items():
            self._add(f"{name}_encoder", encoder.materialize(), encoder)
            if encoder.projector is not None:
                self._add(f"{name}_projector", encoder.projector, None)
        return self._names

    def _add(self, name: str, module: nn.Module, part: ModalityModule | None) -> None:
        """
        Args:
            part: whose module it is; None of a projector.
        """
        self._names.append(name)
        if not has_adapters(module) or self._merge:
            plain = plain_copy(module, merged=True) if has_adapters(module) else module
            _save(plain, self._folder / name)
            return
        base = None if part is None else part.folder
        if base is None:
            self._names.append(f"{name}_base")
            base = str(self._final / f"{name}_base")
            _save(plain_copy(module, merged=False), self._folder / f"{name}_base")
        save_adapters(module, self._folder / name, base, name == "language_model")


def _of_its_class(module: PreTrainedModel) -> PreTrainedModel:
    """What ``from_pretrained`` of its class finds all weights in."""
    if not computes_weights(module):
        return module
    with torch.device("meta"):
        plain = type(module)(copy.deepcopy(module.config))
    return with_weights_of_its_class(module, plain)


def _save(module: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True)
    if isinstance(module, PreTrainedModel):
        _of_its_class(module).save_pretrained(folder)
        return
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
