"""Description of a run as plain data, saved in checkpoints and compared when the run resumes
(:mod:`raymm.storage.resuming`)."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.weights.hub_folder import local_folder
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.source import FactorySource, LiveSource, ModuleSource
from raymm.config.sections import RunConfig
from raymm.data import DataConfig, ModalityDataConfig
from raymm.data.readers import Dataset, Mixture, Repeated
from raymm.data.remote.path import DataPath, read_range, size_of, version_of
from raymm.model.modality_module import ModalityModule
from raymm.model.model import Model
from raymm.model.module_dag import ModuleDag
from raymm.model.multimodal import MultimodalModule
from raymm.model.vlm import PretrainedVlm
from raymm.packages import import_object, is_import_path
from raymm.storage.code_digest import code_digest

# Files up to this size are hashed completely. Of larger files, BLOCKS blocks at equal distances are
# hashed, including the first and the last; other changes that keep the size only show in the file
# time.
WHOLE_BYTES = 16 * 2**20
BLOCKS = 16
BLOCK_BYTES = 2**16
# Number of files read in parallel, and maximum number of files with separate digests; more files
# only have a common digest.
THREADS = 8
FILES_TOLD_APART = 256


def fingerprint_of_files(files: Iterable[DataPath], root: Path | None = None) -> dict[str, Any]:
    """Return plain JSON: ``{"files": {name: "size digest"} or their count, "bytes", "digest",
    "times"}``.

    Copying files elsewhere, also to a bucket, changes only ``times``. Raise an ``OSError`` if a
    file cannot be read, and a ``DataError`` if a server does not return a file.

    Args:
        files: in a meaningful order, on which ``digest`` and ``times`` depend.
        root: folder that names are relative to; by default names have no folders.
    """
    files = list(files)
    names = [
        str(file.relative_to(root)) if root and isinstance(file, Path) else file.name
        for file in files
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = [size_of(file) for file in files]
        digests = list(pool.map(_digest, files, sizes))
    texts = {
        name: f"{size} bytes {digest}"
        for name, size, digest in zip(names, sizes, digests, strict=True)
    }
    return {
        "files": texts if len(texts) == len(files) <= FILES_TOLD_APART else len(files),
        "bytes": sum(sizes),
        "digest": _of_texts([f"{n} {d}" for n, d in zip(names, digests, strict=True)]),
        "times": _of_texts([str(version_of(file)) for file in files]),
    }


def _digest(file: DataPath, size: int) -> str:
    digest = xxhash.xxh3_64()
    if size <= WHOLE_BYTES:
        digest.update(read_range(file, 0, size) if size else b"")
    else:
        for block in range(BLOCKS):
            start = (size - BLOCK_BYTES) * block // (BLOCKS - 1)
            digest.update(read_range(file, start, BLOCK_BYTES))
    return digest.hexdigest()


def _of_texts(texts: Sequence[str]) -> str:
    return xxhash.xxh3_64("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


# Fields of a Hugging Face config that do not affect what the model computes.
_NOT_COMPUTED = {
    "architectures", "dtype", "finetuning_task", "id2label", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "return_dict", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache",
}
# Files of a tokenizer in its folder, which may also be a model's folder.
_TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.model", "*.bpe", "chat_template*", "*.jinja", "additional_chat_templates/*.jinja",
)
# Fields that affect how data are loaded, not their content.
_LOADING = {
    "train", "heldout", "heldout_fraction", "tokenizer", "modalities", "row_form",
    "ignore_columns", "num_workers", "prefetch_steps", "worker_cpus", "worker_timeout",
}


def describe_run(
    run: RunConfig,
    model: Model,
    optimizer: OptimizerConfig,
    data: DataConfig | Sequence[Any],
    splits: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Return values by field names of the configuration, as plain JSON. Raise an ``OSError`` if a
    file of the data, the tokenizer, a processor or a frozen module cannot be read.

    Args:
        splits: datasets ``"train"`` and, if configured, ``"heldout"``.
    """
    fields: dict[str, Any] = {f"run.{n}": getattr(run, n) for n in ("steps", "seed", "precision")}
    fields |= {f"optimizer.{name}": value for name, value in vars(optimizer).items()}
    fields["optimizer.modules"] = {
        module: {key: _named(value) if callable(value) else value for key, value in rule.items()}
        for module, rule in optimizer.modules.items()
    }
    for name in ("name", "schedule"):
        value = getattr(optimizer, name)
        fields[f"optimizer.{name}"] = _named(value)
        fields |= _code(
            f"optimizer.{name}", import_object(value) if is_import_path(value) else value
        )
    fields["optimizer.ema"] = optimizer.ema and dataclasses.asdict(optimizer.ema)
    fields |= _of_data(data, splits)
    fields |= _of_model(model)
    for name, hooks in model.stage_hooks.items():
        for number, hook in enumerate(hooks):
            field, kind = f"model.stage_hooks.{name}.{number}", type(hook)
            parts: Any = [kind.output, kind.inputs, vars(hook)]
            fields |= {field: _named(hook), f"{field}.code": code_digest(parts)}
    return json.loads(json.dumps(fields, default=str))


