"""Whole models of configurations: a folder, and inputs that its own processor makes of the data."""

from __future__ import annotations

import torch

from raymm.config.model_section import AdaptersSection
from raymm.config.new_tokens import use_new_tokens
from raymm.config.sections import TrainConfig
from raymm.data import DataConfig, open_split
from raymm.data.conversations.example_items import example_items
from raymm.data.loading.processed import ProcessedBuilder
from raymm.errors import ConfigError, DataError, NotRunError, PlanError, SampleError
from raymm.model.batch_rules import LABELS
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import LANGUAGE, WholeModel, from_pretrained
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.runtime.whole.pipelined import whole_plan
from raymm.scheduler.plan.plan import Plan

# Samples that are tried to find one with items of a kind that can be used.
_TRIED = 16


def build_whole_model(config: TrainConfig) -> WholeModel:
    """Build the model of ``model.path``. Where the data have no modalities, its towers are found
    by made-up items, and are frozen where ``model.train`` does not name them. With
    ``model.new_tokens``, the configuration is changed to the folder that has them.

    Raises:
        ConfigError: the folder, the data or ``model.train`` do not fit each other; by field.
        DataError: data that cannot be read.
        ProbeError: it cannot be taken apart.
    """
    section = config.model
    assert section.path is not None  # else it is of parts
    if config.data.processor is None:
        raise ConfigError("data.processor is not given; accepted: the folder of a processor")
    new_rows = use_new_tokens(config)
    example = example_batch(config.data)
    try:
        model = from_pretrained(
            section.path, example,
            {
                name: how.lora.build() if isinstance(how, AdaptersSection) else how
                for name, how in section.train.items()
            },
            seed=config.run.seed, trust_remote_code=section.trust_remote_code,
            packing=section.packing, new_rows=new_rows,
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
                model.set_frozen(name, True)  # no gradient would come to it
    return model


def example_batch(data: DataConfig) -> dict[str, torch.Tensor]:
    """Return what the processor makes of a few of the first training samples, with items of all
    kinds of ``data.modalities``; without these, with made-up items.

    Args:
        data: of the run.

    Raises:
        DataError: no sample with items of a kind can be used, or the data cannot be read.
    """
    dataset = open_split(data, "train")
    builder = ProcessedBuilder(data.model_copy(update={"on_error": "raise"}), dataset)
    if not data.modalities:
        return _text_example(builder)
    chosen: list[int] = []
    for kind in data.modalities:
        there = dataset.counts[kind].nonzero()[0]
        failure = f"no sample of data.train has items of data.modalities.{kind}"
        for index in map(int, there[:_TRIED]):
            try:
                builder.build([index])
            except SampleError as error:
                failure = str(error)
                continue
            chosen.append(index)
            break
        else:
            raise DataError(f"no example to try the model with: {failure}")
    batch = builder.processor_batch(list(dict.fromkeys(chosen)))
    return {name: value for name, value in batch.items() if name != LABELS}


def _text_example(builder: ProcessedBuilder) -> dict[str, torch.Tensor]:
    """Return what the processor makes of an item of each kind that it takes. The data have none,
    and without items the forward would not call the model's towers. If the processor takes text
    alone: of the first usable sample.

    Raises:
        DataError: none of the first samples can be used.
    """
    if items := list(example_items(builder.processor)):
        return builder.processor(*map(list, zip(*items, strict=True)))
    failure = ""
    for index in range(min(_TRIED, len(builder.dataset))):
        try:
            batch = builder.processor_batch([index])
            return {name: value for name, value in batch.items() if name != LABELS}
        except SampleError as error:
            failure = str(error)
    raise DataError(f"no example to try the model with: {failure}")


def whole_layouts(specs: MultimodalParallelSpec, model: WholeModel) -> Plan:
    """The plan of layouts.

    Raises:
        PlanError: they do not fit the model.
    """
    if specs.elastic:
        raise PlanError("dp is a range; accepted for modules of a whole model: a number")
    own = {**specs.encoder_specs, LANGUAGE_MODEL: specs.language_model_spec}
    return whole_plan(model, own, specs.num_microbatches, specs.schedule, specs.recompute)
