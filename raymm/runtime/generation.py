"""Greedy decoding on the ranks of a model that runs: nobody moves a weight.

A step is forward only, of one microbatch: the prompt of a text, or the tokens that came last of
several, whose keys and values stages keep. What a step takes is to read the weights, for one text
as for eight. Several steps are under way at once, so that all stages are busy while texts wait for
their tokens.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import torch

from raymm.actors.modules.merge import CrossAttend
from raymm.actors.modules.message import Decode
from raymm.actors.modules.token_layout import MASKS
from raymm.data import MicrobatchMeta, describe
from raymm.data.loading.builder import SampleCheck
from raymm.errors import ModelError
from raymm.model.module_kind import LANGUAGE_MODEL, ModuleKind
from raymm.model.whole_model import WholeModel
from raymm.runtime.pending_step import PendingStep
from raymm.runtime.writing_trial import why_not_written
from raymm.scheduler.plan.plan import Plan

# Settings of a generation configuration that say nothing of what is written, or that raymm has an
# option of its own for (how long texts are).
_NOT_OF_TEXTS = frozenset({
    "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "transformers_version", "max_length", "max_new_tokens",
})

# Texts of a step, at most.
TEXTS_PER_STEP = 8


class WritingModule(Protocol):
    """A model on actors that may write text."""

    model: Any
    plan: Plan
    group: Any

    def sample_check(self) -> SampleCheck | None:
        """As of every model on actors."""
        ...

    def submit(
        self, prepared: Any, update: bool = False, forward_only: bool = False, keep: Any = None,
        decode: Decode | None = None,
    ) -> PendingStep:
        """As of every model on actors, of one microbatch.

        Args:
            prepared, update, forward_only, keep: as of
                :meth:`raymm.runtime.parallel_module.ParallelModule.submit`.
            decode: which texts the step is of.
        """
        ...


@dataclass(frozen=True)
class Prompt:
    """What a text begins with.

    Attributes:
        parts: as of a microbatch of one row: ``"text"`` and modalities, tensors by name or Ray
            references to them.
        meta: of the microbatch.
        keep: owner of the parts, held while they are needed.
    """

    parts: Mapping[str, Any]
    meta: MicrobatchMeta
    keep: Any = None

    @classmethod
    def of_text(cls, ids: Collection[int]) -> Prompt:
        """A prompt of text alone.

        Args:
            ids: its tokens, at least one.
        """
        text = _text(torch.tensor([list(ids)]))
        return cls({"text": text}, describe(dict(text), ["prompt"]))


@dataclass
class _Text:
    """A text under way."""

    number: int
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class WritingRules:
    """How texts end, and what of a model's generation configuration is not used.

    Attributes:
        ends: ids of tokens that end a text, and are not part of it.
        unused: settings as ``"temperature 0.7"``.
    """

    ends: frozenset[int]
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, tokenizer: Any, answer_ends: Collection[int]) -> WritingRules:
        """Return those of a model that writes. A text ends where ``generate`` of transformers ends
        it, at ``eos_token_id`` of the generation configuration (else of the model's, else of the
        tokenizer), and at the end of a turn, which a model learns from its chat template.

        Args:
            model: a :class:`raymm.MultimodalModule` or :class:`raymm.WholeModel`.
            tokenizer: of its texts.
            answer_ends: ids of tokens that end a turn of its chat template.

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
        """One line for the user; None if everything is used."""
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
    """
    Raises:
        ModelError: the model cannot write text under its plan.
    """
    model, plan = parallel.model, parallel.plan
    stage = plan.module_stages(LANGUAGE_MODEL)[0]
    if plan.splits_samples or max(stage.cp, stage.fsdp) > 1:
        raise ModelError(
            "to generate text, each process of the language model needs whole samples; accepted: "
            "pp, tp and dp, without cp, sharding 'fsdp' or a mapping"
        )
    if isinstance(model, WholeModel):
        _check_whole(model)
        return
    if isinstance(model.merge, CrossAttend) or hasattr(model.merge, "model_arguments"):
        raise ModelError(
            f"to generate text, the merge policy must insert items among the tokens; it is "
            f"{type(model.merge).__name__}; accepted: prepend, or token ids"
        )
    if model.packing or model.mask is not None and model.mask not in MASKS.values():
        raise ModelError(
            "to generate text, each token must attend to all tokens before it; accepted: no "
            f"packing, and no mask or one of {', '.join(MASKS)}"
        )
    if (reason := why_not_written(
        model.language_model.source(ModuleKind.LANGUAGE_MODEL)
    )) is not None:
        raise ModelError(
            f"to generate text, the language model must continue from cached keys and values: "
            f"{reason}; use another language model, or a Hugging Face VLM (model: "
            "{path: FOLDER, train: ...})"
        )


