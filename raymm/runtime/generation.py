"""Greedy text generation on the ranks of a running model, without moving weights.

Each step runs one microbatch forward: the prompt of one text, or the latest tokens of several
texts, whose keys and values are cached by the stages. A step takes about as long as reading the
weights, for one text as for eight. Several steps are in flight at once, so that all stages are busy
while texts wait for their next tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import torch

from raymm.actors.modules.message import Decode
from raymm.data import MicrobatchMeta, describe
from raymm.data.loading.builder import SampleCheck
from raymm.errors import ModelError
from raymm.runtime.parallel_module import PendingStep
from raymm.scheduler.plan.plan import Plan

# Settings of a generation configuration that do not affect the text, or for which raymm has its own
# option (maximum length).
_NOT_OF_TEXTS = frozenset({
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "transformers_version", "max_length", "max_new_tokens",
})

# Maximum number of texts per step.
TEXTS_PER_STEP = 8


class WritingModule(Protocol):
    """Model on actors that can generate text."""

    model: Any
    plan: Plan
    group: Any

    def sample_check(self) -> SampleCheck | None:
        """Return the check that data workers apply to samples."""
        ...

    def submit(
        self, prepared: Any, update: bool = False, forward_only: bool = False, keep: Any = None,
        decode: Decode | None = None,
    ) -> PendingStep:
        """Start a step of one microbatch."""
        ...


@dataclass(frozen=True)
class Prompt:
    """Beginning of a text.

    Attributes:
        parts: as in a microbatch of one row: ``"text"`` and modalities, tensors by name or Ray
            references to them.
    """

    parts: Mapping[str, Any]
    meta: MicrobatchMeta
    keep: Any = None

    @classmethod
    def of_text(cls, ids: Collection[int]) -> Prompt:
        """Return a prompt of text alone."""
        text = _text(torch.tensor([list(ids)]))
        return cls({"text": text}, describe(dict(text), ["prompt"]))


@dataclass
class _Text:
    number: int
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class WritingRules:
    """End tokens, and settings of the model's generation configuration that are ignored.

    Attributes:
        ends: ids of tokens that end a text. They are not part of it.
        unused: ignored settings, such as ``"temperature 0.7"``.
    """

    ends: frozenset[int]
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, tokenizer: Any, answer_ends: Collection[int]) -> WritingRules:
        """Return the rules of a model.

        Like ``generate`` of transformers, a text ends at ``eos_token_id`` of the generation
        configuration (else of the model's configuration, else of the tokenizer). It also ends at
        the end of a turn, which a model learns from its chat template.

        Args:
            model: a :class:`raymm.MultimodalModule` or :class:`raymm.PretrainedVlm`.
            answer_ends: ids of tokens that end a turn of the chat template.

        Raises:
            ModelError: the generation configuration cannot be read.
        """
        config = model.language_spec().source.origin.generation_config
        ends = None if config is None else config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        ids = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
        settings = {} if config is None else config.to_diff_dict()
        unused = [
            f"{name} {value}" for name, value in settings.items()
            if not (name in _NOT_OF_TEXTS or name.startswith(("_", "output_", "return_")))
        ]
        return cls(frozenset(map(int, ids)) | frozenset(answer_ends), tuple(unused))

    @property
    def note(self) -> str | None:
        """Note for the user about ignored settings; None if there are none."""
        if not self.unused:
            return None
        return (
            "note: text is generated greedily; ignored settings of the model's "
            f"generation_config.json: {', '.join(self.unused)}"
        )

    def until_end(self, ids: Sequence[int]) -> list[int]:
        """Return the ids before the first one that ends a text."""
        return list(takewhile(lambda token: token not in self.ends, ids))


def check_generates(parallel: WritingModule) -> None:
    """Raise ModelError if the model cannot generate text under its plan."""
    model, plan = parallel.model, parallel.plan
    stage = plan.module_stages(model.text_module)[0]
    if plan.splits_samples or max(stage.cp, stage.fsdp) > 1:
        raise ModelError(
            "to generate text, each process of the language model needs whole samples; accepted: "
            "pp, tp and dp, without cp, sharding 'fsdp' or a mapping"
        )
    model.check_generates()


def generate(
    parallel: WritingModule, prompts: Iterable[Prompt], max_tokens: int,
    ends: Collection[int] = (), under_way: int | None = None,
) -> Iterator[list[int]]:
    """Yield the greedy continuation of each prompt as token ids, in the order of the prompts.

    Args:
        parallel: model without other steps in flight.
        ends: ids of tokens that end a text. They are not part of it.
        under_way: number of texts generated at once, distributed evenly over the steps in flight.
            There are as many steps as stages of the language model, and at least two. Default:
            eight texts per step.

    Raises:
        ModelError: the model cannot generate text under its plan.
        RankFailedError: a process died or raised.
    """
    check_generates(parallel)
    writing = _Writing(parallel, prompts, under_way)
    finished: dict[int, list[int]] = {}
    given_out = 0
    while (step := writing.next_step()) is not None:
        for text, token in step:
            if token not in ends:
                text.tokens.append(token)
            if token in ends or len(text.tokens) >= max_tokens:
                finished[text.number] = text.tokens
                writing.end(text)
            else:
                writing.go_on(text)
        while given_out in finished:
            yield finished.pop(given_out)
            given_out += 1


class _Writing:
    """Steps in flight. Their composition depends on the texts alone, so tokens do not depend on
    timing."""

    def __init__(
        self, parallel: WritingModule, prompts: Iterable[Prompt], under_way: int | None
    ) -> None:
        self._parallel, self._source = parallel, enumerate(prompts)
        # One stage computes while another one computes or tokens travel.
        self._steps = max(len(parallel.plan.replicas(parallel.model.text_module)[0]), 2)
        self._most = under_way or TEXTS_PER_STEP * self._steps
        self._alive, self._exhausted = 0, False
        self._waiting: deque[_Text] = deque()
        self._pending: deque[tuple[list[_Text], PendingStep]] = deque()
        self._ended: list[int] = []

    def next_step(self) -> list[tuple[_Text, int]] | None:
        """Wait for the oldest step in flight. Return its texts with their next tokens; None if all
        texts have ended."""
        self._fill()
        if not self._pending:
            return None
        texts, pending = self._pending.popleft()
        return list(zip(texts, map(int, pending.scores()[0]), strict=True))

    def go_on(self, text: _Text) -> None:
        """Queue a text for another step."""
        self._waiting.append(text)

    def end(self, text: _Text) -> None:
        """End a text. Its cached keys and values are dropped with the next step."""
        self._alive -= 1
        self._ended.append(text.number)

    def _fill(self) -> None:
        while len(self._pending) < self._steps:
            if self._alive < self._most and not self._exhausted:
                begun = next(self._source, None)
                self._exhausted = begun is None
                if begun is not None:
                    self._alive += 1
                    self._submit([_Text(*begun)])
            elif self._waiting:
                share = -(-self._alive // self._steps)
                number = min(len(self._waiting), max(share, 1))
                self._submit([self._waiting.popleft() for _ in range(number)])
            else:
                return

    def _submit(self, texts: list[_Text]) -> None:
        first = not texts[0].tokens
        decode = Decode(tuple(text.number for text in texts), first, tuple(self._ended))
        self._ended.clear()
        prompt = texts[0].prompt
        inputs, meta, keep = prompt.parts, prompt.meta, prompt.keep
        if not first:
            inputs = {"text": _text(torch.tensor([text.tokens[-1:] for text in texts]))}
            ids = [name for text in texts for name in text.prompt.meta.sample_ids]
            meta, keep = describe(dict(inputs["text"]), ids), None
        self._pending.append((texts, self._parallel.submit(
            ([inputs], [meta]), forward_only=True, keep=keep, decode=decode
        )))


def _text(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return text inputs of rows, (B, T) int64, without labels."""
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
    }
