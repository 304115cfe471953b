"""Reference log-probabilities for DPO: those of the model with the weights that a run begins with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from raymm.data import MicrobatchMeta, StepLoader
from raymm.errors import ConfigError
from raymm.files.run_files import write_whole
from raymm.runtime.pipelined import MultimodalParallelModule

REFERENCES = "references.json"
# Of a row that is in the data several times: what padding does to its log-probability, in bf16,
# too. Where its tokens are the same, by this alone another picture is told.
_ROUNDING = 1e-2


def keep_references(
    parallel: MultimodalParallelModule, loaders: Iterable[StepLoader], folder: Path,
    run: Mapping[str, Any], same_rows: Callable[[Mapping[str, Any]], bool] | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Set :attr:`MultimodalParallelModule.references` of a model with ``reference: initial``.

    The model computes them if the run begins, or if the run resumes with data whose rows differ.
    Otherwise they are read from the run's folder.

    Args:
        parallel: the model with its initial weights: no checkpoint is loaded yet.
        loaders: of the run's data, a pass each.
        folder: of the run; gets :data:`REFERENCES`: log-probabilities by ids of rows, and the data
            that they are of.
        run: description of the run.
        same_rows: of a run that resumes: called with the description of earlier data; returns True
            if the data of the run give the same rows. None for a run that begins.
        say: prints a line.

    Raises:
        ConfigError: two different rows have one id, or the run resumes and the file is missing.
    """
    loss = parallel.model.preference
    if loss is None or not loss.asked_once:
        return
    file = folder / REFERENCES
    data = {name: value for name, value in run.items() if name.startswith("data.")}
    if same_rows is not None:
        try:
            stored = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {file}, the reference log-probabilities from the start of the run: "
                f"{error}; restore the file, or start a new run"
            ) from None
        if same_rows(stored.get("data", {})):
            parallel.references = stored["scores"]
            return
    scores_of: dict[str, float] = {}
    texts: dict[str, bytes] = {}
    for loader in loaders:
        with loader:
            for step in filter(lambda step: step.microbatches, loader):
                scores = parallel.scores((step.microbatches, step.meta))
                for parts, meta, own in zip(step.microbatches, step.meta, scores, strict=True):
                    rows = zip(meta.sample_ids, own.tolist(), _texts(parts, meta), strict=True)
                    for row, score, text in rows:
                        if texts.setdefault(row, text) != text or _is_other(
                            score, scores_of.setdefault(row, score)
                        ):
                            raise ConfigError(
                                f"two rows have the id {row!r}, and model.loss.dpo.reference is "
                                f"{loss.reference!r}; accepted: rows with different ids"
                            )
    write_whole(file, json.dumps({"data": data, "scores": scores_of}) + "\n")
    say(f"references     {file}: {len(scores_of)} answers")
    parallel.references = scores_of


def _texts(parts: Mapping[str, Any], meta: MicrobatchMeta) -> Iterator[bytes]:
    """Of every row a digest of its tokens and labels, without padding."""
    text: Any = ray.get(parts["text"])
    for row, length in enumerate(meta.lengths):
        digest = hashlib.blake2b(digest_size=16)
        for name in ("input_ids", "labels"):
            digest.update(text[name][row, :length].contiguous().numpy().tobytes())
        yield digest.digest()


def _is_other(score: float, first: float) -> bool:
    return abs(score - first) > _ROUNDING * max(1.0, abs(first))
