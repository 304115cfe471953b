"""Builds the microbatches of one step in this process; workers and local runs both use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from raymm.data.collate import EncodedSample, Microbatch, MicrobatchMeta, collate, describe
from raymm.data.config import DataConfig
from raymm.data.dataset import JsonDataset, Sample
from raymm.data.errors import DataError, SampleError
from raymm.data.processors import Processor, load_processor
from raymm.data.sampler import group_by_modality, split_evenly
from raymm.data.shuffle import shuffle_modality
from raymm.data.text import encode_text, load_tokenizer

_REASONS_SHOWN = 3


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out under ``on_error: skip``."""

    id: str
    path: str | None
    reason: str


@dataclass(frozen=True)
class BuiltStep:
    """Microbatches of a step as tensors, their metadata, and what was left out."""

    microbatches: list[Microbatch]
    meta: list[MicrobatchMeta]
    skipped: list[Skipped]


def open_split(config: DataConfig, split: str) -> JsonDataset:
    """The dataset of ``"train"`` or ``"heldout"``.

    Raises:
        DataError: unknown or unset split, or what ``JsonDataset`` raises.
    """
    if split not in ("train", "heldout"):
        raise DataError(f"split must be 'train' or 'heldout', got {split!r}")
    path = getattr(config, split)
    if path is None:
        raise DataError(f"data.{split} is not set")
    return JsonDataset(path, config.columns)


def check_data(config: DataConfig) -> None:
    """Find before any actor starts what a data worker would fail on.

    Reads both files whole; checks that the tokenizer folder exists and processors import.

    Raises:
        DataError: names the field and the value.
    """
    for split in ("train", "heldout"):
        if getattr(config, split) is not None:
            open_split(config, split)
    check_tools(config)


def check_tools(config: DataConfig) -> None:
    """The part of ``check_data`` that does not read the samples."""
    if not Path(config.tokenizer).is_dir():
        raise DataError(f"data.tokenizer: {config.tokenizer!r} is not a local folder")
    for name, modality in config.modalities.items():
        load_processor(modality.processor, f"data.modalities.{name}.processor")


class StepBuilder:
    """Reads, decodes, tokenizes and collates the samples of a step.

    Args:
        config: the data configuration.
        dataset: the split's samples.

    Tokenizer and processors are loaded at the first use.
    """

    def __init__(self, config: DataConfig, dataset: JsonDataset):
        self.config, self.dataset = config, dataset

    @cached_property
    def tokenizer(self):
        return load_tokenizer(self.config.tokenizer)

    @cached_property
    def processors(self) -> dict[str, Processor]:
        return {
            name: load_processor(modality.processor, f"data.modalities.{name}.processor")
            for name, modality in self.config.modalities.items()
        }

    @cached_property
    def pad_id(self) -> int:
        """Masked everywhere, so any id of the vocabulary will do."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(id for id in ids if id is not None)

    def build(self, indices: Sequence[int], shuffled: Sequence[str] = ()) -> BuiltStep:
        """The step of these samples.

        Samples are grouped by the modalities they have and cut into microbatches of equal size.
        Under ``on_error: skip`` an unusable sample is dropped and the rest of the step is cut
        again into the same number of microbatches (sizes then differ by at most one), or one per
        sample when fewer are left. Which samples, and in which microbatch, depends on nothing
        but ``indices`` and the files.

        Args:
            indices: samples of the step; fewer than ``batch_size`` give fewer microbatches.
            shuffled: modalities whose items are dealt to other samples (``shuffle_modality``).

        Raises:
            SampleError: an unusable sample under ``on_error: raise``.
            DataError: no usable sample left, or items that cannot be stacked.
        """
        samples, skipped = self._encode_all(group_by_modality(indices, self.dataset.counts))
        if not samples:
            reasons = "; ".join(f"{s.id!r}: {s.reason}" for s in skipped[:_REASONS_SHOWN])
            raise DataError(f"none of the step's {len(skipped)} samples is usable: {reasons}")
        size = self.config.batch_size // self.config.microbatches
        groups = split_evenly(samples, -(-len(indices) // size))
        microbatches = [collate(group, self.pad_id) for group in groups]
        # Seeded by the step's samples: the same on every worker and after a resume.
        seed = np.random.SeedSequence([self.config.seed, *indices]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        for name in shuffled:
            microbatches = [shuffle_modality(mb, name, generator) for mb in microbatches]
        meta = [
            describe(microbatch, [sample.id for sample in group])
            for microbatch, group in zip(microbatches, groups, strict=True)
        ]
        return BuiltStep(microbatches, meta, skipped)

    def _encode_all(self, indices: Sequence[int]) -> tuple[list[EncodedSample], list[Skipped]]:
        samples, skipped = [], []
        for index in indices:
            try:
                samples.append(self.encode(self.dataset[index]))
            except SampleError as error:
                if self.config.on_error == "raise":
                    raise
                skipped.append(Skipped(error.sample_id, error.path, error.reason))
        return samples, skipped

    def encode(self, sample: Sample) -> EncodedSample:
        """Token ids, labels and item tensors of one sample.

        Raises:
            SampleError: names the sample and, for a media file, its path.
        """
        input_ids, labels = encode_text(self.tokenizer, sample, self.config.max_length)
        media = {
            name: [self._item(name, sample.id, path) for path in paths]
            for name, paths in sample.media.items()
        }
        return EncodedSample(sample.id, input_ids, labels, media)

    def _item(self, name: str, sample_id: str, path: str) -> dict[str, torch.Tensor]:
        if not Path(path).is_file():
            raise SampleError(sample_id, path, "the file does not exist")
        try:
            item = self.processors[name](path)
            return {key: torch.as_tensor(value) for key, value in item.items()}
        except DataError:
            raise
        except Exception as error:  # a decoder raises whatever its format library raises
            reason = f"cannot be read ({type(error).__name__}: {error})"
            raise SampleError(sample_id, path, reason) from error