@functools.singledispatch
def _of_model(model: Model) -> dict[str, Any]:
    raise TypeError(f"models of class {type(model).__name__} are not described")


def _loss(model: MultimodalModule | PretrainedVlm) -> dict[str, Any]:
    """Describe a loss in place of the cross entropy of tokens."""
    fields: dict[str, Any] = {}
    if model.preference is not None:
        fields["model.preference"] = _named(model.preference)
    if model.token_loss is not None:
        fields |= {"model.loss": _named(model.token_loss)} | _code("model.loss", model.token_loss)
    return fields


@_of_model.register
def _(model: MultimodalModule) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model.merge": _named(model.merge), "model.mask": _named(model.mask),
        "model.packing": model.packing,
    }
    fields |= _loss(model)
    fields |= _code("model.merge", model.merge) | _code("model.mask", model.mask)
    return fields | _of_modalities(model.modalities)


@_of_model.register
def _(model: ModuleDag) -> dict[str, Any]:
    return {"model.edges": model.graph.edges} | _of_modalities(model.modalities)


def _of_modalities(modalities: Mapping[str, ModalityModule]) -> dict[str, Any]:
    fields: dict[str, Any] = {"model.parameters": {}}
    for name, modality in modalities.items():
        source = modality.source()
        skeleton = source.skeleton()
        fields |= describe_module(f"model.{name}", modality, source, skeleton)
        fields["model.parameters"] |= _parameters(f"{name}/module", skeleton)
        if modality.projector is not None:
            fields["model.parameters"] |= _parameters(f"{name}/projector", modality.projector)
    return fields


@_of_model.register
def _(model: PretrainedVlm) -> dict[str, Any]:
    fields: dict[str, Any] = {"model.packing": model.packing} | _loss(model)
    for name, setting in model.train.items():
        if isinstance(setting, LoraConfig):
            fields |= _adapters(f"model.train.{name}.lora", setting)
        else:
            fields[f"model.train.{name}"] = setting
    skeleton = model.trained_skeleton()
    fields |= describe_source("model", model.source.origin, skeleton)
    return {**fields, "model.parameters": _parameters("model", skeleton)}


def _of_data(data: Any, splits: Mapping[str, Dataset]) -> dict[str, Any]:
    if not isinstance(data, DataConfig):
        return {"data.batches": len(data)}
    fields: dict[str, Any] = {
        f"data.{name}": value
        for name, value in data.model_dump(mode="json", exclude=_LOADING).items()
    }
    for split in splits:
        for number, source in enumerate(data.sources(split)):
            if is_import_path(form := source.row_form or data.row_form):
                fields |= _code(f"data.{split}.{number}.row_form", import_object(str(form)))
    for split, dataset in splits.items():
        readers = dataset.readers if isinstance(dataset, Mixture) else [dataset]
        fields[f"data.{split}"] = [
            {
                "name": reader.name, "rows": len(reader), "columns": dict(reader.columns),
                "text_columns": dict(reader.options.text_columns),
                **({"row_form": form} if (form := reader.options.row_form) else {}),
                "repeated": reader.digest if isinstance(reader, Repeated) else None,
                **({} if source.weight is None else {"weight": source.weight}),
                **fingerprint_of_files(reader.files),
            }
            for reader, source in zip(readers, data.sources(split), strict=True)
        ]
    tokenizer = Path(local_folder(data.tokenizer, weights=False))
    files = {file for pattern in _TOKENIZER_FILES for file in tokenizer.glob(pattern)}
    fields["data.tokenizer"] = fingerprint_of_files(sorted(files), tokenizer)
    if data.processor is not None:
        processor = Path(local_folder(data.processor, weights=False))
        settings = sorted(processor.glob("*processor*.json"))
        fields["data.processor_files"] = fingerprint_of_files(settings)
    for name, modality in data.modalities.items():
        fields |= describe_modality(f"data.modalities.{name}", modality)
    return fields


