"""Whole models of a configuration: a folder, and example inputs from its own processor."""

from __future__ import annotations

import torch

from raymm.actors.stages.token_loss import ACCEPTED, TokenLoss
from raymm.config.model_section import AdaptersSection, LossSection, ModelSection
from raymm.config.new_tokens import use_new_tokens
from raymm.config.sections import TrainConfig
from raymm.data import DataConfig, open_split
from raymm.data.conversations.example_items import example_items
from raymm.data.loading.processed import ProcessedBuilder
from raymm.errors import ConfigError, DataError, NotRunError, SampleError
from raymm.kernels.preference import PreferenceLoss
from raymm.model.batch_rules import LABELS
from raymm.model.vlm import LANGUAGE, PretrainedVlm, from_pretrained
from raymm.packages import user_function

# Samples that are tried per modality to find a usable one.
_TRIED = 16


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
