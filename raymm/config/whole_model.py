"""Whole models of configurations: a folder, and inputs that its own processor makes of the data."""

from __future__ import annotations

import torch

from raymm.actors.probe.error import NotRunError
from raymm.config.model_section import AdaptersSection
from raymm.config.sections import TrainConfig
from raymm.data import DataConfig, DataError, SampleError, open_split
from raymm.data.loading.processed import ProcessedBuilder
from raymm.files.config_error import ConfigError
from raymm.model.batch_rules import LABELS
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import WholeModel, from_pretrained
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.runtime.whole.pipelined import whole_plan
from raymm.scheduler.plan.plan import Plan, PlanError

# Samples that are tried to find one with items of a kind that can be used.
_TRIED = 16


def build_whole_model(config: TrainConfig) -> WholeModel:
    """The whole model of ``model.path``.

    Raises:
        ConfigError: the folder, the data or ``model.train`` do not fit each other; by field.
        DataError: data that cannot be read.
        ProbeError: it cannot be taken apart.
    """
    section = config.model
    assert section.path is not None  # else it is of parts
    if config.data.processor is None:
        raise ConfigError("data.processor is not given; accepted: the folder of a processor")
    example = example_batch(config.data)
    try:
        return from_pretrained(
            section.path, example,
            {
                name: how.lora.build() if isinstance(how, AdaptersSection) else how
                for name, how in section.train.items()
            },
            seed=config.run.seed, trust_remote_code=section.trust_remote_code,
            packing=section.packing,
        )
    except ValueError as error:
        made_by = ""
        if isinstance(error, NotRunError):
            made_by = (
                f". Its inputs are what the processor in {config.data.processor!r} makes of "
                "samples; is that the model's own?"
            )
        raise ConfigError(f"model: {error}{made_by}") from error


def example_batch(data: DataConfig) -> dict[str, torch.Tensor]:
    """What the processor makes of a few of the first training samples, with items of all kinds.

    Args:
        data: of the run.

    Raises:
        DataError: no sample with items of a kind can be used, or the data cannot be read.
    """
    dataset = open_split(data, "train")
    builder = ProcessedBuilder(data.model_copy(update={"on_error": "raise"}), dataset)
    chosen: list[int] = []
    for kind in data.modalities or (None,):
        there = range(len(dataset)) if kind is None else dataset.counts[kind].nonzero()[0]
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


def whole_layouts(specs: MultimodalParallelSpec, model: WholeModel) -> Plan:
    """The plan of layouts.

    Raises:
        PlanError: they do not fit the model.
    """
    if specs.elastic:
        raise PlanError("dp has a range; accepted of modules of a whole model: a number")
    own = {**specs.encoder_specs, LANGUAGE_MODEL: specs.language_model_spec}
    return whole_plan(model, own, specs.num_microbatches, specs.schedule, specs.recompute)
