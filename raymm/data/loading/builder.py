"""Building of the microbatches of a step, in this process; used by data workers and local runs."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch

from raymm.actors.faults.failure_kind import failure_kind
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.conversations.template import ChatTemplate
from raymm.data.conversations.text import (
    TextEncoder,
    check_vocabulary,
    load_tokenizer,
    processor_folder,
)
from raymm.data.loading.feature_lookup import FeatureLookup, StepFeatures
from raymm.data.loading.sources import open_split
from raymm.data.readers import Dataset
from raymm.data.samples.collate import (
    EncodedSample,
    Microbatch,
    MicrobatchMeta,
    Stack,
    collate,
    describe,
    shuffle_modality,
    split_parts,
)
from raymm.data.samples.config import DataConfig
from raymm.data.samples.headers import VIDEO, check_media, pillow_limit
from raymm.data.samples.media import Media, Sample, media_name
from raymm.data.samples.processors import Processor, load_processor, processor_input, read_video
from raymm.data.sampling.sampler import flat, group_by_modality, is_grouped, split_evenly
from raymm.data.video.container import decoder
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError, FailureKind, SampleError

_REASONS_SHOWN = 3
T = TypeVar("T")


# Check of a microbatch of one sample: raises a ValueError if the model cannot use the sample. The
# error may have an attribute ``modality`` that names the items at fault.
SampleCheck = Callable[[Microbatch], None]


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out under ``on_error: skip``."""

    id: str
    path: str | None
    reason: str
    column: str | None = None
    source: str = ""

    @classmethod
    def of(cls, error: SampleError, source: str) -> "Skipped":
        """Return the record of an unusable sample. If the process lacked a resource, raise
        ``error`` instead: the sample is not at fault, and skipping it would change the data of the
        run."""
        if failure_kind(error) is FailureKind.RESOURCE:
            raise error
        return cls(str(error.sample_id), error.path, error.reason, error.column, source)


def none_usable(skipped: Sequence[Skipped], of: str = "the step's") -> DataError:
    """Return the error for a step, or another set of samples (``of``), without a usable sample."""
    reasons = "; ".join(f"{s.id!r}: {s.reason}" for s in skipped[:_REASONS_SHOWN])
    reason = f"none of {of} {len(skipped)} samples is usable: {reasons}"
    error = DataError(reason)
    error.skipped = list(skipped)
    return error


@dataclass(frozen=True)
class BuiltStep:
    """Step with its microbatches as tensors, their metadata, and the samples that were left out.

    Attributes:
        sources: source number of every row by microbatch; empty for data of one source.
    """

    microbatches: list[Microbatch]
    meta: list[MicrobatchMeta]
    skipped: list[Skipped]
    sources: list[list[int]] = field(default_factory=list)


def check_data(config: DataConfig) -> None:
    """Check at startup everything that would make a data worker fail later: index both splits, find
    the tokenizer folder, import processors, and look up placeholders. Raise a ``DataError`` that
    names the field and the value."""
    for split in ("train", "heldout"):
        if getattr(config, split) is not None:
            open_split(config, split)
    check_tools(config)


def check_tools(config: DataConfig) -> None:
    """Run the part of :func:`check_data` that does not read samples."""
    for name in config.modalities:
        if config.modalities[name].video is not None:
            decoder(f"data.modalities.{name}.video")
    if config.processor is not None:
        processor = ModelProcessor(config.processor, config.trust_remote_code)
        if config.vocabulary is not None:
            check_vocabulary(processor.tokenizer, config.processor, config.vocabulary)
        return
    processor_folder(config.tokenizer, "data.tokenizer")
    for name, modality in config.modalities.items():
        field = f"data.modalities.{name}.processor"
        load_processor(modality.processor or "", field, config.trust_remote_code)
    placeholders = any(m.placeholder or m.placeholder_tokens for m in config.modalities.values())
    if placeholders or config.vocabulary is not None:
        tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code)
        TextEncoder(tokenizer, config.max_length, config.modalities)
        if config.vocabulary is not None:
            check_vocabulary(tokenizer, config.tokenizer, config.vocabulary)


