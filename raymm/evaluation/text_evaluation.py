"""Evaluation of a running model by the texts that it generates for held-out samples."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import ray
import torch

from raymm.actors.modules.message import SOURCES
from raymm.config.sections import METRICS, OF_PAIRS, PAIR_LOSS, PERPLEXITY, EvaluateSection
from raymm.data import (
    IGNORE_INDEX,
    DataConfig,
    EpochSampler,
    MicrobatchMeta,
    Sample,
    Skipped,
    StepLoader,
    open_split,
    step_builder,
)
from raymm.data.loading.builder import none_usable
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.data.samples.media import media_name, open_media
from raymm.errors import USER_CODE_RAISES, SampleError
from raymm.evaluation.best_evaluation import PREFIX, TEXTS, BestEvaluation
from raymm.evaluation.heldout import HeldoutLoss
from raymm.files.run_files import write_whole
from raymm.packages import import_object
from raymm.runtime.generation import (
    Prompt,
    WritingModule,
    WritingRules,
    check_generates,
    generate,
)

# Threshold of ANLS: a less similar text scores 0 (Biten et al., Scene Text Visual Question
# Answering, 2019, eq. 1).
LEAST_SIMILARITY = 0.5
Metric = Callable[[str, str], float]
FOLDER = "evaluations"
THUMBNAIL = 160  # pixels of the longer side
_STYLE = (
    "body{font:14px sans-serif}table{border-collapse:collapse}td,th{border:1px solid #ccc;"
    "padding:4px 8px;text-align:left;vertical-align:top;white-space:pre-wrap}"
    "td:first-child{max-width:12em;overflow-wrap:anywhere}td:nth-child(n+3){min-width:10em}"
)


@dataclass
class _Asked:
    """Held-out sample: its prompt, and the tokens of the answer."""

    id: str
    prompt: Prompt
    ids: list[int]
    answer: list[int]
    loss: float = 0.0


class TextEvaluation:
    """Evaluation configured by ``run.evaluate``.

    Args:
        data: must have held-out samples.
        places: Ray scheduling strategies of the data workers.
        features: lookup of cached features.

    Attributes:
        best: selection of the best evaluation, and early stopping.
        rules: end conditions of generated texts.

    Raises:
        ModelError: the model cannot generate text under its plan, or a metric cannot be imported.
    """

    def __init__(
        self, asked: EvaluateSection, parallel: WritingModule, data: DataConfig,
        folder: Path, places: Sequence[Any] = (), features: FeatureLookup | None = None,
    ) -> None:
        check_generates(parallel)
        self.asked, self._parallel, self._folder = asked, parallel, folder
        self.best = BestEvaluation(asked, folder)
        self._pairs = data.model_copy(update={"batch_size": 1, "microbatches": 1})
        self._data = self._pairs
        if data.preferences is True:  # the right answer is the chosen one
            self._data = self._pairs.model_copy(update={"preferences": "chosen"})
        self._places, self._features = places, features
        self._functions = {
            name: None if name in METRICS else import_object(name) for name in asked.metrics
        }
        # No dataset is needed, because this builder reads no samples.
        builder: Any = step_builder(data, None)  # type: ignore[arg-type]
        self._tokenizer = builder.tokenizer
        self.rules = WritingRules.of(parallel.model, builder.tokenizer, builder.answer_ends)

    def is_due(self, step: int, last: int) -> bool:
        """Return True if an evaluation is due after ``step`` of ``last`` steps."""
        return step == last or step % self.asked.every == 0

    def run(self, step: int) -> dict[str, Any]:
        """Evaluate after ``step`` steps, write the table, and return the row for ``metrics.jsonl``.
        Raise a ``DataError`` if no held-out sample is usable."""
        # Pairs are compared first, because samples keep their data workers alive, which occupy the
        # places of other data workers.
        compared = self._compared() if set(OF_PAIRS) & set(self._functions) else {}
        samples: list[_Asked] = []
        skipped: list[Skipped] = []
        written = list(generate(
            self._parallel, self._prompts(samples, skipped), self.asked.generate.max_tokens,
            self.rules.ends, self.asked.generate.under_way,
        ))
        texts = [
            WrittenText(
                sample.id, self._text(sample.ids, True), self._text(tokens),
                self._text(self.rules.until_end(sample.answer)),
            )
            for sample, tokens in zip(samples, written, strict=True)
        ]
        if skipped and not texts:
            raise none_usable(skipped, "the held-out")
        pairs = [(text.text, text.answer) for text in texts]
        metrics = {
            name: self._perplexity(samples) if name == PERPLEXITY
            else compared[name] if name in OF_PAIRS
            else measured(name, function, pairs)
            for name, function in self._functions.items()
        }
        try:
            page = write_table(self._folder, step, texts, self._shown, metrics)
            table = str(page.relative_to(self._folder))
        except OSError as error:  # report the metrics even if the disk is full
            table = f"not written: {error}"
        return {
            "step": step, **{PREFIX + name: value for name, value in metrics.items()},
            TEXTS: len(texts), "table": table,
        }

    def _prompts(self, samples: list[_Asked], skipped: list[Skipped]) -> Iterator[Prompt]:
        """Yield the prompts of held-out samples; append each sample to ``samples``, or to
        ``skipped``."""
        with StepLoader(
            self._data, "heldout", steps=self.asked.samples,
            check=self._parallel.sample_check(), places=self._places, features=self._features,
            check_cluster=self._parallel.group.check_cluster,
        ) as loader:
            for step in loader:
                if not step.microbatches:
                    skipped += step.skipped
                    continue
                inputs, meta = step.microbatches[0], step.meta[0]
                text: Any = ray.get(inputs["text"])
                ids, labels = text["input_ids"][0], text["labels"][0]
                start, stop = last_answer(labels)
                question = _Asked(
                    meta.sample_ids[0], prompt_before(start, {**inputs, "text": text}, meta, step),
                    ids[:start].tolist(), ids[start:stop].tolist(),
                )
                if PERPLEXITY in self.asked.metrics:
                    question.loss = self._loss(step, text, start, stop)
                samples.append(question)
                yield question.prompt

    def _loss(self, step: Any, text: Mapping[str, torch.Tensor], start: int, stop: int) -> float:
        """Return the sum of the cross entropies of the tokens of an answer."""
        labels = torch.full_like(text["labels"], IGNORE_INDEX)
        labels[:, start:stop] = text["labels"][:, start:stop]
        inputs = {**step.microbatches[0], "text": {**text, "labels": labels}}
        meta = replace(step.meta[0], label_tokens=stop - start)
        pending = self._parallel.submit(([inputs], [meta]), forward_only=True, keep=step)
        return pending.result().loss * (stop - start)

    def _perplexity(self, samples: Sequence[_Asked]) -> float:
        tokens = sum(len(sample.answer) for sample in samples)
        return math.exp(sum(sample.loss for sample in samples) / max(tokens, 1))

    def _compared(self) -> Mapping[str, float]:
        with StepLoader(
            self._pairs, "heldout", steps=self.asked.samples,
            check=self._parallel.sample_check(), places=self._places, features=self._features,
            check_cluster=self._parallel.group.check_cluster,
        ) as loader:
            sums = HeldoutLoss.of(self._parallel.submit, loader, 2, loader.names)
        sums.check()
        return {PAIR_LOSS: sums.loss, **sums.rewards}

    @cached_property
    def _shown(self) -> dict[str, Sample]:
        dataset = open_split(self._data, "heldout")
        order = EpochSampler(len(dataset), 1, self._data.shuffle, self._data.seed).one_pass(None)
        samples: dict[str, Sample] = {}
        for (index,), _ in islice(order, self.asked.samples):
            try:
                sample = dataset[index]
            except SampleError:  # the sample was skipped
                continue
            samples[sample.id] = sample
        return samples

    def _text(self, ids: Sequence[int], skip_special_tokens: bool | None = None) -> str:
        skip = skip_special_tokens or self.asked.generate.skip_special_tokens
        return self._tokenizer.decode(ids, skip_special_tokens=skip).strip()


def last_answer(labels: torch.Tensor) -> tuple[int, int]:
    """Return the range of the last run of labels in (T,) int64. If all tokens are learned, the
    answer starts after the first token."""
    learned = (labels != IGNORE_INDEX).nonzero()[:, 0].tolist()
    start = stop = learned[-1] + 1
    while start - 1 in learned:
        start -= 1
    return max(start, 1), stop


def prompt_before(
    start: int, parts: Mapping[str, Any], meta: MicrobatchMeta, keep: Any = None
) -> Prompt:
    """Return the tokens of a microbatch of one row before ``start``, the first token of the answer,
    with all its items. ``keep`` owns the parts."""
    # Some inputs of the towers (grids, shapes) are not per token and stay complete.
    token_shape = parts["text"]["input_ids"].shape
    text = {
        name: value[:, :start] if value.shape[:2] == token_shape else value
        for name, value in parts["text"].items() if name != SOURCES  # it has no loss
    }
    text["labels"] = torch.full_like(text["labels"], IGNORE_INDEX)
    shapes = {name: tuple(value.shape) for name, value in text.items()}
    prompt_meta = replace(
        meta, seq_len=start, tokens=start, lengths=(start,), label_tokens=0,
        shapes={**meta.shapes, "text": shapes},
        places={
            name: tuple(run for run in runs if run[2] <= start)
            for name, runs in meta.places.items()
        },
    )
    return Prompt({**parts, "text": text}, prompt_meta, keep)


def exact_match(text: str, answer: str) -> float:
    """Return 1 if the texts are equal except for surrounding white space, else 0."""
    return float(text.strip() == answer.strip())


def anls(text: str, answer: str) -> float:
    """Return the normalised Levenshtein similarity of characters, ignoring case and surrounding
    white space; 0 below :data:`LEAST_SIMILARITY`."""
    text, answer = text.strip().lower(), answer.strip().lower()
    longest = max(len(text), len(answer))
    similarity = 1.0 if not longest else 1 - edits(text, answer) / longest
    return similarity if similarity >= LEAST_SIMILARITY else 0.0


def word_errors(text: str, answer: str) -> tuple[int, int]:
    """Return the number of word insertions, deletions and substitutions, and the number of words in
    the answer."""
    words = answer.split()
    return edits(text.split(), words), len(words)


def edits(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the Levenshtein distance: the number of insertions, deletions and substitutions of
    elements."""
    row = list(range(len(second) + 1))
    for number, element in enumerate(first, 1):
        diagonal, row[0] = row[0], number
        for column, second_element in enumerate(second, 1):
            diagonal, row[column] = row[column], min(
                row[column] + 1, row[column - 1] + 1, diagonal + (element != second_element)
            )
    return row[-1]


