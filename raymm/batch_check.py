"""Batches in memory, looked at before anything of them is sent to a process: a process that
cannot use a batch ends, and all others with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymm.actors.stages.language import label_mask
from raymm.actors.stages.merge import IGNORE_INDEX
from raymm.batch_rules import LABELS, BatchError, Vocabulary, complete_microbatch, said
from raymm.microbatches import split_batch


class BatchCheck:
    """What the batches of a model that runs on actors must be.

    Args:
        encoders: the model's.
        vocabulary: of its language model.
    """

    def __init__(self, encoders: Sequence[str], vocabulary: Vocabulary) -> None:
        self._encoders, self._vocabulary = tuple(encoders), vocabulary

    def microbatches(self, batch: Any, count: int) -> list[dict[str, Any]]:
        """Complete microbatches of a step.

        Args:
            batch: one batch, which is split into ``count`` by rows, or a list of microbatches.
            count: see there.

        Raises:
            BatchError: it does not fit, or the step has no label.
        """
        if isinstance(batch, Mapping):
            found = split_batch(self._complete(batch), count)
        elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch):
            found = [self._complete(one, f"microbatch {n}: ") for n, one in enumerate(batch)]
        else:
            raise BatchError(
                f"the batch is {said(batch)}; accepted: a dict, or a list of at least one "
                "microbatch"
            )
        if not any(bool(label_mask(one[LABELS]).any()) for one in found):
            raise BatchError(
                f"{LABELS} of the step has nothing but {IGNORE_INDEX} after the first token of "
                "each row, which nothing predicts; accepted: at least one label, as the loss is a "
                "mean over labels"
            )
        return found

    def _complete(self, microbatch: Any, where: str = "") -> dict[str, Any]:
        try:
            return complete_microbatch(microbatch, self._encoders, self._vocabulary, to_send=True)
        except BatchError as error:
            raise BatchError(f"{where}{error}") from None