def most_groups(config: DataConfig, indices: Sequence[int] | Sequence[Sequence[int]]) -> int:
    """Return the number of microbatches of a step if no sample is skipped."""
    if is_grouped(indices):
        return len(indices)
    return -(-len(indices) // (config.batch_size // config.microbatches))


class StepBuilder:
    """Reads, decodes, tokenizes and collates the samples of a step. Tokenizer and processors are
    loaded on first use.

    Args:
        check: called for every sample to check that the model accepts it.
    """

    def __init__(
        self, config: DataConfig, dataset: Dataset, check: SampleCheck | None = None,
        features: FeatureLookup | None = None,
    ):
        self.config, self.dataset, self._check = config, dataset, check
        self._lookup, self._features = features, StepFeatures()

    @cached_property
    def tokenizer(self):
        return load_tokenizer(self.config.tokenizer, self.config.trust_remote_code)

    @property
    def answer_ends(self) -> frozenset[int]:
        """Ids of the tokens that end a turn of the assistant."""
        if not (self.tokenizer.chat_template and self.tokenizer.is_fast):
            return frozenset()
        return ChatTemplate(self.tokenizer, None, self.config.chat_template_kwargs).answer_ends

    @cached_property
    def text(self) -> TextEncoder:
        return TextEncoder.from_config(self.config, self.tokenizer)

    @cached_property
    def processors(self) -> dict[str, Processor]:
        return {
            name: load_processor(
                modality.processor or "", f"data.modalities.{name}.processor",
                self.config.trust_remote_code,
            )
            for name, modality in self.config.modalities.items()
        }

    @cached_property
    def pad_id(self) -> int:
        """Token id of padding. Padding is always masked, so any id of the vocabulary works."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(id for id in ids if id is not None)

    def parts(self, microbatch: Microbatch) -> dict[str, dict[str, torch.Tensor]]:
        """Return the parts of a microbatch by stage: ``"text"`` and modalities."""
        return split_parts(microbatch)

    def alone(self, encoded: Any) -> tuple[dict[str, dict[str, torch.Tensor]], MicrobatchMeta]:
        """Return the :meth:`parts` and the metadata of a microbatch with one sample from
        :meth:`encode`."""
        microbatch = collate([encoded], self.pad_id, self.config.columns)
        meta = describe(microbatch, [encoded.id], self.text.placeholder_ids)
        return self.parts(microbatch), meta

    def build(
        self,
        indices: Sequence[int] | Sequence[Sequence[int]],
        shuffled: Sequence[str] = (),
        stack: Stack = torch.stack,
    ) -> BuiltStep:
        """Build a step.

        Groups of samples become one microbatch each. With ``on_error: skip``, an unusable sample
        leaves its group, and a group without samples leaves the step.

        Samples without groups are sorted by their modalities and split into microbatches of equal
        size. With ``on_error: skip``, unusable samples are dropped, and the rest is split into the
        same number of microbatches, whose sizes then differ by at most one, or into one per sample
        if fewer are left. The result depends only on ``indices`` and the files. Raise a
        ``SampleError`` if a sample is unusable, with ``on_error: raise``, and a ``DataError`` if no
        sample is usable, or items cannot be stacked.

        Args:
            indices: samples of the step (fewer than ``batch_size`` result in fewer microbatches),
                or non-empty groups of samples.
            shuffled: modalities whose items are given to other samples (``shuffle_modality``).
        """
        self._features = self._kept(indices)
        groups, skipped = self._groups(indices)
        if not groups:
            raise none_usable(skipped)
        truncated = [sum(sample.truncated for sample in group) for group in groups]
        groups = [[row for sample in group for row in sample.rows] for group in groups]
        microbatches = [collate(group, self.pad_id, self.config.columns, stack) for group in groups]
        # The samples of the step are the seed, so the result is the same on every worker and after
        # a resume.
        seed = np.random.SeedSequence([self.config.seed, *flat(indices)]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(seed))
        pairs = self.config.preferences is True
        for name in shuffled:
            microbatches = [shuffle_modality(mb, name, generator, 1 + pairs) for mb in microbatches]
        # The id changes too, because a row with items of another sample is a different row.
        suffix = "".join(f" with other {name}" for name in shuffled)
        meta = [
            replace(
                describe(
                    microbatch, [sample.id + suffix for sample in group], self.text.placeholder_ids
                ),
                feature_keys=_keys_of(group, shuffled), truncated=cut,
            )
            for microbatch, group, cut in zip(microbatches, groups, truncated, strict=True)
        ]
        sources = [[sample.source for sample in group] for group in groups]
        return BuiltStep(microbatches, meta, skipped, sources if self._tells_sources else [])

    @property
    def _tells_sources(self) -> bool:
        return getattr(self.dataset, "tells_sources", False) and self.config.preferences is not True

    def _kept(self, indices: Sequence[int] | Sequence[Sequence[int]]) -> StepFeatures:
        if self._lookup is None:
            return StepFeatures()
        samples = []
        for index in flat(indices):
            with suppress(SampleError):  # reported when the sample is encoded
                samples.append(self.dataset[index])
        return self._lookup.of_step(samples)

    def _groups(
        self, indices: Sequence[int] | Sequence[Sequence[int]]
    ) -> tuple[list[list[EncodedSample]], list[Skipped]]:
        """Return the samples of every microbatch, and the samples that were left out."""
        if is_grouped(indices):
            groups = cast(Sequence[Sequence[int]], indices)
            encoded = [self._encode_all(group) for group in groups]
            skipped = [sample for _, left_out in encoded for sample in left_out]
            return [samples for samples, _ in encoded if samples], skipped
        in_order = group_by_modality(cast(Sequence[int], indices), self.dataset.counts)
        samples, skipped = self._encode_all(in_order)
        return split_evenly(samples, most_groups(self.config, indices)), skipped

    def _encode_all(self, indices: Sequence[int]) -> tuple[list[EncodedSample], list[Skipped]]:
        samples, skipped = [], []
        for index in indices:
            try:
                samples.append(self.encode(self.dataset[index]))
            except SampleError as error:
                if self.config.on_error == "raise":
                    raise
                source = self.dataset.names[int(self.dataset.sources[index])]
                skipped.append(Skipped.of(error, source))
        return samples, skipped

    def encode(self, sample: Sample) -> EncodedSample:
        """Return the token ids, labels and item tensors of a sample. Raise a ``SampleError`` that
        names the sample, the column and, for a media file, its path."""
        self._check_answers(sample)
        if sample.preference is None:
            texts = [self.text.encode(sample)]
        else:
            texts = self.text.encode_answers(sample)
        cached = self._features
        media = {
            name: [*cached.features[name][sample.index]]
            if name in cached.features else [self._item(name, sample, item) for item in items]
            for name, items in sample.media.items()
        }
        keys = {
            name: sample_keys[sample.index] for name, sample_keys in cached.keys.items()
            if name in media and name not in cached.features
        }
        # Prompts for generation come without a dataset.
        source = 0 if self.dataset is None else int(self.dataset.sources[sample.index])
        encoded = EncodedSample(
            sample.id, *texts[0], media, keys, source=source,
            truncated=self.text.count_truncated(sample, texts),
        )
        if sample.preference is not None and self.config.preferences is True:
            rejected = EncodedSample(f"{sample.id}:rejected", *texts[1], media, keys)
            encoded = replace(encoded, id=f"{sample.id}:chosen", rejected=rejected)
        if self._check is not None:
            self._check_sample(sample, encoded, self._check)
        return encoded

    def _check_answers(self, sample: Sample) -> None:
        """Raise a ``SampleError`` if the number of answers of a sample does not fit the loss."""
        if (sample.preference is not None) != bool(self.config.preferences):
            accepted = "messages or text" if sample.preference else "prompt, chosen and rejected"
            raise SampleError(
                f"data.preferences is {self.config.preferences}; accepted: rows with {accepted}",
                None, None, sample.id, sample.place or None,
            )

    def _check_sample(
        self, sample: Sample, encoded: EncodedSample, check: Callable[..., Any]
    ) -> None:
        try:
            check(collate(encoded.rows, self.pad_id, self.config.columns))
        except (ValueError, DataError) as error:
            name: str | None = getattr(error, "modality", None)
            items = sample.media.get(name, ()) if name else ()
            path = media_name(items[0]) if len(items) == 1 else None
            column = sample.columns.get(name, self.config.columns.get(name)) if name else None
            raise SampleError(str(error), column, path, sample.id, sample.place or None) from error

    def _item(self, name: str, sample: Sample, item: Media) -> dict[str, torch.Tensor]:
        """Return the tensors of an item, after checking its limits."""
        def tensors(inputs: Any) -> dict[str, torch.Tensor]:
            output = self.processors[name](inputs)
            return {key: torch.as_tensor(value) for key, value in output.items()}

        return self._decoded(name, sample, item, tensors)

    def _decoded(self, name: str, sample: Sample, item: Media, make: Callable[[Any], T]) -> T:
        """Check the limits of an item, decode it and return the result of ``make``."""
        modality = self.config.modalities[name]
        frames = item if isinstance(item, tuple) else (item,)
        try:
            sampling = self.config.sampling(name)
            headers = [
                check_media(frame, self.config.limits, sampling is not None) for frame in frames
            ]
            if sampling is not None and not isinstance(item, tuple) and headers[0].kind == VIDEO:
                return make(read_video(item, sampling, self.config.limits))
            with pillow_limit(self.config.max_image_pixels):
                inputs = [processor_input(frame, modality.input) for frame in frames]
                return make(inputs if isinstance(item, tuple) else inputs[0])
        except (DataError, ConfigError, MemoryError) as error:
            if not isinstance(error, SampleError) or error.sample_id is not None:
                raise  # not caused by the item
            cause, reason = error, error.reason
        except USER_CODE_RAISES as error:  # a decoder raises whatever its format library raises
            cause, reason = error, f"cannot be read ({type(error).__name__}: {error})"
        column = sample.columns.get(name, modality.column)
        raise SampleError(
            reason, column, media_name(item), sample.id, sample.place or None
        ) from cause


def _keys_of(group: Sequence[EncodedSample], shuffled: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the cache keys of the items of a microbatch in order, without shuffled modalities."""
    names = dict.fromkeys(name for sample in group for name in sample.keys)
    return {
        name: tuple(key for sample in group for key in sample.keys.get(name, ()))
        for name in names if name not in shuffled
    }
