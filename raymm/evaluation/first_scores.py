"""What a model says of a run's pairs of answers before it is trained, which is their reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from raymm.data import StepLoader
from raymm.files.config_error import ConfigError
from raymm.files.run_files import write_whole
from raymm.runtime.pipelined import MultimodalParallelModule

REFERENCES = "references.json"
# Of a row that is in the data several times: what padding does to its log-probability, in bf16,
# too. Another row under the same id is told by it unless it happens to be as likely.
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
    for loader in loaders:
        with loader:
            for step in loader:
                scores = parallel.scores((step.microbatches, step.meta))
                for microbatch, own in zip(step.meta, scores, strict=True):
                    for row, score in zip(microbatch.sample_ids, own.tolist(), strict=True):
                        if _is_other(score, scores_of.setdefault(row, score)):
                            raise ConfigError(
                                f"two rows are named {row!r}, and model.loss.dpo.reference is "
                                f"{loss.reference!r}; accepted: rows with an id of their own"
                            )
    write_whole(file, json.dumps(scores_of) + "\n")
    say(f"references     {file}: {len(scores_of)} answers")
    parallel.references = scores_of


def _is_other(score: float, first: float) -> bool:
    return abs(score - first) > _ROUNDING * max(1.0, abs(first))
