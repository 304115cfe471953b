"""Building of microbatches for a Hugging Face VLM, whose processor makes all tensors of a
microbatch in one call, as for inference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.stages.tower import is_featured
from raymm.data.conversations.conversation import Conversation, conversation, template_messages
from raymm.data.conversations.processor import IDS, MASK, ModelProcessor
from raymm.data.conversations.template import RenderedChat
from raymm.data.conversations.text import check_characters, roles_without_labels, text_chat
from raymm.data.loading.builder import BuiltStep, SampleCheck, Skipped, StepBuilder, none_usable
from raymm.data.loading.feature_lookup import FeatureLookup, TowerLookup
from raymm.data.readers import Dataset
from raymm.data.samples.collate import Microbatch, MicrobatchMeta, Stack
from raymm.data.samples.config import TOWER_OF, DataConfig
from raymm.data.samples.media import Sample, media_name
from raymm.data.samples.placeholders import text_error
from raymm.data.samples.processors import (
    WholeSounds,
    equal_tensors,
    frames_of,
    read_audio,
    read_image,
)
from raymm.data.sampling.sampler import flat
from raymm.data.sampling.scanner import Measure
from raymm.data.video.frames import Clip
from raymm.errors import USER_CODE_RAISES, DataError, SampleError
from raymm.model.vlm_batch import vlm_parts

# Frames per second at which a list of frames is processed for comparison.
_RATES = (1.0, 4.0)


class ItemCheck:
    """Check of samples that runs the processor on modified versions of their items.

    A sound longer than the window of the feature extractor would be truncated, and frames without
    times would get times at a rate that the processor assumes. To detect this without code for
    single processors, a sample is processed with modified items and the results are compared. Only
    sounds and lists of frames that are longer than all earlier ones are checked.
    """

    def __init__(self, processor: ModelProcessor) -> None:
        self._processor = processor
        self._sounds: WholeSounds | None = None
        self._most_frames = 1  # longest list for which the frame rate made no difference

    def __call__(self, encoded: Conversation) -> None:
        """Raise a ``SampleError`` for a sound that is longer than the processor accepts, or a list
        of frames without a frame rate if the processor uses one."""
        for number, sound in enumerate(encoded.media.get("audio", ())):
            self._check_sound(encoded, number, sound)
        for number, video in enumerate(encoded.media.get("video", ())):
            if not isinstance(video, Clip):
                self._check_frames(encoded, number, video)

    def _check_sound(self, encoded: Conversation, number: int, sound: np.ndarray) -> None:
        if self._sounds is None:
            self._sounds = WholeSounds(self._processor.sampling_rate)
        try:
            self._sounds.check(sound, lambda other: self._with(encoded, "audio", number, other))
        except SampleError as error:
            raise _item_error(encoded, "audio", number, error.reason) from None

    def _check_frames(self, encoded: Conversation, number: int, frames: Sequence[Any]) -> None:
        if len(frames) <= self._most_frames:
            return
        slow, fast = (
            self._with(encoded, "video", number, clip_of_images(frames, fps)) for fps in _RATES
        )
        if not equal_tensors(slow, fast):
            raise _item_error(
                encoded, "video", number,
                f"it is a list of {len(frames)} frames without times, but the processor passes "
                "times to the model; set data.modalities.video.fps (frames per second), or add "
                "'fps' or 'times' to the part of the message",
            )
        self._most_frames = len(frames)

    def _with(
        self, encoded: Conversation, kind: str, number: int, item: Any
    ) -> dict[str, torch.Tensor]:
        items = list(encoded.media[kind])
        items[number] = item
        media: Mapping[str, Sequence[Any]] = {**encoded.media, kind: items}
        return self._processor([encoded.text], [media])


def clip_of_images(frames: Sequence[Any], fps: float) -> Clip:
    """Return a clip of RGB images at ``fps`` frames per second; raise a ``SampleError`` if sizes
    differ."""
    times = [number / fps for number in range(len(frames))]
    return Clip.from_frames([np.asarray(frame) for frame in frames], times)


def _item_error(encoded: Conversation, kind: str, number: int, reason: str) -> SampleError:
    sample = encoded.sample
    file = media_name(sample.media[kind][number])
    return SampleError(reason, sample.columns.get(kind), file, sample.id, sample.place or None)


def step_builder(
    config: DataConfig, dataset: Dataset, check: SampleCheck | None = None,
    features: FeatureLookup | None = None,
) -> StepBuilder:
    """Return the step builder of a configuration; arguments as in :class:`StepBuilder`."""
    kind = StepBuilder if config.processor is None else ProcessedBuilder
    return kind(config, dataset, check, features)


class ProcessedBuilder(StepBuilder):
    """Step builder that uses ``data.processor``. Samples are checked together with their
    microbatch, and one by one to find an unusable sample."""

    @cached_property
    def _of_microbatches(self) -> list[tuple[Microbatch, tuple[Any, Any]]]:
        """Microbatches of the current step with the parts of each module."""
        return []

    @cached_property
    def processor(self) -> ModelProcessor:
        config = self.config
        assert config.processor is not None  # see step_builder
        return ModelProcessor(
            config.processor, config.trust_remote_code, config.chat_template_kwargs,
            config.ignore_message_keys,
        )

    @cached_property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def answer_ends(self) -> frozenset[int]:
        return self.processor.template.answer_ends

    def alone(self, encoded: Any) -> tuple[dict[str, dict[str, torch.Tensor]], MicrobatchMeta]:
        """See :meth:`StepBuilder.alone`. Raises a ``SampleError`` for an unusable sample."""
        microbatch = self._microbatch([encoded])
        return self.parts(microbatch), self._described(microbatch, [encoded])

    def parts(self, microbatch: Microbatch) -> dict[str, dict[str, torch.Tensor]]:
        return self._kept_parts(microbatch)[0]

    def _kept_parts(
        self, microbatch: Microbatch
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, tuple[str, ...]]]:
        """Return :meth:`TowerLookup.parts`, computed once per microbatch."""
        if not isinstance(self._lookup, TowerLookup):
            return vlm_parts(self.config.towers, microbatch), {}
        for earlier, inputs in self._of_microbatches:
            if earlier is microbatch:
                return inputs
        inputs = self._lookup.parts(vlm_parts(self.config.towers, microbatch))
        self._of_microbatches.append((microbatch, inputs))
        return inputs

    def build(
        self,
        indices: Sequence[int] | Sequence[Sequence[int]],
        shuffled: Sequence[str] = (),
        stack: Stack = torch.stack,
    ) -> BuiltStep:
        """See :meth:`StepBuilder.build`. A microbatch has labels and all tensors that the processor
        returns.

        Args:
            indices: see :meth:`StepBuilder.build`. With ``on_error: skip``, unusable samples leave
                their microbatch.
            shuffled: kinds whose items are exchanged between samples with the same number of items.
        """
        self._of_microbatches.clear()
        encoded, skipped = self._groups(indices)
        groups = cast(list[list[Conversation]], encoded)
        seed = np.random.SeedSequence([self.config.seed, *flat(indices)]).generate_state(1)[0]
        random = np.random.default_rng(int(seed))
        for kind in shuffled:
            groups = [_shuffled(group, kind, random) for group in groups]
        microbatches, meta, sources = [], [], []
        for group in groups:
            microbatch, group, group_skipped = self._of_group(group)
            skipped += group_skipped
            if microbatch is not None:
                microbatches.append(microbatch)
                meta.append(self._described(microbatch, group))
                sources.append([int(self.dataset.sources[s.sample.index]) for s in group])
        if not microbatches:
            raise none_usable(skipped)
        return BuiltStep(microbatches, meta, skipped, sources if self._tells_sources else [])

    def processor_batch(self, indices: Sequence[int]) -> Microbatch:
        """Return the processor's tensors of some samples together, and labels; raise a
        ``SampleError`` for an unusable sample."""
        return self._microbatch([self.encode(self.dataset[index]) for index in indices])

    def encode(self, sample: Sample) -> Any:
        """Render and decode a sample; return a :class:`Conversation`, with the rejected one if
        rows are pairs of answers. Errors are those of :meth:`StepBuilder.encode` and
        :meth:`raymm.data.conversations.text.TextEncoder.encode_answers`."""
        self._check_answers(sample)
        if sample.text is not None and any(sample.media.values()):
            raise text_error(
                sample, "the row has text and media; with data.processor, media need messages, "
                "whose parts give the positions of the items"
            )
        answers = self._answers(sample)
        for answer in answers:
            check_characters(answer)
        media: dict[str, list[Any]] = {} if sample.text is not None else {
            kind: [self._decoded(kind, sample, item, self._reader(kind, item)) for item in items]
            for kind, items in sample.media.items()
        }
        encoded, *others = [
            conversation(self.processor, answer, self._chat(answer), media) for answer in answers
        ]
        if media:
            self._check_items(encoded)
        for row in (encoded, *others):
            if not row.has_labels:
                empty = ": the text is empty" if sample.text is not None else ""
                raise text_error(sample, f"no label token{empty}{roles_without_labels(row.sample)}")
        return replace(encoded, rejected=others[0]) if others else encoded

    def _answers(self, sample: Sample) -> list[Sample]:
        """Return a sample with each answer that is used; the sample itself without two answers."""
        if (pair := sample.preference) is None:
            return [sample]
        answers = pair.answers if self.config.preferences is True else pair.answers[:1]
        if sample.text is None:
            return [replace(sample, messages=answer) for answer in answers]
        end = self.tokenizer.eos_token or ""
        return [
            replace(sample, text=answer if answer.endswith(end) else answer + end)
            for answer in answers
        ]

    def _chat(self, sample: Sample) -> RenderedChat:
        """Return the tokens of a sample; with two answers, those of the prompt have no labels."""
        chat = self._rendered(sample)
        if (pair := sample.preference) is None:
            return chat
        prompt = self._prompt(sample, pair.prompt)
        if chat.ids[: len(prompt)] != prompt:
            raise text_error(
                sample, "the tokens of the prompt change when an answer follows; end the prompt "
                "where a token ends",
            )
        learned = (False,) * len(prompt) + chat.learned[len(prompt) :]
        return replace(chat, learned=learned)

    def _rendered(self, sample: Sample) -> RenderedChat:
        if sample.text is not None:
            return text_chat(self.tokenizer, sample, self.processor.adds_special)
        return self.processor.template.chat(
            sample, self._messages(sample), self.processor.adds_special
        )

    def _messages(self, sample: Sample) -> list[dict[str, Any]]:
        return template_messages(
            sample, self.config.modalities, self.processor.template, self.processor.item_tokens
        )

    def _prompt(self, sample: Sample, prompt: Any) -> tuple[int, ...]:
        """Return the tokens of the prompt of two answers."""
        if sample.text is not None:
            return self._rendered(replace(sample, text=prompt)).ids
        messages = self._messages(replace(sample, messages=prompt))
        return self.processor.template.prompt(sample, messages, self.processor.adds_special)

    @cached_property
    def _item_check(self) -> ItemCheck:
        return ItemCheck(self.processor)

    def _check_items(self, encoded: Conversation) -> None:
        """Run :class:`ItemCheck` on a sample; raise a ``SampleError`` also if the processor fails.
        """
        try:
            self._item_check(encoded)
        except MemoryError:
            raise
        except USER_CODE_RAISES as error:  # a processor may raise anything
            raise self._named(encoded, error) from error

    def _reader(self, kind: str, item: Any = None) -> Any:
        if kind == "audio":
            return lambda item: read_audio(item, self.processor.sampling_rate)
        if kind == "video":
            return partial(self._video, times=getattr(item, "times", None))
        return read_image

    def _video(self, video: Any, times: Sequence[float] | None = None) -> Clip | list:
        if isinstance(video, Clip):
            return video
        if not isinstance(video, list):
            raise SampleError(
                "it is a picture, not a video file; accepted in a column of videos: video files, "
                "or, with data.modalities.video.frames: true, a list of pictures for each video"
            )
        frames = frames_of(video)
        if times is not None:
            return Clip.from_frames([np.asarray(frame) for frame in frames], times)
        if (fps := self.config.modalities["video"].fps) is None:
            return frames
        return clip_of_images(frames, fps)

    def _of_group(
        self, group: Sequence[Conversation]
    ) -> tuple[Microbatch | None, list[Conversation], list[Skipped]]:
        """Return a microbatch, the samples in it, and the samples that were left out."""
        try:
            return self._microbatch(group), list(group), []
        except SampleError as error:
            if self.config.on_error == "raise" and error.sample_id is not None:
                raise
            first: BaseException = error
        except MemoryError:  # the process lacks memory; the samples are not at fault
            raise
        except USER_CODE_RAISES as error:  # a processor may raise anything
            first = error
        usable, skipped = [], []
        for sample in group:
            try:
                self._microbatch([sample])
                usable.append(sample)
            except MemoryError:
                raise
            except USER_CODE_RAISES as error:
                named = self._named(sample, error)
                if self.config.on_error == "raise":
                    raise named from error
                source = self.dataset.names[int(self.dataset.sources[sample.sample.index])]
                skipped.append(Skipped.of(named, source))
        if not skipped:
            ids = ", ".join(repr(sample.id) for sample in group)
            raise DataError(
                f"samples {ids} can be used separately, but not in one microbatch: "
                f"{type(first).__name__}: {first}"
            ) from first
        return self._microbatch(usable) if usable else None, usable, skipped

    def _named(self, sample: Conversation, error: BaseException) -> SampleError:
        if isinstance(error, SampleError) and error.sample_id is not None:
            return error
        explained = isinstance(error, DataError) or type(error).__module__.startswith("raymm.")
        reason = str(error) if explained else (
            f"the processor fails on it ({type(error).__name__}: {error})"
        )
        return text_error(sample.sample, reason)

    def _microbatch(self, samples: Sequence[Conversation]) -> Microbatch:
        group = [row for sample in samples for row in sample.rows]
        tensors = self.processor(
            [sample.text for sample in group], [sample.media for sample in group]
        )
        ids, mask = tensors[IDS], tensors[MASK]
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, sample in enumerate(group):
            valid = mask[row].bool()
            tokens = ids[row][valid].tolist()
            labels[row, valid] = torch.tensor(sample.labels(tokens))
            self._check_length(sample, len(tokens))
        most = self.config.max_length
        microbatch = {**tensors, "labels": labels}
        if ids.shape[1] > most:
            microbatch = {
                name: value[:, :most] if value.shape[:2] == ids.shape else value
                for name, value in microbatch.items()
            }
        for row, sample in enumerate(group):
            if bool((microbatch["labels"][row] == IGNORE_INDEX).all()):
                raise text_error(
                    sample.sample, f"no label token among its first {most} tokens (max_length)"
                )
        self._check_ids(group, microbatch)
        if self._check is not None:
            self._check(microbatch)
        return microbatch

    def length(self, sample: Conversation) -> int:
        """Count the tokens of a sample before truncation at ``max_length``; raise a ``SampleError``
        if the processor fails."""
        if not any(sample.media.values()):
            return len(sample.ids)
        try:
            return int(self.processor([sample.text], [sample.media])[MASK].sum())
        except MemoryError:
            raise
        except USER_CODE_RAISES as error:  # a processor may raise anything
            raise self._named(sample, error) from error

    def _check_length(self, sample: Conversation, length: int) -> None:
        cut, behind = length - self.config.max_length, sample.after_media()
        if behind is not None and cut > behind:
            raise text_error(
                sample.sample,
                f"its {length} tokens exceed max_length ({self.config.max_length}), which would "
                "cut off tokens of its items; use smaller items (the pixel limits of the "
                "processor), or a larger max_length",
            )

    def _check_ids(self, group: Sequence[Conversation], microbatch: Mapping[str, Any]) -> None:
        if (vocabulary := self.config.vocabulary) is None:
            return
        for row, sample in enumerate(group):
            largest = int(microbatch[IDS][row].max())
            if largest >= vocabulary:
                token = self.processor.tokenizer.convert_ids_to_tokens(largest)
                raise text_error(
                    sample.sample,
                    f"the token {token!r} has the id {largest}, but the language model has "
                    f"embeddings for {vocabulary} ids only; set model.new_tokens: from_processor "
                    "to add embeddings for such tokens",
                )

    def _described(
        self, microbatch: Microbatch, samples: Sequence[Conversation]
    ) -> MicrobatchMeta:
        group = [row for sample in samples for row in sample.rows]
        inputs, keys = self._kept_parts(microbatch)
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(group):
            for kind, items in sample.media.items():
                rows.setdefault(TOWER_OF[kind], []).extend([row] * len(items))
        meta = describe_vlm(
            microbatch, inputs, [id for sample in samples for id in sample.row_ids],
            {name: rows.get(name, [0]) for name in inputs if name != "text"},
        )
        # If cached features replace the inputs of a tower, these entries are their shapes.
        shapes = {
            f"{name}/{entry}": _digest(value)
            for name, tensors in inputs.items() if name != "text" and is_featured(tensors)
            for entry, value in tensors.items() if not value.is_floating_point()
        }
        most = self.config.max_length
        truncated = sum(
            length >= most and self.length(sample) > most
            for length, sample in zip(meta.lengths, group, strict=True)
        )
        return replace(
            meta, digests=meta.digests | shapes, feature_keys=keys, truncated=truncated
        )


def measure_of(config: DataConfig) -> Measure | None:
    """Return the class that measures samples with ``data.processor``; None without a processor."""
    return None if config.processor is None else ProcessedSizes


class ProcessedSizes:
    """Sizes of processed samples: tower input values of each item, and tokens including those of
    items."""

    def __init__(self, dataset: Dataset, config: DataConfig) -> None:
        self._builder = ProcessedBuilder(config, dataset)

    def __call__(self, sample: Sample) -> tuple[int, dict[str, list[tuple[int, int, int]]]]:
        encoded = self._builder.encode(sample)
        inputs, meta = self._builder.alone(encoded)
        kinds = self._builder.config.modalities
        counts = {kind: len(encoded.media.get(kind, ())) for kind in kinds}
        items: dict[str, list[tuple[int, int, int]]] = {}
        for kind, count in counts.items():
            tower = TOWER_OF[kind]
            total = sum(v.numel() for v in inputs.get(tower, {}).values() if v.is_floating_point())
            # The total of a sample is divided evenly among its items, which always stay together.
            in_tower = sum(n for other_kind, n in counts.items() if TOWER_OF[other_kind] == tower)
            sizes = [
                total * (n + 1) // max(in_tower, 1) - total * n // max(in_tower, 1)
                for n in range(count)
            ]
            items[kind] = [(size, 1, 1) for size in sizes]
        return meta.tokens, items


def describe_vlm(
    microbatch: Mapping[str, torch.Tensor], parts: Mapping[str, Mapping[str, torch.Tensor]],
    sample_ids: Sequence[str], items: Mapping[str, Sequence[int]],
) -> MicrobatchMeta:
    """Return the metadata of a microbatch.

    Args:
        microbatch: inputs of the model's forward, and labels.
        items: row of each item by tower.
    """
    ids, labels = microbatch[IDS], microbatch["labels"]
    mask = microbatch.get(MASK)
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(dim=1).tolist()
    return MicrobatchMeta(
        num_samples=len(ids), seq_len=ids.shape[1], tokens=sum(lengths), lengths=tuple(lengths),
        label_tokens=int((labels[:, 1:] != IGNORE_INDEX).sum()),
        items={name: list(rows) for name, rows in items.items()},
        shapes={n: {k: tuple(v.shape) for k, v in tensors.items()} for n, tensors in parts.items()},
        sample_ids=tuple(sample_ids),
        dtypes={n: {k: str(v.dtype) for k, v in tensors.items()} for n, tensors in parts.items()},
        digests={
            name: _digest(value) for name, value in sorted(microbatch.items())
            if not value.is_floating_point() and value.shape != ids.shape
        },
    )  # fmt: skip


def _digest(values: torch.Tensor) -> str:
    data = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


def _shuffled(
    group: Sequence[Conversation], kind: str, random: np.random.Generator
) -> list[Conversation]:
    """Return samples in which the items of a kind are exchanged between samples with equal numbers
    of items."""
    result = list(group)
    by_count: dict[int, list[int]] = {}
    for row, sample in enumerate(group):
        by_count.setdefault(len(sample.media.get(kind, ())), []).append(row)
    for count, rows in by_count.items():
        if not count:
            continue
        order = [rows[i] for i in random.permutation(len(rows))]
        for row, donor in zip(order, order[1:] + order[:1], strict=True):
            media = {**group[row].media, kind: group[donor].media[kind]}
            result[row] = group[row].with_media(media)
    return result
