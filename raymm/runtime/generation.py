"""Greedy decoding on the ranks of a model that runs: nobody moves a weight.

The next token of a text is a step of one microbatch, forward only: its prompt, then the token that
came last, whose keys and values stages keep. Steps of several texts are under way at once, so that
all stages are busy while each text waits for its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from raymm.actors.modules.merge import CrossAttend
from raymm.actors.modules.message import Decode
from raymm.actors.modules.token_layout import MASKS
from raymm.data import MicrobatchMeta, describe
from raymm.data.loading.builder import SampleCheck
from raymm.errors import InputError
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.whole_model import WholeModel
from raymm.runtime.pending_step import PendingStep
from raymm.scheduler.plan.plan import Plan

# Texts under way per stage of the language model: one that it works on, and one that waits.
TEXTS_PER_STAGE = 2


class GenerationError(InputError, ValueError):
    """A model, or a plan, that cannot write text. Says what is accepted."""


class WritingModule(Protocol):
    """A model on actors that may write text."""

    model: Any
    plan: Plan

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
            decode: which text the step is of.
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
    pending: PendingStep | None = None


def check_generates(parallel: WritingModule) -> None:
    """
    Raises:
        GenerationError: the model cannot write text under its plan.
    """
    model, plan = parallel.model, parallel.plan
    stage = plan.module_stages(LANGUAGE_MODEL)[0]
    if plan.splits_samples or max(stage.cp, stage.fsdp) > 1:
        raise GenerationError(
            "to generate, the language model's processes must each have whole samples: accepted: "
            "pp, tp and dp; not cp, sharding 'fsdp' or a mapping"
        )
    if isinstance(model, WholeModel):
        _check_whole(model)
        return
    if isinstance(model.merge, CrossAttend) or hasattr(model.merge, "model_arguments"):
        raise GenerationError(
            f"to generate, the merge policy must put items among the tokens; it is "
            f"{type(model.merge).__name__}; accepted: prepend, or token ids"
        )
    if model.packing or model.mask is not None and model.mask not in MASKS.values():
        raise GenerationError(
            "to generate, what a token of text sees must be all before it: accepted: no packing, "
            f"and no mask or one of {', '.join(MASKS)}"
        )


def _check_whole(model: WholeModel) -> None:
    """
    Raises:
        GenerationError: the model cannot write text.
    """
    skeleton = model.source.skeleton()
    if model.packing or not getattr(skeleton, "can_generate", bool)():
        raise GenerationError(
            "to generate, a whole model must not pack its rows, and its class must be one that "
            f"transformers generates with; packing is {model.packing}, the class "
            f"{type(skeleton).__name__}"
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
        under_way: texts at once; by default two for each stage of the language model.

    Raises:
        GenerationError: the model cannot write text under its plan.
        RankFailedError: a process died or raised.
    """
    check_generates(parallel)
    stages = len(parallel.plan.replicas(LANGUAGE_MODEL)[0])
    most = under_way or TEXTS_PER_STAGE * stages
    source = enumerate(prompts)
    waiting: deque[_Text] = deque()
    done: dict[int, list[int]] = {}
    ended: list[int] = []
    given_out, exhausted = 0, False
    while True:
        while not exhausted and len(waiting) < most:
            following = next(source, None)
            if following is None:
                exhausted = True
                break
            waiting.append(_submitted(parallel, _Text(*following), ended))
        if not waiting:
            return
        text = waiting.popleft()
        assert text.pending is not None
        token = int(text.pending.result().loss)
        if token not in ends:
            text.tokens.append(token)
        if token in ends or len(text.tokens) >= max_tokens:
            done[text.number] = text.tokens
            ended.append(text.number)
            while given_out in done:
                yield done.pop(given_out)
                given_out += 1
        else:
            waiting.append(_submitted(parallel, text, ended))


def _submitted(parallel: WritingModule, text: _Text, ended: list[int]) -> _Text:
    """A text whose next token is on its way."""
    first = not text.tokens
    decode = Decode(text.number, first, tuple(ended))
    ended.clear()
    if first:
        parts, meta = text.prompt.parts, text.prompt.meta
    else:
        parts = {"text": _text(torch.tensor([text.tokens[-1:]]))}
        meta = describe(dict(parts["text"]), text.prompt.meta.sample_ids)
    text.pending = parallel.submit(
        ([parts], [meta]), forward_only=True, keep=text.prompt.keep, decode=decode
    )
    return text


def _text(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Text inputs of a row, (1, T) int64, without labels."""
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
    }
