"""Reference log-probabilities for DPO, computed with the initial weights of a run."""

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
from raymm.runtime.parallel_model import ParallelModel

REFERENCES = "references.json"
# Relative tolerance between the log-probabilities of a row that is in the data several times:
# padding changes them slightly, also in bf16. Rows with equal tokens but different pictures differ
# by more.
_ROUNDING = 1e-2


def keep_references(
    parallel: ParallelModel, loaders: Iterable[StepLoader], folder: Path,
    run: Mapping[str, Any], same_rows: Callable[[Mapping[str, Any]], bool] | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Set :attr:`ParallelModel.references` of a model with ``reference: initial``.

    The model computes the references for a new run, or a resumed run whose data have different
    rows. Otherwise they are read from the folder of the run.

    Args:
        parallel: model with its initial weights, before a checkpoint is loaded.
        loaders: loaders of the data of the run, for one pass each.
        folder: folder of the run, for the file :data:`REFERENCES` with the log-probabilities by row
            id and a description of the data.
        same_rows: for a resumed run, returns True if the described earlier data have the same rows
            as the data of the run. None for a new run.

    Raises:
        ConfigError: two different rows have the same id, or the run resumes and the file is
            missing.
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
            parallel.set_references(stored["scores"])
            return
    scores_of: dict[str, float] = {}
    texts: dict[str, bytes] = {}
    for loader in loaders:
        with loader:
            for step in filter(lambda step: step.microbatches, loader):
                scores = parallel.scores((step.microbatches, step.meta))
                for inputs, meta, values in zip(step.microbatches, step.meta, scores, strict=True):
                    rows = zip(meta.sample_ids, values.tolist(), _texts(inputs, meta), strict=True)
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
    parallel.set_references(scores_of)


def _texts(parts: Mapping[str, Any], meta: MicrobatchMeta) -> Iterator[bytes]:
    """Yield a digest of the tokens and labels of every row, without padding."""
    text: Any = ray.get(parts["text"])
    for row, length in enumerate(meta.lengths):
        digest = hashlib.blake2b(digest_size=16)
        for name in ("input_ids", "labels"):
            digest.update(text[name][row, :length].contiguous().numpy().tobytes())
        yield digest.digest()


def _is_other(score: float, first: float) -> bool:
    return abs(score - first) > _ROUNDING * max(1.0, abs(first))
