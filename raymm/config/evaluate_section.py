"""The ``run.evaluate:`` section: what a model writes of held-out samples, and how good that is."""

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
    """How texts are written: greedily.

    Attributes:
        max_tokens: of a text, at most.
        under_way: texts at once, by default eight for each stage of the language model (sixteen if
            it has one).
        skip_special_tokens: leave the tokenizer's special tokens out of texts and answers, as
            ``decode`` of transformers does; set it to false where they are part of an answer, as
            those around boxes are.
    """

    max_tokens: Count = 64
    under_way: Count | None = None
    skip_special_tokens: bool = True


class EvaluateSection(Section):
    """What is asked of a model while it trains, on the same ranks.

    Attributes:
        every: steps from one evaluation to the next; the first is before all steps, the last after
            all.
        generate: how texts are written.
        metrics: of what the model writes against the last answer of every sample:
            ``"exact_match"``, ``"anls"`` (average normalised Levenshtein similarity, 0 below 0.5),
            ``"wer"`` (word errors over words), of which all but the last are better the higher
            they are; ``"perplexity"`` of the right answers; or ``"pkg.mod:fn"``, a function of
            text and answer to a number, which are averaged. Of pairs of answers, the chosen one is
            the right one, and instead of perplexity there is the mean over pairs of the
            ``"preference_loss"``, ``"rewards/accuracies"``, ``"rewards/margins"``,
            ``"rewards/chosen"`` or ``"rewards/rejected"``.
        samples: held-out samples, the first ones; None for all.
        best: the metric by which the best checkpoint is kept, too, and named in ``best.json``.
        lower_is_better: whether the best has the smallest; None: as of raymm's own metrics.
        patience: evaluations without a better one after which the run ends; None: it does not.
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
        """Whether the best has the smallest number."""
        if self.lower_is_better is not None:
            return self.lower_is_better
        return self.best in LOWER_IS_BETTER
