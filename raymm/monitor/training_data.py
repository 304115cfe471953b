"""Training samples and their distribution over steps, decided before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console

from raymm.costs.workload import item_tokens
from raymm.data import (
    DataConfig,
    GroupSampler,
    ItemTokens,
    Sampler,
    StepBuilder,
    measure_of,
    open_split,
    training_sampler,
    truncation_note,
)
from raymm.data.readers import Dataset
from raymm.errors import SampleError
from raymm.model.model import Model
from raymm.model.multimodal import MultimodalModule
from raymm.monitor.progress import ScanProgress
from raymm.plural import plural

# Number of samples that are tried to find one whose item can be decoded.
TRIED = 16


@dataclass(frozen=True)
class TrainingData:
    """Training samples and their sampler.

    Attributes:
        tokens: tokens per item by modality, if steps are planned.
    """

    dataset: Dataset | None = None
    sampler: Sampler | None = None
    tokens: Mapping[str, ItemTokens] = field(default_factory=dict)


def training_data(
    data: Any, model: Model, state: Any = None,
    console: Console | None = None, dataset: Dataset | None = None,
) -> TrainingData:
    """Open, scan and plan the training data as ``data.batching`` configures, and check a data
    position. Raise a ``DataError`` if the data cannot be planned, or the position belongs to
    another batching or other data.

    Args:
        state: data position of the checkpoint that the run resumes from; None for the beginning.
    """
    if not isinstance(data, DataConfig):
        return TrainingData()
    dataset = open_split(data, "train") if dataset is None else dataset
    if console is not None and (note := truncation_note(data, dataset)) is not None:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if data.batching.method == "random":
        sampler = training_sampler(data, dataset)
        sampler.check(state)
        return TrainingData(dataset, sampler)
    tokens = {}
    if data.processor is None:  # a processor of the whole model states its tokens
        tokens = item_tokens(cast(MultimodalModule, model), one_item_each(data, dataset))
    console = console or Console(quiet=True)
    with ScanProgress(console) as progress:
        sampler = training_sampler(data, dataset, tokens, progress, measure_of(data))
    assert isinstance(sampler, GroupSampler)  # because the method is not "random"
    sampler.open(state)
    console.print(_summary(sampler), highlight=False, soft_wrap=True)
    return TrainingData(dataset, sampler, tokens)


def give_examples(model: Model, data: DataConfig, dataset: Dataset) -> None:
    """Set the data's first items as ``example_inputs`` of encoders that have none."""
    model.give_examples(lambda: one_item_each(data, dataset))


def one_item_each(data: DataConfig, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Return the inputs of one item per modality, from the first samples that have one."""
    builder = StepBuilder(data, dataset)
    items: dict[str, dict[str, Any]] = {}
    for name in data.modalities:
        for index in dataset.counts[name].nonzero()[0][:TRIED]:
            try:
                item = builder.encode(dataset[int(index)]).media[name][0]
            except SampleError:  # reported or skipped when the sample is used
                continue
            items[name] = {key: value[None] for key, value in item.items()}
            break
    return items


def _summary(sampler: GroupSampler) -> str:
    planner = sampler.planner
    return (
        f"batching {planner['method']}: {plural(len(sampler.sizes), 'sample')}, about "
        f"{planner['samples']} in each of {planner['groups']} microbatches"
    )
