"""Data: rows of files -> steps of microbatches, decoded by Ray data workers.

``DataConfig`` says what to read, ``StepLoader`` hands out steps as object references plus
metadata, ``local_steps`` the same steps as tensors without Ray.
"""

from raymm.data.loading.builder import BuiltStep, Skipped, StepBuilder, check_data
from raymm.data.loading.lengths import row_lengths
from raymm.data.loading.loader import Step, StepLoader, local_steps
from raymm.data.loading.processed import measure_of, step_builder
from raymm.data.loading.shuffle import shuffle_modality
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
from raymm.data.samples.errors import DataError, DataWorkerError, SampleError
from raymm.data.samples.sample import Sample
from raymm.data.samples.text import IGNORE_INDEX
from raymm.data.sampling.batching import ItemTokens, Sampler, training_sampler
from raymm.data.sampling.group_sampler import GroupSampler
from raymm.data.sampling.rebalanced_sampler import Decision, RebalancedSampler
from raymm.data.sampling.sampler import START, EpochSampler, State
from raymm.data.sampling.scan_cache import default_cache
from raymm.data.sampling.scan_result import SampleScan
from raymm.data.sampling.scanner import scan
from raymm.data.video.frames import Clip

__all__ = [
    "IGNORE_INDEX",
    "START",
    "BatchingConfig",
    "BuiltStep",
    "Clip",
    "DataConfig",
    "DataError",
    "DataWorkerError",
    "Decision",
    "EncodedSample",
    "EpochSampler",
    "GroupSampler",
    "ItemTokens",
    "JsonDataset",
    "Microbatch",
    "MicrobatchMeta",
    "Mixture",
    "ModalityDataConfig",
    "Reader",
    "RebalanceConfig",
    "RebalancedSampler",
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
]
