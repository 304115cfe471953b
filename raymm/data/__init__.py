"""Data: rows of JSON -> steps of microbatches, decoded by Ray data workers.

``DataConfig`` says what to read, ``StepLoader`` hands out steps as object references plus
metadata, ``local_steps`` the same steps as tensors without Ray.
"""

from raymm.data.builder import BuiltStep, Skipped, StepBuilder, check_data, open_split
from raymm.data.collate import (
    EncodedSample,
    Microbatch,
    MicrobatchMeta,
    collate,
    describe,
    join_parts,
    split_parts,
)
from raymm.data.config import DataConfig, ModalityDataConfig
from raymm.data.dataset import JsonDataset, Sample
from raymm.data.errors import DataError, SampleError
from raymm.data.loader import Step, StepLoader, local_steps
from raymm.data.sampler import START, EpochSampler, State
from raymm.data.shuffle import shuffle_modality
from raymm.data.text import IGNORE_INDEX

__all__ = [
    "IGNORE_INDEX",
    "START",
    "BuiltStep",
    "DataConfig",
    "DataError",
    "EncodedSample",
    "EpochSampler",
    "JsonDataset",
    "Microbatch",
    "MicrobatchMeta",
    "ModalityDataConfig",
    "Sample",
    "SampleError",
    "Skipped",
    "State",
    "Step",
    "StepBuilder",
    "StepLoader",
    "check_data",
    "collate",
    "describe",
    "join_parts",
    "local_steps",
    "open_split",
    "shuffle_modality",
    "split_parts",
]
