"""Token ids and labels of a sample."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.weights.custom_code import custom_code, why_not_loaded
from raymm.actors.weights.hub_folder import local_folder
from raymm.data.conversations.template import LOSS, ChatTemplate, RenderedChat
from raymm.data.samples.config import DataConfig, ModalityDataConfig
from raymm.data.samples.media import Sample
from raymm.data.samples.placeholders import (
    check_counts,
    check_parts,
    find_placeholders,
    flatten_parts,
    part_types,
    repeat_placeholders,
    template_takes_parts,
    text_error,
)
from raymm.data.samples.rows import LEARNED_ROLE
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError


def load_tokenizer(folder: str, trust_remote_code: bool = False):
    """Return the tokenizer of a local folder or hub id. Raise a ``DataError`` if the folder does
    not exist, contains no tokenizer, or requires Python code that is not trusted.

    Args:
        trust_remote_code: run Python files of the folder, if it names any.
    """
    folder = processor_folder(folder, "data.tokenizer")
    from transformers import AutoTokenizer  # seconds to import; the driver may not need it

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except USER_CODE_RAISES as error:  # a folder may contain anything
        if not trust_remote_code and "AutoTokenizer" in custom_code(folder):
            why = why_not_loaded(folder, "AutoTokenizer", error)
            raise DataError(f"data.tokenizer: {why}") from None
        raise DataError(
            f"data.tokenizer: no tokenizer in {folder!r}: {type(error).__name__}: {error}"
        ) from error


def processor_folder(path: str, field: str) -> str:
    """Return the local folder of a tokenizer or processor, given the folder or the id of a model on
    the hub. Raise a ``DataError`` that names ``field`` if it is neither local, in the cache, nor on
    the hub."""
    try:
        folder = local_folder(path, weights=False)
    except ConfigError as error:
        raise DataError(f"{field}: {error}") from None
    if not Path(folder).is_dir():
        raise DataError(f"{field}: {path!r} is not a local folder")
    return folder


def check_vocabulary(tokenizer, folder: str, vocabulary: int) -> None:
    """Raise a ``DataError`` if a tokenizer has more token ids than the model has embeddings. Added
    tokens may exceed the number, as in some text models; samples that contain them are refused."""
    added = set(tokenizer.added_tokens_decoder)
    largest = max((i for i in tokenizer.get_vocab().values() if i not in added), default=-1)
    if largest >= vocabulary:
        raise DataError(
            f"data.tokenizer: {folder!r} has token ids up to {largest}, but the language model has "
            f"embeddings for {vocabulary} ids only (vocab_size). Accepted: the tokenizer of the "
            "model; or, for a Hugging Face VLM (model.path), model.new_tokens: from_processor, "
            "which adds embeddings for the missing tokens"
        )


class TextEncoder:
    """Converts samples to token ids and labels.

    Args:
        max_length: tokens kept per sample.
        modalities: placeholders (one token each, else a ``DataError``), and types of message parts.
        vocabulary: number of token ids with embeddings; None if unknown.
        options: variables for the chat template of every sample.
        ignored: keys of messages that the chat template need not write.
    """

    def __init__(
        self,
        tokenizer,
        max_length: int,
        modalities: Mapping[str, ModalityDataConfig] | None = None,
        vocabulary: int | None = None,
        options: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ):
        modalities = modalities or {}
        self._vocabulary = vocabulary
        self.tokenizer, self.max_length = tokenizer, max_length
        self._placeholders = find_placeholders(tokenizer, modalities)
        self._types = part_types(modalities)
        self._options, self._ignored = options, ignored
        # Part types for which the chat template itself writes the right placeholder.
        self._native = {
            kind for kind, name in self._types.items()
            if name in self._placeholders and tokenizer.chat_template
            and template_takes_parts(tokenizer, kind, self._placeholders[name].token)
        }

    @classmethod
    def from_config(cls, config: DataConfig, tokenizer: Any = None) -> TextEncoder:
        """Return the encoder of a data configuration; load the tokenizer unless it is given. Raise
        a ``DataError`` if it cannot be loaded, or a placeholder is not one of its tokens."""
        if tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code)
        return cls(
            tokenizer, config.max_length, config.modalities, config.vocabulary,
            config.chat_template_kwargs, config.ignore_message_keys,
        )

    def encode(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Return the token ids and labels of a sample, both of the same length <= ``max_length``.

        For ``text``, every token except the first is a label, unless it belongs to the prompt. For
        ``messages``, see :meth:`ChatTemplate.chat`. Placeholders are not labels. List-form messages
        are passed to chat templates that support them; for other templates they become text with
        placeholders. Raise a ``SampleError`` if there is no text, a lone surrogate (such as
        "\\ud800" in JSON), no label within ``max_length``, placeholders do not match the items, or
        :meth:`ChatTemplate.chat` fails, and a ``DataError`` if there are ``messages``, but the
        tokenizer has no chat template."""
        check_characters(sample)
        if sample.text is not None:
            chat = text_chat(self.tokenizer, sample)
        else:
            chat = self._template.chat(sample, self._messages(sample))
        placeholders = {placeholder.id for placeholder in self._placeholders.values()}
        pairs = [
            (token, token if is_learned and token not in placeholders else IGNORE_INDEX)
            for token, is_learned in zip(chat.ids, chat.learned, strict=True)
        ]
        pairs = repeat_placeholders(pairs, self._placeholders)
        input_ids, labels = [token for token, _ in pairs], [label for _, label in pairs]
        length = len(input_ids)
        check_counts(sample, input_ids, self.max_length, self._placeholders)
        input_ids, labels = input_ids[: self.max_length], labels[: self.max_length]
        self._check_vocabulary(sample, input_ids)
        if labels:
            labels[0] = IGNORE_INDEX  # nothing predicts the first token
        if all(label == IGNORE_INDEX for label in labels):
            empty = sample.text is not None and not sample.text.strip()
            raise text_error(
                sample,
                f"no label token among its first {len(labels)} of {length} tokens "
                f"(max_length is {self.max_length})" + (": the text is empty" if empty else "")
                + roles_without_labels(sample),
            )
        return input_ids, labels

    def count_truncated(
        self, sample: Sample, encoded: Sequence[tuple[list[int], list[int]]]
    ) -> int:
        """Count the rows of a sample that were truncated to ``max_length``; ``encoded`` is the
        result of :meth:`encode` or :meth:`encode_answers`."""
        if all(len(ids) < self.max_length for ids, _ in encoded):
            return 0
        uncut = copy.copy(self)
        uncut.max_length = sys.maxsize
        rows = uncut.encode_answers(sample) if len(encoded) > 1 else [uncut.encode(sample)]
        return sum(len(ids) > self.max_length for ids, _ in rows)

    def encode_answers(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """Return :meth:`encode` of the prompt with the chosen and with the rejected answer. Only
        the answer has labels. A text ends with the end-of-text token of the tokenizer. Errors are
        those of :meth:`encode`; it is also an error if the tokens of the prompt change when an
        answer follows."""
        preference = sample.preference
        assert preference is not None  # see StepBuilder
        as_text, encoded = isinstance(preference.prompt, str), []
        for answer in preference.answers:
            if as_text:
                end = self.tokenizer.eos_token or ""
                text = answer if answer.endswith(end) else answer + end
                answer_sample = replace(sample, text=text)
                prompt = text_chat(self.tokenizer, replace(sample, text=preference.prompt)).ids
            else:
                answer_sample = replace(sample, messages=answer)
                prompt_sample = replace(sample, messages=preference.prompt)
                prompt = self._template.prompt(prompt_sample, self._messages(prompt_sample))
            prompt = [
                token for token, _ in
                repeat_placeholders([(token, token) for token in prompt], self._placeholders)
            ]
            ids, labels = self.encode(answer_sample)
            if ids[: len(prompt)] != prompt[: len(ids)]:
                raise text_error(
                    sample, "the tokens of the prompt change when an answer follows; end the "
                    "prompt where a token ends",
                )
            labels[: len(prompt)] = [IGNORE_INDEX] * min(len(prompt), len(labels))
            if all(label == IGNORE_INDEX for label in labels):
                raise text_error(
                    sample, f"no token of an answer is among the first {self.max_length} "
                    "(max_length)",
                )
            encoded.append((ids, labels))
        return encoded

    def _check_vocabulary(self, sample: Sample, input_ids: Sequence[int]) -> None:
        largest = max(input_ids, default=-1)
        if self._vocabulary is not None and largest >= self._vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise text_error(
                sample,
                f"the token {token!r} has the id {largest}, but the language model has embeddings "
                f"for {self._vocabulary} ids only",
            )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, None, self._options, self._ignored)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        return {name: placeholder.id for name, placeholder in self._placeholders.items()}

    def _messages(self, sample: Sample) -> list[dict]:
        """Return the messages in a form that the chat template accepts."""
        messages = sample.messages
        assert messages is not None  # see encode
        lists = [message["content"] for message in messages if isinstance(message["content"], list)]
        if not lists:
            return messages
        check_parts(sample, self._types)
        kinds = {part["type"] for parts in lists for part in parts} - {"text"}
        if self._native and kinds <= self._native:
            return [
                {**message, "content": [{k: v for k, v in part.items() if v is not None}
                                    for part in message["content"]]}
                if isinstance(message["content"], list) else message
                for message in messages
            ]
        return flatten_parts(messages, self._types, self._placeholders)


