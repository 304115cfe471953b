"""What a model says of a run's pairs of answers before it is trained, which is their reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from raymm.data import MicrobatchMeta, StepLoader
from raymm.files.config_error import ConfigError
from raymm.files.run_files import write_whole
from raymm.runtime.pipelined import MultimodalParallelModule

REFERENCES = "references.json"
# Of a row that is in the data several times: what padding does to its log-probability, in bf16,
# too. Where its tokens are the same, by this alone another picture is told.
_ROUNDING = 1e-2


def keep_references(
    parallel: MultimodalParallelModule, loaders: Iterable[StepLoader], folder: Path,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Ask the model of every row, training and held-out, if the run begins; else read what it said
    then. Of a model whose reference is another, nothing.

    Args:
        parallel: the model, as the run's next step has it.
        loaders: of the run's data, a pass each.
        folder: of the run; gets :data:`REFERENCES`, log-probabilities by ids of rows.
        say: prints a line.

    Raises:
        ConfigError: two unlike rows have one id, or the run goes on and the file is gone.
    """
    loss = parallel.model.preference
    if loss is None or not loss.asked_once:
        return
    file = folder / REFERENCES
    if parallel.steps_taken:
        try:
            parallel.references = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {file}, what the model said of its data when the run began: {error}; "
                "put it back, or begin another run"
            ) from None
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
                                f"two rows are named {row!r}, and model.loss.dpo.reference is "
                                f"{loss.reference!r}; accepted: rows with an id of their own"
                            )
    write_whole(file, json.dumps(scores_of) + "\n")
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
