"""The ``run.evaluate:`` section: generation for held-out samples, and metrics of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from raymm.files.section import Count, Section, Text

PERPLEXITY = "perplexity"
PAIR_LOSS = "preference_loss"
OF_PAIRS = (
    PAIR_LOSS, "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected",
)  # fmt: skip
METRICS = ("exact_match", "anls", "wer", PERPLEXITY, *OF_PAIRS)
LOWER_IS_BETTER = ("wer", PERPLEXITY, PAIR_LOSS)


def _metric(name: str) -> str:
    if name not in METRICS and ":" not in name:
        raise ValueError(f"accepted: {', '.join(METRICS)}, or 'package.module:function'")
    return name


class GenerateSection(Section):
    """Greedy generation of texts.

    Attributes:
        max_tokens: maximum number of tokens per text.
        under_way: number of texts that are generated at once; by default eight for each stage of
            the language model (sixteen if it has one).
        skip_special_tokens: omit the tokenizer's special tokens from texts and answers, as
            ``decode`` of transformers does. Set it to false if they are part of an answer, such as
            those around boxes.
    """

    max_tokens: Count = 64
    under_way: Count | None = None
    skip_special_tokens: bool = True


class EvaluateSection(Section):
    """Evaluation of a model during training, on the same ranks.

    Attributes:
        every: steps between evaluations; the first is before all steps, the last after all.
        generate: how texts are generated.
        metrics: metrics of the generated text against the last answer of every sample:
            ``"exact_match"``, ``"anls"`` (average normalised Levenshtein similarity, 0 below 0.5)
            and ``"wer"`` (word errors over words, lower is better); ``"perplexity"`` of the right
            answers; or ``"pkg.mod:fn"``, a function of text and answer to a number, which is
            averaged. For pairs of answers, the chosen one is the right one, and instead of
            perplexity there is the mean over pairs of the ``"preference_loss"``,
            ``"rewards/accuracies"``, ``"rewards/margins"``, ``"rewards/chosen"`` or
            ``"rewards/rejected"``.
        samples: number of held-out samples, from the first; None for all.
        best: metric of the best checkpoint, which is kept in addition and named in ``best.json``.
        lower_is_better: True if a lower value is better; by default known for raymm's own metrics.
        patience: evaluations without improvement after which the run ends; None for no limit.
    """

    every: Count
    generate: GenerateSection = Field(default_factory=GenerateSection)
    metrics: list[Annotated[Text, AfterValidator(_metric)]] = Field(
        default_factory=lambda: ["exact_match"], min_length=1
    )
    samples: Count | None = 32
    best: Text | None = None
    lower_is_better: bool | None = None
    patience: Count | None = None

    @model_validator(mode="after")
    def _best_is_measured(self) -> EvaluateSection:
        if self.best is not None and self.best not in self.metrics:
            raise ValueError(f"best is {self.best!r}; accepted: one of metrics, {self.metrics}")
        if self.best is None and (self.patience or self.lower_is_better is not None):
            raise ValueError(
                "patience and lower_is_better need best, the metric that they apply to"
            )
        return self

    @property
    def smallest(self) -> bool:
        if self.lower_is_better is not None:
            return self.lower_is_better
        return self.best in LOWER_IS_BETTER