def measured(name: str, function: Metric | None, pairs: Sequence[tuple[str, str]]) -> float:
    """Return a metric over (text, answer) pairs; 0 for no pairs. ``name`` is ``"exact_match"``,
    ``"anls"``, ``"wer"``, or that of a custom metric, which is ``function``."""
    if name == "wer":
        counts = [word_errors(*pair) for pair in pairs]
        return sum(errors for errors, _ in counts) / max(sum(words for _, words in counts), 1)
    function = function or {"exact_match": exact_match, "anls": anls}[name]
    return sum(float(function(*pair)) for pair in pairs) / max(len(pairs), 1)


@dataclass(frozen=True)
class WrittenText:
    """Generated text of a sample, with its prompt and reference answer."""

    id: str
    prompt: str
    text: str
    answer: str


def write_table(
    folder: Path, step: int, texts: Sequence[WrittenText], samples: Mapping[str, Sample],
    metrics: Mapping[str, float],
) -> Path:
    """Write the texts after ``step`` steps to ``evaluations/step-N.html`` and ``.jsonl`` in
    ``folder``, the folder of the run; return the path of the page. Pictures come from ``samples``,
    by id."""
    out = folder / FOLDER
    out.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}"
    write_whole(out / f"{name}.jsonl", "".join(json.dumps(vars(t)) + "\n" for t in texts))
    rows = [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in (
            html.escape(text.id), _pictures(samples.get(text.id)),
            *map(html.escape, (text.prompt, text.text, text.answer)),
        )) + "</tr>"
        for text in texts
    ]
    facts = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
    heads = "".join(f"<th>{h}</th>" for h in ("sample", "media", "prompt", "written", "answer"))
    page = out / f"{name}.html"
    write_whole(page, (
        f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style>"
        f"<h1>after step {step}: {html.escape(facts)}</h1><table><tr>{heads}</tr>"
        + "\n".join(rows) + "</table>\n"
    ))
    return page


def _pictures(sample: Sample | None) -> str:
    cells = []
    for item in (item for items in (sample.media if sample else {}).values() for item in items):
        frame = item[0] if isinstance(item, tuple) else item
        try:
            with open_media(frame) as file:
                cells.append(_thumbnail(file.read()))
        except USER_CODE_RAISES:  # a sound, or a file that is not a readable picture
            cells.append(html.escape(Path(media_name(item)).name))
    return "<br>".join(cells)


def _thumbnail(data: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        out = io.BytesIO()
        image.convert("RGBA").save(out, "PNG")
    return f'<img src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'
