"""Export: a run's trained modules as ordinary Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from raymm.checkpoint import CheckpointStore, load_into_model
from raymm.model import MultimodalModule


class ExportError(RuntimeError):
    """Nothing to export, or nowhere to put it."""


def export_model(
    model: MultimodalModule, storage: str, output: str, tokenizer: str | None = None
) -> list[Path]:
    """Write the newest checkpoint's modules.

    Args:
        model: the run's model description; it is materialized in this process.
        storage: the run's folder.
        output: a folder that does not exist yet; it gets ``language_model/``,
            ``{encoder}_encoder/`` and ``{encoder}_projector/``.
        tokenizer: folder of a tokenizer to put with the language model.

    Returns:
        The folders written. Modules that Hugging Face has no class for are written as
        ``model.safetensors`` with their state dict.

    Raises:
        ExportError: if there is no checkpoint, or ``output`` exists.
    """
    target = Path(output)
    if target.exists():
        raise ExportError(f"output is {output!r}, which exists; give a new folder")
    checkpoint = CheckpointStore(storage).latest()
    if checkpoint is None:
        raise ExportError(f"{storage!r} has no checkpoint")
    load_into_model(model, checkpoint)
    temporary = target.with_name(target.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    names = ["language_model"]
    _save(model.language_model.module, temporary / "language_model")
    if tokenizer is not None:
        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).save_pretrained(
            temporary / "language_model"
        )
    for name, encoder in model.encoders.items():
        _save(encoder.module, temporary / f"{name}_encoder")
        names.append(f"{name}_encoder")
        if encoder.projector is not None:
            _save(encoder.projector, temporary / f"{name}_projector")
            names.append(f"{name}_projector")
    temporary.rename(target)
    return [target / name for name in names]


def _save(module: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True)
    if isinstance(module, PreTrainedModel):
        module.save_pretrained(folder)
        return
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
