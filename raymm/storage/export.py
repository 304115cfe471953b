"""Export of trained modules as Hugging Face folders, and of adapters as ``peft`` folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from raymm.actors.adapters.lora import has_adapters, is_adapter, plain_copy
from raymm.actors.optimizer.finite import not_finite
from raymm.actors.storage.folder import PARTIAL, set_file_modes
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.conversations.text import load_tokenizer
from raymm.errors import CheckpointError
from raymm.files.output import Output
from raymm.model.features import EXPORT
from raymm.model.modality_module import ModalityModule
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.runtime.skipped_step import MAX_NAMED
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from raymm.storage.model_folder import SOURCE, ModelFolder, save_adapters


def export_model(
    model: Model, storage: str, output: str, tokenizer: str | None = None,
    say: Callable[[str], None] = print,
    trust_remote_code: bool = False,
    merge: bool = False,
    shard_size: str = "5GB",
    averaged: bool = False,
    dtype: str = SOURCE,
) -> list[Path]:
    """Write the modules of the newest intact checkpoint.

    Args:
        model: model description of the run; materialized in this process.
        output: new folder. Gets ``language_model/``, ``{encoder}_encoder/`` and
            ``{encoder}_projector/``. For a Hugging Face VLM it becomes a folder of the model's
            class, with the same keys, in shards.
        tokenizer: folder of the tokenizer to add to the language model. For a Hugging Face VLM,
            folder of the processor, whose template and files are added to the weights.
        say: called with a line about each newer checkpoint that is corrupt.
        trust_remote_code: True to run Python files in the folder of the tokenizer or processor.
        merge: add adapters to the weights of their modules. Otherwise adapters become ``peft``
            folders that name the folder of the module without adapters. A module without a folder
            is also written, as ``{module}_base``. A Hugging Face VLM gets ``model/`` and
            ``adapters/``, or only adapters if nothing else is trained.
        shard_size: maximum file size for a Hugging Face VLM, in the notation of transformers.
        averaged: write moving averages of trained weights (``optimizer.ema``).
        dtype: ``"source"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``; ``"source"`` stores
            each tensor in the dtype of the folder that it was loaded from, or fp32 without one.

    Returns:
        The written folders. Modules without a Hugging Face class are written as
        ``model.safetensors`` with their state dict.

    Raises:
        ConfigError: ``output`` exists or cannot be created. Raised before anything is read.
        CheckpointError: there is no intact checkpoint, it belongs to another model, has no
            averages, or a weight is not finite; or the written model differs from the trained one
            when read back.
        ModelError: a folder's format or ``dtype`` cannot be written.
    """
    destination = Output.new_folder("output (--out)", output)
    destination.check()
    target = destination.target
    writer = _Writer(target, merge, shard_size, dtype)
    writer.check(model)
    checkpoint = CheckpointStore(storage).newest()
    if checkpoint is None:
        raise CheckpointError(
            f"run.storage_path is {storage!r}, which has no checkpoint; run `raymm train` first, "
            "or set it to the folder of a run"
        )
    for line in checkpoint.warnings():
        say(line)
    load_into_model(model, checkpoint.folder, averaged)
    _check_finite(model.materialize(), checkpoint.folder)
    temporary = target.with_name(f".{target.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with destination.writing():
            names = writer.write(model, temporary)
            if tokenizer is not None:
                writer.write_tokenizer(model, temporary, tokenizer, trust_remote_code)
            set_file_modes(temporary)
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / name for name in names]


def _check_finite(model: nn.Module, checkpoint: Path | str) -> None:
    """Raise CheckpointError for weights that are not finite. Buffers may be infinite, as additive
    masks are, but not NaN."""
    tensors = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    tensors += [
        (name, buffer) for name, buffer in model.named_buffers() if bool(buffer.isnan().any())
    ]
    if names := not_finite(tensors):
        suffix = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise CheckpointError(
            f"with {checkpoint} the model has weights that are not finite: "
            f"{', '.join(names[:MAX_NAMED])}{suffix}; nothing is written. Look at the folders that "
            "frozen modules come from, or export an earlier checkpoint (move later ones away)"
        )


class _Writer:
    def __init__(self, final: Path, merge: bool, shard_size: str, dtype: str) -> None:
        self._final, self._merge = final, merge
        self._shard_size, self._dtype = shard_size, dtype
        self._names: list[str] = []

    @singledispatchmethod
    def check(self, model: Model) -> None:
        """Raise ModelError if a folder cannot be written in the dtype."""
        model.require(EXPORT)

    @check.register
    def _(self, model: PretrainedVlm) -> None:
        if not self._adapters_only(model):
            ModelFolder(_path(model.source), self._dtype)

    @check.register
    def _(self, model: MultimodalModule) -> None:
        for modality in (model.language_model, *model.encoders.values()):
            if modality.lora is None or self._merge:
                ModelFolder(modality.folder, self._dtype)

    def _adapters_only(self, model: PretrainedVlm) -> bool:
        trained = frozenset().union(*model.trained.values())
        return (
            bool(model.adapters) and not self._merge and _path(model.source) is not None
            and all(map(is_adapter, trained))
        )

    @singledispatchmethod
    def write_tokenizer(
        self, model: Model, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        """Add the files of a tokenizer, or of a processor, to the written model."""

    @write_tokenizer.register
    def _(
        self, model: PretrainedVlm, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        in_model = folder / "model"
        target = in_model if in_model.is_dir() else folder
        ModelProcessor(tokenizer, trust_remote_code).save(target)

    @write_tokenizer.register
    def _(
        self, model: MultimodalModule, folder: Path, tokenizer: str, trust_remote_code: bool
    ) -> None:
        loaded = load_tokenizer(tokenizer, trust_remote_code)
        loaded.save_pretrained(folder / "language_model")

    @singledispatchmethod
    def write(self, model: Model, folder: Path) -> list[str]:
        """Write a model, which is materialized, and its adapters unless merged. Return the names of
        the folders."""
        raise TypeError(f"no format for {type(model).__name__}")

    @write.register
    def _(self, model: PretrainedVlm, folder: Path) -> list[str]:
        source, whole = _path(model.source), model.materialize()

        def save(module: nn.Module, name: str) -> None:
            writer = ModelFolder(source, self._dtype)
            example, plain = dict(model.example), cast(PreTrainedModel, module)
            writer.save(plain, folder / name, example, self._shard_size)

        if not model.adapters or self._merge:
            save(plain_copy(whole, merged=True) if model.adapters else whole, "")
            return [""]
        if self._adapters_only(model):
            save_adapters(whole, folder, source, causal=False)
            return [""]
        save(plain_copy(whole, merged=False), "model")
        save_adapters(whole, folder / "adapters", str(self._final / "model"), causal=False)
        return ["model", "adapters"]

    @write.register
    def _(self, model: MultimodalModule, folder: Path) -> list[str]:
        language = model.language_model
        module = language.materialize()
        sample = {"input_ids": torch.arange(8)[None] % _vocabulary(module)}
        self._add(folder, "language_model", module, language, sample)
        for name, encoder in model.encoders.items():
            module = encoder.materialize()
            self._add(folder, f"{name}_encoder", module, encoder, None)
            if encoder.projector is not None:
                self._add(folder, f"{name}_projector", encoder.projector, None, None)
        return self._names

    def _add(
        self, folder: Path, name: str, module: nn.Module, part: ModalityModule | None,
        inputs: Mapping[str, Any] | None,
    ) -> None:
        self._names.append(name)
        source = None if part is None else part.folder
        if not has_adapters(module) or self._merge:
            plain = plain_copy(module, merged=True) if has_adapters(module) else module
            self._save(plain, folder / name, source, inputs)
            return
        base = source
        if base is None:
            self._names.append(f"{name}_base")
            base = str(self._final / f"{name}_base")
            plain = plain_copy(module, merged=False)
            self._save(plain, folder / f"{name}_base", None, inputs)
        save_adapters(module, folder / name, base, name == "language_model")

    def _save(
        self, module: nn.Module, folder: Path, source: str | None, inputs: Mapping[str, Any] | None
    ) -> None:
        if isinstance(module, PreTrainedModel):
            ModelFolder(source, self._dtype).save(module, folder, inputs)
            return
        folder.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")


def _path(source: Any) -> str | None:
    return source.path if isinstance(source, PretrainedSource) else None


def _vocabulary(module: nn.Module) -> int:
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    return len(embedding.weight) if isinstance(embedding, nn.Embedding) else 1
