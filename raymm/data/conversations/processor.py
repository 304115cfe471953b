"""Processor of a Hugging Face model: chat template, tokenizer, and tensors of media.

No code is specific to a model: a processor is called with the arguments that all processors of
transformers accept, and its outputs keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raymm.actors.weights.custom_code import custom_code, why_not_loaded
from raymm.data.conversations.template import ChatTemplate
from raymm.data.conversations.text import processor_folder
from raymm.data.samples.config import KINDS
from raymm.data.video.frames import Clip
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError
from raymm.packages import explained_imports

FIELD = "data.processor"
# Tensors that every processor returns.
IDS, MASK = "input_ids", "attention_mask"
_PROBE = "raymmprobe"


class ModelProcessor:
    """Processor of a model.

    Args:
        folder: folder written by ``save_pretrained``, or the id of a model on the hub.
        trust_remote_code: run Python files of the folder, if it names any.
        options: variables for the chat template of every sample.
        ignored: keys of messages that the chat template need not write.

    Raises:
        DataError: the folder is missing, has no processor or chat template, or needs Python code
            that is not trusted.
    """

    def __init__(
        self, folder: str, trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None, ignored: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._processor: Any = _load(folder, trust_remote_code)
        self.tokenizer: Any = getattr(self._processor, "tokenizer", None)
        if self.tokenizer is None:
            raise DataError(
                f"{FIELD}: {folder!r} contains a {type(self._processor).__name__}, which has no "
                "tokenizer; accepted: the processor of a model (AutoProcessor)"
            )
        if not (self._processor.chat_template or self.tokenizer.chat_template):
            raise DataError(
                f"{FIELD}: {folder!r} has no chat template; add one to it (chat_template.jinja)"
            )
        self.template = ChatTemplate(self.tokenizer, self._processor, options, ignored)

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of its sound input in Hz; raises a ``ValueError`` if sound is not accepted.
        """
        for name in ("feature_extractor", "audio_processor"):
            rate = getattr(getattr(self._processor, name, None), "sampling_rate", None)
            if isinstance(rate, int):
                return rate
        raise ValueError(f"{type(self._processor).__name__} does not accept sound")

    def save(self, folder: str | Path) -> None:
        self._processor.save_pretrained(folder)

    @cached_property
    def item_tokens(self) -> dict[str, str]:
        """By kind, the token that represents an item in a text, if the processor names one."""
        tokens = {kind: getattr(self._processor, f"{kind}_token", None) for kind in KINDS}
        return {kind: str(token) for kind, token in tokens.items() if token}

    @cached_property
    def item_ids(self) -> frozenset[int]:
        """Ids of the tokens that represent items before or after processing, if the processor names
        them."""
        ids: list[Any] = []
        for kind in KINDS:
            ids.append(getattr(self._processor, f"{kind}_token_id", None))
            ids += getattr(self._processor, f"{kind}_token_ids", None) or ()
        ids += [self.tokenizer.convert_tokens_to_ids(token) for token in self.item_tokens.values()]
        return frozenset(number for number in ids if isinstance(number, int))

    @cached_property
    def markers(self) -> dict[str, str]:
        """By kind, the text that a rendering contains for an item; empty if the template accepts no
        such item."""
        return {
            kind: self.template.marker({"type": kind}) or self.item_tokens.get(kind, "")
            for kind in KINDS
        }

    def __call__(
        self, texts: Sequence[str], media: Sequence[Mapping[str, Sequence[Any]]]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of some samples, padded on the right.

        Args:
            texts: rendered conversations or plain texts. The tokenizer adds its special tokens to
                each text for which :meth:`adds_special` is True.
            media: items of each text by kind: images, lists of frames or a :class:`Clip`,
                (samples,) float32 sound.

        Raises:
            ValueError: the processor does not return tensors that a model accepts.
            Exception: any error of the processor.
        """
        arguments: dict[str, Any] = {}
        for kind, argument in KINDS.items():
            items = [list(sample_items.get(kind, ())) for sample_items in media]
            if any(items):
                # Processors expect pictures as one list per text, other items as a single list.
                arguments[argument] = items if kind == "image" else sum(items, [])
        if KINDS["audio"] in arguments:
            arguments["sampling_rate"] = self.sampling_rate
        if KINDS["video"] in arguments:
            videos = arguments[KINDS["video"]]
            arguments |= {
                KINDS["video"]: [v.frames if isinstance(v, Clip) else v for v in videos],
                "video_metadata": [_metadata(video) for video in videos],
                "do_sample_frames": False,  # frames are already selected
            }
        special = [self.adds_special(text) for text in texts]
        if any(special) and not all(special):
            # The processor has one setting for all texts, so the tokens are added here.
            begin, end = self._special_texts
            texts = [
                begin + text + end if is_added else text
                for text, is_added in zip(texts, special, strict=True)
            ]
        output = self._processor(
            text=list(texts), return_tensors="pt", **arguments,
            text_kwargs={
                "padding": True, "padding_side": "right", "add_special_tokens": all(special),
            },
        )
        tensors = {}
        for name, value in output.items():
            try:
                tensors[name] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(
                    f"{type(self._processor).__name__} returns {name!r} as a "
                    f"{type(value).__name__}, not as a tensor"
                ) from None
        if MASK not in tensors or tensors[MASK].shape != tensors[IDS].shape:
            raise ValueError(f"{type(self._processor).__name__} returns no {MASK} for its tokens")
        return tensors

    def adds_special(self, text: str) -> bool:
        """Return True if the tokenizer adds its special tokens to a text. It does unless the text
        begins with the beginning-of-text token, or the processor writes that token itself (Mllama).
        """
        first = self.tokenizer.bos_token
        return first is None or not text.startswith(first) and not self._writes_first

    @cached_property
    def _writes_first(self) -> bool:
        """True if the processor inserts the beginning-of-text token before every text."""
        try:
            output = self._processor(text=[_PROBE], text_kwargs={"add_special_tokens": False})
        except USER_CODE_RAISES:  # some processors accept no text without an image
            return False
        return list(output[IDS][0])[:1] == [self.tokenizer.bos_token_id]

    @cached_property
    def _special_texts(self) -> tuple[str, str]:
        """Text of the special tokens that the tokenizer adds before and after a text."""
        plain = self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        full = self.tokenizer(_PROBE)["input_ids"]
        start = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
        words = self.tokenizer.convert_ids_to_tokens(full)
        return "".join(words[:start]), "".join(words[start + len(plain) :])


def _metadata(video: Clip | Sequence[Any]) -> dict[str, Any]:
    """Return the fields of ``transformers.video_utils.VideoMetadata`` for a video."""
    if not isinstance(video, Clip):
        return {
            "total_num_frames": len(video), "fps": None, "frames_indices": list(range(len(video)))
        }
    return {
        "total_num_frames": video.total, "fps": video.rate, "duration": video.seconds,
        "height": video.frames.shape[1], "width": video.frames.shape[2],
        "frames_indices": video.indices.tolist(),
    }


def _load(folder: str, trust_remote_code: bool) -> Any:
    folder = processor_folder(folder, FIELD)
    from transformers import AutoProcessor  # seconds to import

    try:
        with explained_imports(f"{FIELD}: the processor of {folder!r}"):
            return AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except ConfigError:
        raise
    except USER_CODE_RAISES as error:  # a folder may contain anything
        if custom_code(folder) and not trust_remote_code:
            raise DataError(f"{FIELD}: {why_not_loaded(folder, 'AutoProcessor', error)}") from None
        raise DataError(
            f"{FIELD}: no processor in {folder!r}: {type(error).__name__}: {error}"
        ) from error


# Pixels per side of a picture; seconds of a sound; frames of a video.
_SIDE, _SECONDS, _FRAMES = 112, 1.0, 4


def example_items(processor: ModelProcessor) -> Iterator[tuple[str, dict[str, Sequence[Any]]]]:
    """Yield a text with one item, and its media by kind, for each kind that a processor accepts. Of
    pictures and videos, only the first accepted kind is used, because most models have one tower
    for both."""
    used_kinds: set[str] = set()
    for kind in ("image", "video", "audio"):
        if kind == "video" and "image" in used_kinds:
            continue
        for text in filter(None, (processor.markers[kind], processor.item_tokens.get(kind))):
            try:
                media: dict[str, Sequence[Any]] = {kind: [_item(processor, kind)]}
                tensors = processor([text], [media])
            except USER_CODE_RAISES:  # any error for a kind that is not accepted
                continue
            if _has_items(tensors):
                used_kinds.add(kind)
                yield text, media
                break


def _item(processor: ModelProcessor, kind: str) -> Any:
    if kind == "audio":
        rate = processor.sampling_rate
        return np.sin(np.arange(int(_SECONDS * rate)) * (880 * np.pi / rate)).astype(np.float32)
    from PIL import Image

    shades = np.add.outer(np.arange(_SIDE), np.arange(_SIDE)) % 256
    picture = Image.fromarray(np.stack([shades] * 3, -1).astype(np.uint8))
    return picture if kind == "image" else [picture] * _FRAMES


def _has_items(tensors: dict[str, torch.Tensor]) -> bool:
    """Return True if there are tensors other than those of tokens."""
    shape = tensors[IDS].shape
    return any(value.shape[:2] != shape and value.is_floating_point() for value in tensors.values())