def describe_modality(where: str, modality: ModalityDataConfig) -> dict[str, Any]:
    """Describe what turns a modality's items into tensors. ``where`` prefixes field names."""
    fields: dict[str, Any] = {
        f"{where}.{key}": value for key, value in modality.model_dump(mode="json").items()
    }
    if modality.processor is None:  # the Hugging Face VLM's processor makes them
        return fields
    if (folder := Path(local_folder(modality.processor, weights=False))).is_dir():
        settings = sorted(folder.glob("*processor*.json"))
        fields[f"{where}.processor_files"] = fingerprint_of_files(settings)
    else:
        fields |= _code(f"{where}.processor", import_object(modality.processor))
    return fields


def describe_module(
    where: str, part: ModalityModule, source: ModuleSource, skeleton: nn.Module
) -> dict[str, Any]:
    """Describe the computation of a module, and its frozen weights if they come from files."""
    fields: dict[str, Any] = {}
    for name in ("lora", "projector_lora"):
        if (lora := getattr(part, name)) is not None:
            fields |= _adapters(f"{where}.{name}", lora)
    for name in ("preprocess", "postprocess_module", "postprocess_projector"):
        callback = getattr(part, f"{name}_callback")
        fields[f"{where}.{name}"] = _named(callback)
        fields |= _code(f"{where}.{name}", callback)
    return fields | describe_source(where, source.origin, skeleton)


def _adapters(where: str, lora: LoraConfig) -> dict[str, Any]:
    """Describe adapters. Earlier checkpoints lack ``use_rslora``, so only true is a field."""
    return {
        f"{where}.{key}": value for key, value in vars(lora).items() if key != "use_rslora" or value
    }


def describe_source(where: str, source: ModuleSource, skeleton: nn.Module) -> dict[str, Any]:
    """Describe the computation of a source's module, and its frozen weights."""
    fields: dict[str, Any] = {f"{where}.class": type(skeleton).__qualname__}
    config: Any = source.config
    values = _computed(config.to_dict()) if hasattr(config, "to_dict") else {}
    fields |= {f"{where}.config.{key}": value for key, value in values.items()}
    if isinstance(source, FactorySource):
        fields[f"{where}.factory"] = {"target": source.target, "kwargs": source.kwargs}
    if isinstance(source, LiveSource) or all(p.requires_grad for p in skeleton.parameters()):
        return fields  # all values are in checkpoints
    if isinstance(source, PretrainedSource):
        files = sorted(Path(source.folder).glob("*.safetensors"))
        fields[f"{where}.weights"] = fingerprint_of_files(files)
    elif (weights := getattr(source, "weights", None)) is not None:
        fields[f"{where}.weights"] = fingerprint_of_files([Path(weights)])
    else:
        fields[f"{where}.seed"] = getattr(source, "seed", None)  # a user-defined source
    return fields


def _computed(values: Any) -> Any:
    """Return a config without fields that do not affect what the model computes."""
    if not isinstance(values, dict):
        return values
    return {
        key: _computed(value) for key, value in values.items()
        if key not in _NOT_COMPUTED and not str(key).startswith("_")
        and "attn_implementation" not in str(key)
    }


def _parameters(where: str, module: nn.Module) -> dict[str, str]:
    """Describe each parameter and persistent buffer: dtype, shape, and if it is trained."""
    return {
        f"{where}.{name}": f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} "
        + (("trained" if tensor.requires_grad else "frozen")
           if isinstance(tensor, nn.Parameter) else "buffer")
        for name, tensor in module.state_dict(keep_vars=True).items()
    }


def _code(field: str, value: Any) -> dict[str, str]:
    """Describe the code of a user's function; functions of raymm are described by name."""
    if not callable(value) or _own(value):
        return {}
    return {f"{field}.code": code_digest(value)}


def _module(value: Any) -> str:
    return getattr(value, "__module__", None) or type(value).__module__


def _own(value: Any) -> bool:
    return _module(value).startswith("raymm.")


def _named(value: Any) -> Any:
    """Describe a function or a policy by name and values, without the file of raymm's own."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        return {"name": "functools:partial", "of": _named(value.func)}
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{'raymm' if _own(kind) else _module(kind)}:{kind.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"name": name, **dataclasses.asdict(value)}
    return name