def text_chat(
    tokenizer: Any, sample: Sample, special: Callable[[str], bool] = lambda text: True
) -> RenderedChat:
    """Tokenize a sample that has ``text``. If the text has a prompt, the end-of-text token is
    appended, so that the model learns to stop. ``special`` returns True if the tokenizer adds its
    special tokens to a text. Raise a ``SampleError`` if the tokenizer fails, or a token spans the
    end of the prompt."""
    text, prompt = sample.text or "", sample.prompt_characters
    end = tokenizer.eos_token
    if prompt and end and not text.endswith(end):
        text += end
    try:
        encoded = tokenizer(
            text, add_special_tokens=special(text), return_offsets_mapping=bool(prompt)
        )
    except MemoryError:  # the process lacks memory; the sample is not at fault
        raise
    except USER_CODE_RAISES as error:  # a tokenizer raises whatever its library raises
        reason = f"the tokenizer fails on it ({type(error).__name__}: {error})"
        raise text_error(sample, reason) from error
    ids = tuple(encoded["input_ids"])
    offsets = tuple(map(tuple, encoded["offset_mapping"])) if prompt else ((0, 0),) * len(ids)
    if any(start < prompt < stop for start, stop in offsets):
        raise text_error(
            sample, "a token is part of the prompt and of the completion; end the prompt where a "
            "token ends (move a space at its end to the start of the completion)"
        )
    learned = tuple(not prompt or start >= prompt for start, _ in offsets)
    return RenderedChat(text, ids, offsets, learned)


