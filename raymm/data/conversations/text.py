"""Token ids and labels of one sample."""

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
from raymm.data.samples.sample import Sample
from raymm.errors import USER_CODE_RAISES, ConfigError, DataError


def load_tokenizer(folder: str, trust_remote_code: bool = False):
    """Return the tokenizer of a folder.

    Args:
        folder: on this machine, or the id of a model on the hub.
        trust_remote_code: run Python files that it brings, if it names some.

    Raises:
        DataError: the folder does not exist, holds no tokenizer, or one that needs its own code.
    """
    folder = processor_folder(folder, "data.tokenizer")
    from transformers import AutoTokenizer  # seconds to import; the driver may not need it

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except USER_CODE_RAISES as error:  # a folder may hold anything
        if not trust_remote_code and "AutoTokenizer" in custom_code(folder):
            why = why_not_loaded(folder, "AutoTokenizer", error)
            raise DataError(f"data.tokenizer: {why}") from None
        raise DataError(
            f"data.tokenizer: no tokenizer in {folder!r}: {type(error).__name__}: {error}"
        ) from error


def processor_folder(path: str, field: str) -> str:
    """Return the folder of a tokenizer or processor on this machine.

    Args:
        path: the folder, or the id of a model on the hub, whose settings are downloaded.
        field: that names it, for errors.

    Raises:
        DataError: there is no such folder, and no such model in the cache or on the hub.
    """
    try:
        folder = local_folder(path, weights=False)
    except ConfigError as error:
        raise DataError(f"{field}: {error}") from None
    if not Path(folder).is_dir():
        raise DataError(f"{field}: {path!r} is not a local folder")
    return folder


def check_vocabulary(tokenizer, folder: str, vocabulary: int) -> None:
    """Compare a tokenizer with the embeddings of a model. Tokens that were added to it may lie
    beyond, as those of some text models do: samples with them are refused.

    Args:
        tokenizer: of the data.
        folder: it came from, for the error.
        vocabulary: ids that the language model has embeddings for.

    Raises:
        DataError: tokens of its own vocabulary have no embeddings.
    """
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
    """Makes token ids and labels of samples.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: tokens kept.
        modalities: what the media parts of list-form messages mean, and placeholders.
        vocabulary: token ids that the model has embeddings for; None if that is not known.
        options: variables for the chat template of every sample.
        ignored: keys of messages that the chat template need not write.

    Raises:
        DataError: a placeholder is not one token of the tokenizer.
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
        # Part types that the chat template writes as the right placeholder by itself.
        self._native = {
            kind for kind, name in self._types.items()
            if name in self._placeholders and tokenizer.chat_template
            and template_takes_parts(tokenizer, kind, self._placeholders[name].token)
        }

    @classmethod
    def from_config(cls, config: DataConfig, tokenizer: Any = None) -> TextEncoder:
        """Return the encoder of a data configuration.

        Args:
            config: of the data.
            tokenizer: that of the configuration, if it is loaded already.

        Raises:
            DataError: the tokenizer cannot be loaded, or a placeholder is not one of its tokens.
        """
        if tokenizer is None:
            tokenizer = load_tokenizer(config.tokenizer, config.trust_remote_code)
        return cls(
            tokenizer, config.max_length, config.modalities, config.vocabulary,
            config.chat_template_kwargs, config.ignore_message_keys,
        )

    def encode(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Token ids and labels of a sample, both of the same length <= ``max_length``.

        ``text``: every token but the first is a label, except the prompt. ``messages``: see
        :meth:`ChatTemplate.chat`. Placeholders are not labels. Parts of list-form messages go to a
        chat template that knows them; for one that takes strings they become text with
        placeholders.

        Raises:
            SampleError: no text, half a character (a lone surrogate, as "\\ud800" of JSON is), no
                label within ``max_length``, placeholders that do not match the items, or what
                :meth:`ChatTemplate.chat` refuses.
            DataError: ``messages`` and a tokenizer without a chat template.
        """
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
        """Count the rows of a sample that were cut at ``max_length``.

        Args:
            sample: it.
            encoded: by :meth:`encode` or :meth:`encode_answers`.
        """
        if all(len(ids) < self.max_length for ids, _ in encoded):
            return 0
        uncut = copy.copy(self)
        uncut.max_length = sys.maxsize
        rows = uncut.encode_answers(sample) if len(encoded) > 1 else [uncut.encode(sample)]
        return sum(len(ids) > self.max_length for ids, _ in rows)

    def encode_answers(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """:meth:`encode` of the prompt with the chosen answer and with the rejected one, whose
        labels are the answer's only. A text ends with the tokenizer's end of text.

        Raises:
            SampleError, DataError: as in :meth:`encode`; or the prompt's tokens change when an
                answer follows.
        """
        preference = sample.preference
        assert preference is not None  # see StepBuilder
        as_text, encoded = isinstance(preference.prompt, str), []
        for answer in preference.answers:
            if as_text:
                end = self.tokenizer.eos_token or ""
                text = answer if answer.endswith(end) else answer + end
                own = replace(sample, text=text)
                prompt = text_chat(self.tokenizer, replace(sample, text=preference.prompt)).ids
            else:
                own = replace(sample, messages=answer)
                asked = replace(sample, messages=preference.prompt)
                prompt = self._prompt(asked)
            prompt = [
                token for token, _ in
                repeat_placeholders([(token, token) for token in prompt], self._placeholders)
            ]
            ids, labels = self.encode(own)
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

    def _prompt(self, sample: Sample) -> tuple[int, ...]:
        """Return the tokens of the messages of a sample, with a generation prompt."""
        try:
            text, _ = self._template.render(
                self._messages(sample), True, sample.tools, self._template.options(sample)
            )
        except MemoryError:
            raise
        except USER_CODE_RAISES as error:  # a template is a program: it may raise anything
            raise text_error(
                sample, f"the chat template failed on the prompt: {error}"
            ) from error
        return self._template.tokens(text)[0]

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Token ids of the placeholders, by modality."""
        return {name: placeholder.id for name, placeholder in self._placeholders.items()}

    def _messages(self, sample: Sample) -> list[dict]:
        """The messages as the chat template takes them."""
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
    """Return the tokens of a sample of plain text.

    A text with a prompt ends with the tokenizer's end of text, so that the model learns to stop.

    Args:
        tokenizer: of the data.
        sample: it has ``text``.
        special: True for texts that the tokenizer adds its special tokens to.

    Raises:
        SampleError: the tokenizer fails on it, or a token is part of the prompt and of what
            follows.
    """
    text, prompt = sample.text or "", sample.prompt_characters
    end = tokenizer.eos_token
    if prompt and end and not text.endswith(end):
        text += end
    try:
        encoded = tokenizer(
            text, add_special_tokens=special(text), return_offsets_mapping=bool(prompt)
        )
    except MemoryError:  # that is the process's, whatever the sample
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
    """Return why no message of a sample is learned, for errors; empty if some are."""
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
    """
    Raises:
        SampleError: text with half a character.
    """
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
    """All text of a sample, and where it is."""
    if sample.text is not None:
        yield "the text", sample.text
    for number, message in enumerate(sample.messages or ()):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        for value in (message["role"], *(part.get("text") for part in parts)):
            if isinstance(value, str):
                yield f"messages[{number}]", value
