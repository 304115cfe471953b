"""Data pipeline: rows of files -> steps of microbatches, decoded by Ray data workers.

``DataConfig`` configures the data. ``StepLoader`` returns steps as object references plus metadata,
``local_steps`` the same steps as tensors, without Ray.

Names are imported on first use, so that a configuration can be checked without torch.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

_PUBLIC = {
    "BatchingConfig": "raymm.data.samples.config",
    "BuiltStep": "raymm.data.loading.builder",
    "Clip": "raymm.data.video.frames",
    "DataConfig": "raymm.data.samples.config",
    "DataError": "raymm.errors",
    "Decision": "raymm.data.sampling.rebalanced_sampler",
    "EncodedSample": "raymm.data.samples.collate",
    "EpochSampler": "raymm.data.sampling.sampler",
    "GroupSampler": "raymm.data.sampling.group_sampler",
    "IGNORE_INDEX": "raymm.actors.modules.merge",
    "ItemTokens": "raymm.data.sampling.batching",
    "JsonDataset": "raymm.data.readers",
    "Microbatch": "raymm.data.samples.collate",
    "MicrobatchMeta": "raymm.data.samples.collate",
    "Mixture": "raymm.data.readers",
    "ModalityDataConfig": "raymm.data.samples.config",
    "Reader": "raymm.data.readers",
    "RebalanceConfig": "raymm.data.samples.config",
    "RebalancedSampler": "raymm.data.sampling.rebalanced_sampler",
    "START": "raymm.data.sampling.sampler",
    "Sample": "raymm.data.samples.media",
    "SampleError": "raymm.errors",
    "SampleScan": "raymm.data.sampling.scanner",
    "Sampler": "raymm.data.sampling.batching",
    "Skipped": "raymm.data.loading.builder",
    "SourceConfig": "raymm.data.samples.config",
    "State": "raymm.data.sampling.sampler",
    "Step": "raymm.data.loading.loader",
    "StepBuilder": "raymm.data.loading.builder",
    "StepLoader": "raymm.data.loading.loader",
    "VideoConfig": "raymm.data.samples.config",
    "check_data": "raymm.data.loading.builder",
    "collate": "raymm.data.samples.collate",
    "default_cache": "raymm.data.sampling.scanner",
    "describe": "raymm.data.samples.collate",
    "is_there": "raymm.data.readers.files",
    "join_parts": "raymm.data.samples.collate",
    "local_steps": "raymm.data.loading.loader",
    "measure_of": "raymm.data.loading.processed",
    "open_source": "raymm.data.readers",
    "open_split": "raymm.data.loading.sources",
    "row_lengths": "raymm.data.loading.lengths",
    "truncation_note": "raymm.data.loading.lengths",
    "scan": "raymm.data.sampling.scanner",
    "shuffle_modality": "raymm.data.samples.collate",
    "split_parts": "raymm.data.samples.collate",
    "step_builder": "raymm.data.loading.processed",
    "training_sampler": "raymm.data.sampling.batching",
}

__all__ = [
    "BatchingConfig",
    "BuiltStep",
    "Clip",
    "DataConfig",
    "DataError",
    "Decision",
    "EncodedSample",
    "EpochSampler",
    "GroupSampler",
    "IGNORE_INDEX",
    "ItemTokens",
    "JsonDataset",
    "Microbatch",
    "MicrobatchMeta",
    "Mixture",
    "ModalityDataConfig",
    "Reader",
    "RebalanceConfig",
    "RebalancedSampler",
    "START",
    "Sample",
    "SampleError",
    "SampleScan",
    "Sampler",
    "Skipped",
    "SourceConfig",
    "State",
    "Step",
    "StepBuilder",
    "StepLoader",
    "VideoConfig",
    "check_data",
    "collate",
    "default_cache",
    "describe",
    "is_there",
    "join_parts",
    "local_steps",
    "measure_of",
    "open_source",
    "open_split",
    "row_lengths",
    "scan",
    "shuffle_modality",
    "split_parts",
    "step_builder",
    "training_sampler",
    "truncation_note",
]

if TYPE_CHECKING:
    from raymm.actors.modules.merge import IGNORE_INDEX
    from raymm.data.loading.builder import BuiltStep, Skipped, StepBuilder, check_data
    from raymm.data.loading.lengths import row_lengths, truncation_note
    from raymm.data.loading.loader import Step, StepLoader, local_steps
    from raymm.data.loading.processed import measure_of, step_builder
    from raymm.data.loading.sources import open_split
    from raymm.data.readers import JsonDataset, Mixture, Reader, open_source
    from raymm.data.readers.files import is_there
    from raymm.data.samples.collate import (
        EncodedSample,
        Microbatch,
        MicrobatchMeta,
        collate,
        describe,
        join_parts,
        shuffle_modality,
        split_parts,
    )
    from raymm.data.samples.config import (
        BatchingConfig,
        DataConfig,
        ModalityDataConfig,
        RebalanceConfig,
        SourceConfig,
        VideoConfig,
    )
    from raymm.data.samples.media import Sample
    from raymm.data.sampling.batching import ItemTokens, Sampler, training_sampler
    from raymm.data.sampling.group_sampler import GroupSampler
    from raymm.data.sampling.rebalanced_sampler import Decision, RebalancedSampler
    from raymm.data.sampling.sampler import START, EpochSampler, State
    from raymm.data.sampling.scanner import SampleScan, default_cache, scan
    from raymm.data.video.frames import Clip
    from raymm.errors import DataError, SampleError


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(_importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