def roles_without_labels(sample: Sample) -> str:
    """Return the reason why no message of a sample is learned, for errors; empty if some are."""
    messages = sample.messages or ()
    roles = {message["role"] for message in messages}
    if LEARNED_ROLE in roles:
        masked = all(m.get(LOSS) is False for m in messages if m["role"] == LEARNED_ROLE)
        return f": all messages of the {LEARNED_ROLE} have 'loss': false" if masked else ""
    if not roles:
        return ""
    return (
        f": no message has the role {LEARNED_ROLE!r}, whose tokens are learned; the roles are "
        f"{sorted(roles)}. Rename the role that answers (gpt, model, bot) to {LEARNED_ROLE!r} and "
        "the role that asks (human) to 'user'"
    )


def check_characters(sample: Sample) -> None:
    """Raise a ``SampleError`` for text with a lone surrogate."""
    for where, text in _strings(sample):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise text_error(
                sample,
                f"{where} has a lone surrogate, U+{code:04X}, at character {error.start}, which is "
                "half of a character; accepted: text that can be encoded as UTF-8",
            ) from None


def _strings(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield the location and text of all strings of a sample."""
    if sample.text is not None:
        yield "the text", sample.text
    for number, message in enumerate(sample.messages or ()):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        for value in (message["role"], *(part.get("text") for part in parts)):
            if isinstance(value, str):
                yield f"messages[{number}]", value
