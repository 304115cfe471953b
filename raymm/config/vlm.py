"""Whole models of a configuration: a folder, and example inputs from its own processor."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from raymm.actors.modules.blocks import input_embeddings, method_of
from raymm.actors.stages.token_loss import ACCEPTED, TokenLoss
from raymm.actors.storage.folder import PARTIAL, set_file_modes
from raymm.actors.storage.location import is_bucket
from raymm.actors.weights.hub_folder import is_hub_id
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.actors.weights.stored_weights import header_tensors, weight_files
from raymm.config.model_section import FROM_PROCESSOR, AdaptersSection, LossSection, ModelSection
from raymm.config.sections import TrainConfig
from raymm.data import DataConfig, open_split
from raymm.data.conversations.processor import ModelProcessor, example_items
from raymm.data.loading.processed import ProcessedBuilder
from raymm.errors import ConfigError, DataError, ModelError, NotRunError, SampleError
from raymm.files.output import Output
from raymm.kernels.preference import PreferenceLoss
from raymm.model.batch_rules import LABELS
from raymm.model.vlm import LANGUAGE, PretrainedVlm, from_pretrained
from raymm.packages import user_function

# Samples that are tried per modality to find a usable one.
_TRIED = 16
# Folder of the model with new tokens in the run's folder, and the file in it with its sources.
FOLDER, RECORD = "model", "new_tokens.json"
_FIELD = "model.new_tokens"
# Files of a model's folder that are copied unchanged.
_COPIED = ("generation_config.json", "*.py")
# Number of rows that are summed at once.
_CHUNK = 4096


def build_vlm(config: TrainConfig) -> PretrainedVlm:
    """Build the model of ``model.path``.

    Without data modalities, the towers are found with synthetic items, and frozen unless
    ``model.train`` names them. With ``model.new_tokens``, the configuration is changed to the
    folder with these tokens.

    Raises:
        ConfigError: the folder, the data or ``model.train`` do not fit each other; names the field.
        DataError: the data cannot be read.
        ProbeError: the model cannot be split into towers.
    """
    section = config.model
    assert section.path is not None  # otherwise the model has parts
    if config.data.processor is None:
        raise ConfigError("data.processor is not given; accepted: the folder of a processor")
    new_rows = use_new_tokens(config)
    example = example_batch(config.data)
    try:
        model = from_pretrained(
            section.path, example,
            {
                name: setting.lora.build() if isinstance(setting, AdaptersSection) else setting
                for name, setting in section.train.items()
            },
            seed=config.run.seed, trust_remote_code=section.trust_remote_code,
            packing=section.packing, new_rows=new_rows,
            preference=preference_of(section), token_loss=token_loss_of(section),
        )
    except ValueError as error:
        made_by = ""
        if isinstance(error, NotRunError):
            made_by = (
                f". Its inputs come from the processor in {config.data.processor!r}; is that the "
                "model's own processor?"
            )
        raise ConfigError(f"model: {error}{made_by}") from error
    if not config.data.modalities:
        for name in model.part_names:
            if name != LANGUAGE and name not in section.train:
                model.set_frozen(name, True)  # no gradient would reach it
    return model


def preference_of(section: ModelSection) -> PreferenceLoss | None:
    """Return the loss for pairs of answers of a model; None for cross entropy."""
    if not isinstance(section.loss, LossSection):
        return None
    return PreferenceLoss(**section.loss.dpo.model_dump())


def token_loss_of(section: ModelSection) -> TokenLoss | None:
    """Return the custom loss of tokens of a model; None for another loss. Raise a ConfigError if it
    cannot be imported or called."""
    if not isinstance(section.loss, str):
        return None
    return user_function("model.loss", section.loss, ACCEPTED)


def example_batch(data: DataConfig) -> dict[str, torch.Tensor]:
    """Return the processor's output for a few of the first training samples, with items of all
    ``data.modalities``, or for synthetic items if there are none. Raises DataError if no sample
    with items of a modality can be used, or the data cannot be read."""
    if not data.modalities:  # synthetic items need no rows
        processor = ProcessedBuilder(data, None).processor  # type: ignore[arg-type]
        if items := list(example_items(processor)):
            return processor(*map(list, zip(*items, strict=True)))
    dataset = open_split(data, "train")
    builder = ProcessedBuilder(data.model_copy(update={"on_error": "raise"}), dataset)
    if not data.modalities:
        return _text_example(builder)
    chosen: list[int] = []
    for kind in data.modalities:
        rows = dataset.counts[kind].nonzero()[0]
        failure = f"no sample of data.train has items of data.modalities.{kind}"
        for index in map(int, rows[:_TRIED]):
            try:
                builder.build([index])
            except SampleError as error:
                failure = str(error)
                continue
            chosen.append(index)
            break
        else:
            raise DataError(f"no sample of data.train can be used to try the model: {failure}")
    batch = builder.processor_batch(list(dict.fromkeys(chosen)))
    return {name: value for name, value in batch.items() if name != LABELS}


def _text_example(builder: ProcessedBuilder) -> dict[str, torch.Tensor]:
    """Return the output of a processor of text alone for the first usable sample."""
    failure = ""
    for index in range(min(_TRIED, len(builder.dataset))):
        try:
            batch = builder.processor_batch([index])
            return {name: value for name, value in batch.items() if name != LABELS}
        except SampleError as error:
            failure = str(error)
    raise DataError(f"no sample of data.train can be used to try the model: {failure}")


def use_new_tokens(config: TrainConfig) -> range:
    """Replace ``model.path`` by the run's folder with new tokens, in place, and write it if
    missing.

    Returns:
        Ids of the new tokens; empty if none are requested.

    Raises:
        ConfigError: the model or the processor cannot have such tokens, or the run's folder has
            another model.
        DataError, ModelError: a processor or model cannot be read.
    """
    section, data = config.model, config.data
    if section.new_tokens is None:
        return range(0)
    if is_bucket(config.run.storage_path):
        raise ConfigError(
            f"{_FIELD} is given, but run.storage_path is {config.run.storage_path!r}; accepted: a "
            "folder that all nodes share, where ranks read the model with new tokens"
        )
    output = Output.folder("run.storage_path", config.run.storage_path, FOLDER)
    target = output.target.absolute()
    assert section.path is not None and data.processor is not None
    if section.path != str(target):
        record = {
            "model": _name(section.path), "processor": _name(data.processor),
            "new_tokens": _listed(section.new_tokens),
        }
        if target.exists():
            _check_same(target, record)
        else:
            with Output.folder("run.storage_path", config.run.storage_path).writing():
                _write(config, target, record)
        if data.tokenizer == data.processor:
            data.replace_files(tokenizer=str(target))
        section.replace_files(path=str(target))
        data.replace_files(processor=str(target))
    return range(*_record(target)["ids"])


def _name(path: str) -> str:
    return path if is_hub_id(path) else str(Path(path).resolve())


def _listed(tokens: str | tuple[str, ...]) -> str | list[str]:
    return tokens if isinstance(tokens, str) else list(tokens)


def _record(folder: Path) -> dict[str, Any]:
    """Return the sources of a folder. Raises ConfigError if :func:`use_new_tokens` did not write
    it."""
    try:
        return json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"{_FIELD} is given, but {str(folder)!r}, the folder of the model with new tokens, has "
            "other content; accepted: another run.storage_path"
        ) from None


def _check_same(folder: Path, record: dict[str, Any]) -> None:
    """Raise a ConfigError if a folder has other sources."""
    stored = _record(folder)
    for name, value in record.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{_FIELD}: {str(folder)!r} was made with {name} {stored.get(name)!r}, and now it "
                f"is {value!r}. Give the run another run.storage_path"
            )


def _write(config: TrainConfig, target: Path, record: dict[str, Any]) -> None:
    section, trust = config.model, config.model.trust_remote_code
    assert section.path is not None and section.new_tokens is not None
    assert config.data.processor is not None
    processor = ModelProcessor(config.data.processor, trust)
    source = PretrainedSource(section.path, trust_remote_code=trust)
    source.check()
    skeleton = source.skeleton()
    old = _rows_of(skeleton)
    old_ids = {i for i in processor.tokenizer.get_vocab().values() if i < old}
    rows = _add(processor.tokenizer, section.new_tokens, old)
    if reused := sorted(old_ids.intersection(rows)):
        raise ConfigError(
            f"{_FIELD}: the ids of new tokens would be {rows.start} to {rows.stop - 1}, but the "
            f"processor already uses some of them ({reused[0]}); accepted: a processor whose new "
            "tokens come after all others"
        )
    temporary = target.with_name(f".{FOLDER}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        folder = Path(source.folder)
        for file in (file for pattern in _COPIED for file in folder.glob(pattern)):
            shutil.copyfile(file, temporary / file.name)
        processor.save(temporary)
        assert source.config is not None
        _write_weights(folder, source.config, skeleton, temporary, old_ids, rows)
        _grown_config(source.config, old, max(old, rows.stop)).save_pretrained(temporary)
        full_record = {**record, "ids": [rows.start, rows.stop]}
        (temporary / RECORD).write_text(json.dumps(full_record, indent=2) + "\n")
        _check_read(temporary, trust, old, rows)
        set_file_modes(temporary)
        try:
            temporary.rename(target)
        except OSError:  # the same command, started twice, has written it meanwhile
            if not target.is_dir():
                raise
            _check_same(target, record)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rows_of(skeleton: nn.Module) -> int:
    """Return the number of ids that a model has embeddings for. Raises ConfigError if the number of
    logits differs."""
    rows = len(input_embeddings(skeleton).weight)
    head = method_of(skeleton, "get_output_embeddings")()
    predicted = rows if head is None else len(head.weight)
    if predicted != rows:
        raise ConfigError(
            f"{_FIELD} is given, but {type(skeleton).__name__} has embeddings for {rows} ids and "
            f"logits for {predicted}; accepted: models with the same number of both"
        )
    return rows


def _add(tokenizer: Any, request: str | tuple[str, ...], old: int) -> range:
    """Add tokens to a tokenizer in place, and return the ids that get new rows; the model has rows
    for ``old`` ids. Raises ConfigError for tokens that already exist or are not requested."""
    old_vocabulary = tokenizer.get_vocab()
    without_rows = sorted((i, token) for token, i in old_vocabulary.items() if i >= old)
    if request == FROM_PROCESSOR:
        if not without_rows:
            raise ConfigError(
                f"{_FIELD} is {FROM_PROCESSOR!r}, but the model has rows for all tokens of the "
                f"processor (ids up to {old - 1}); leave it out, or list the tokens to add"
            )
        return range(old, without_rows[-1][0] + 1)
    for token in request:
        if old_vocabulary.get(token, old) < old:
            raise ConfigError(
                f"{_FIELD} has {token!r}, which is a token of the processor and the model already "
                f"(id {old_vocabulary[token]}); leave it out"
            )
    if unlisted := [token for _, token in without_rows if token not in request]:
        raise ConfigError(
            f"{_FIELD}: the processor has tokens that the model has no rows for: "
            f"{', '.join(map(repr, unlisted[:5]))}; list them, too, or give {FROM_PROCESSOR!r}"
        )
    tokenizer.add_tokens([token for token in request if token not in old_vocabulary])
    after = tokenizer.get_vocab()
    for token in request:
        ids = tokenizer.encode(token, add_special_tokens=False)
        if token not in after or after[token] not in ids:
            raise ConfigError(
                f"{_FIELD} has {token!r}, which {type(tokenizer).__name__} does not encode as that "
                "token; accepted: texts that it leaves unchanged"
            )
    ids = [after[token] for token in request]
    return range(min(*ids, old), max(ids) + 1)


def _write_weights(
    folder: Path, config: PretrainedConfig, skeleton: nn.Module, out: Path, old_ids: set[int],
    rows: range,
) -> None:
    """Write a folder's weights with new rows, and link files without the embedding and the head.
    Raises ConfigError if the folder has the embedding under another name."""
    old = len(input_embeddings(skeleton).weight)
    files = weight_files(folder, config)
    headers = {file: header_tensors(file) for file in files}
    embeddings = (input_embeddings(skeleton), method_of(skeleton, "get_output_embeddings")())
    grown: set[str] = set()
    for path, module in skeleton.named_modules():
        for leaf in module._parameters if module in embeddings else ():
            ending = ".".join((*path.split(".")[-1:], leaf))
            names = {
                name for tensors in headers.values() for name, tensor in tensors.items()
                if f".{name}".endswith(f".{ending}") and len(tensor.shape) and len(tensor) == old
            }
            if len(names) > 1 or not names and module is embeddings[0]:
                raise ConfigError(
                    f"{_FIELD}: the embedding of {type(skeleton).__name__} is {path!r}, but "
                    f"{str(folder)!r} has {', '.join(sorted(names)) or 'no tensor of that name'}; "
                    "accepted: a folder with one such tensor"
                )
            grown |= names
    added_bytes = 0
    for file, tensors in headers.items():
        names_here = grown.intersection(tensors)
        if not names_here:
            _link(file, out / file.name)
            continue
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        values = load_file(file)
        for name in names_here:
            old_bytes = values[name].nbytes
            values[name] = _grown(values[name], old_ids, rows)
            added_bytes += values[name].nbytes - old_bytes
        save_file(values, out / file.name, metadata)
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        content = json.loads(index.read_bytes())
        if "total_size" in (sizes := content.get("metadata") or {}):
            sizes["total_size"] += added_bytes
        (out / index.name).write_text(json.dumps(content, indent=2) + "\n")


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file.resolve(), to)
    except OSError:  # the target is on another file system
        shutil.copyfile(file, to)


def _grown(tensor: torch.Tensor, old_ids: set[int], rows: range) -> torch.Tensor:
    """Return a tensor with the mean of its old rows in the new ones: (old, ...) -> (new, ...)."""
    ids = torch.tensor(sorted(old_ids))
    sums = [tensor[chunk].double().sum(0) for chunk in ids.split(_CHUNK)]
    mean = (torch.stack(sums).sum(0) / len(ids)).float()
    out = tensor.new_empty((max(len(tensor), rows.stop), *tensor.shape[1:]))
    out[: len(tensor)] = tensor
    out[rows.start : rows.stop] = mean.to(tensor.dtype)
    return out


def _grown_config(config: PretrainedConfig, old: int, new: int) -> PretrainedConfig:
    """Return the config with a new vocabulary size. Raises ConfigError if its old one differs."""
    grown = copy.deepcopy(config)
    text = grown.get_text_config()
    if getattr(text, "vocab_size", None) != old:
        raise ConfigError(
            f"{_FIELD} is given, but vocab_size of {type(config).__name__} is "
            f"{getattr(text, 'vocab_size', None)}, with embeddings for {old} ids; accepted: models "
            "with as many embeddings as vocab_size"
        )
    text.vocab_size = new
    if text is not grown and getattr(grown, "vocab_size", None) == old:
        grown.vocab_size = new
    return grown


def _check_read(folder: Path, trust: bool, old: int, rows: range) -> None:
    """Raise a ConfigError if transformers and the processor do not read a folder as expected."""
    try:
        source = PretrainedSource(str(folder), trust_remote_code=trust)
        source.check()
        size = _rows_of(source.skeleton())
    except ModelError as error:
        raise ConfigError(f"{_FIELD} cannot be added to this model: {error}") from error
    largest = max(ModelProcessor(str(folder), trust).tokenizer.get_vocab().values())
    if size != max(old, rows.stop) or largest != rows.stop - 1:
        raise ConfigError(
            f"{_FIELD} cannot be added to this model: its folder would have {size} rows and token "
            f"ids up to {largest}, but the new ids are {rows.start} to {rows.stop - 1}"
        )
