"""Token ids and labels of one sample."""

from collections.abc import Sequence
from pathlib import Path

from raymm.data.dataset import Sample
from raymm.data.errors import DataError, SampleError

IGNORE_INDEX = -100  # torch's cross_entropy ignores it; so does every Hugging Face model


def load_tokenizer(folder: str):
    """Tokenizer of a local folder.

    Raises:
        DataError: the folder does not exist or holds no tokenizer.
    """
    if not Path(folder).is_dir():
        raise DataError(f"data.tokenizer: {folder!r} is not a local folder")
    from transformers import AutoTokenizer  # seconds to import; the driver may not need it

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: no tokenizer in {folder!r}: {error}") from error


def encode_text(tokenizer, sample: Sample, max_length: int) -> tuple[list[int], list[int]]:
    """Token ids and labels of a sample, both of the same length <= ``max_length``.

    ``text``: every token but the first is a label. ``messages``: the tokens of each assistant
    message and its end-of-turn token are labels; all else is -100. What a template writes after
    the end-of-turn token (ChatML's newline) is not a label.

    Raises:
        SampleError: no label within ``max_length``, or a chat template whose rendering of the
            first messages is not a prefix of its rendering of all of them: labels would be wrong.
        DataError: ``messages`` and a tokenizer without a chat template.
    """
    if sample.text is not None:
        input_ids = list(tokenizer(sample.text)["input_ids"])
        labels = list(input_ids)
    else:
        input_ids, labels = _encode_messages(tokenizer, sample)
    length = len(input_ids)
    input_ids, labels = input_ids[:max_length], labels[:max_length]
    if labels:
        labels[0] = IGNORE_INDEX  # nothing predicts the first token
    if all(label == IGNORE_INDEX for label in labels):
        raise SampleError(
            sample.id,
            None,
            f"no label token among its first {len(labels)} of {length} tokens "
            f"(max_length is {max_length})",
        )
    return input_ids, labels


def _encode_messages(tokenizer, sample: Sample) -> tuple[list[int], list[int]]:
    if not tokenizer.chat_template:
        raise DataError(
            f"sample {sample.id!r} has 'messages', but the tokenizer "
            f"{tokenizer.name_or_path!r} has no chat template"
        )
    messages = sample.messages
    input_ids = _render(tokenizer, sample, len(messages))
    labels = [IGNORE_INDEX] * len(input_ids)
    special = _special_ids(tokenizer)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # An assistant turn is what it adds to the prompt that a model would be given.
        prompt = _render(tokenizer, sample, number, add_generation_prompt=True)
        turn = _render(tokenizer, sample, number + 1)
        if turn[: len(prompt)] != prompt or input_ids[: len(turn)] != turn:
            raise SampleError(
                sample.id,
                None,
                f"the chat template is not prefix-consistent at messages[{number}]: the tokens "
                "of the conversation so far change when the next message is added",
            )
        stop = _end_of_turn(tokenizer, turn, len(prompt), special)
        labels[len(prompt) : stop] = input_ids[len(prompt) : stop]
    return input_ids, labels


def _render(tokenizer, sample: Sample, count: int, add_generation_prompt=False) -> list[int]:
    """Token ids of the first ``count`` messages."""
    try:
        return list(
            tokenizer.apply_chat_template(
                sample.messages[:count],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise SampleError(
            sample.id, None, f"the chat template failed on its first {count} messages: {error}"
        ) from error


def _special_ids(tokenizer) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {id for id in added if added[id].special}


def _end_of_turn(tokenizer, ids: Sequence[int], start: int, special: frozenset[int]) -> int:
    """End of the turn ``ids[start:]``: after its last special token if only space follows."""
    for stop in range(len(ids), start, -1):
        if ids[stop - 1] in special:
            return stop if not tokenizer.decode(ids[stop:]).strip() else len(ids)
    return len(ids)