def _check_whole(model: WholeModel) -> None:
    """
    Raises:
        ModelError: the model cannot write text.
    """
    skeleton = model.source.skeleton()
    if model.packing or not getattr(skeleton, "can_generate", bool)():
        raise ModelError(
            "to generate text, a Hugging Face VLM must not pack its rows, and transformers must be "
            f"able to generate with its class; packing is {model.packing}, the class is "
            f"{type(skeleton).__name__}"
        )
    needed = [
        name for name, parameter in inspect.signature(skeleton.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if needed:
        raise ModelError(
            f"to generate text, the forward of a Hugging Face VLM must not need more than tokens; "
            f"{type(skeleton).__name__} always needs {', '.join(needed)}"
        )


def generate(
    parallel: WritingModule, prompts: Iterable[Prompt], max_tokens: int,
    ends: Collection[int] = (), under_way: int | None = None,
) -> Iterator[list[int]]:
    """The likeliest continuation of every prompt, token by token; in the order of prompts.

    Args:
        parallel: the model; no other step of it is under way.
        prompts: read as they are needed.
        max_tokens: of a text, at most.
        ends: tokens that end a text; they are not part of it.
        under_way: texts at once, shared out evenly over the steps under way, of which there are as
            many as the language model has stages, and two of one stage; by default eight for each.

    Raises:
        ModelError: the model cannot write text under its plan.
        RankFailedError: a process died or raised.
    """
    check_generates(parallel)
    writing = _Writing(parallel, prompts, under_way)
    done: dict[int, list[int]] = {}
    given_out = 0
    while (step := writing.next_step()) is not None:
        for text, token in step:
            if token not in ends:
                text.tokens.append(token)
            if token in ends or len(text.tokens) >= max_tokens:
                done[text.number] = text.tokens
                writing.end(text)
            else:
                writing.go_on(text)
        while given_out in done:
            yield done.pop(given_out)
            given_out += 1


class _Writing:
    """Steps of texts under way. Which texts a step is of follows from the texts alone: tokens do
    not depend on who was faster.

    Args:
        parallel, prompts, under_way: as of :func:`generate`.
    """

    def __init__(
        self, parallel: WritingModule, prompts: Iterable[Prompt], under_way: int | None
    ) -> None:
        self._parallel, self._source = parallel, enumerate(prompts)
        # What one stage computes while another computes, or while tokens come and go.
        self._steps = max(len(parallel.plan.replicas(LANGUAGE_MODEL)[0]), 2)
        self._most = under_way or TEXTS_PER_STEP * self._steps
        self._alive, self._exhausted = 0, False
        self._waiting: deque[_Text] = deque()
        self._pending: deque[tuple[list[_Text], PendingStep]] = deque()
        self._ended: list[int] = []

    def next_step(self) -> list[tuple[_Text, int]] | None:
        """The texts of the step that was submitted first, each with its next token; None if all
        have ended."""
        self._fill()
        if not self._pending:
            return None
        texts, pending = self._pending.popleft()
        return list(zip(texts, map(int, pending.scores()[0]), strict=True))

    def go_on(self, text: _Text) -> None:
        """It waits for a step."""
        self._waiting.append(text)

    def end(self, text: _Text) -> None:
        """Its keys and values are forgotten with the next step."""
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
        parts, meta, keep = prompt.parts, prompt.meta, prompt.keep
        if not first:
            parts = {"text": _text(torch.tensor([text.tokens[-1:] for text in texts]))}
            ids = [name for text in texts for name in text.prompt.meta.sample_ids]
            meta, keep = describe(dict(parts["text"]), ids), None
        self._pending.append((texts, self._parallel.submit(
            ([parts], [meta]), forward_only=True, keep=keep, decode=decode
        )))


def _text(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Text inputs of rows, (B, T) int64, without labels."""
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
    }
