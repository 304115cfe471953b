"""Trying how long a language model's rows may be, in this process."""

from __future__ import annotations

import math
from typing import Any

import torch

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.probe.cut import small_language_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, DataError


class LengthTrial:
    """Knows how many tokens of a row a language model has positions for.

    Up to what its config states, nothing is tried. What is longer runs through a shallow copy:
    rotary positions go on, a table of positions ends.

    Args:
        source: of the language model.
    """

    def __init__(self, source: ModuleSource) -> None:
        self._source = source
        stated = getattr(source.config, "max_position_embeddings", None)
        self._stated = stated if isinstance(stated, int) else math.inf
        self._longest: float = self._stated  # that is known to work

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, without weights."""
        return {**vars(self), "_source": self._source.for_names(())}

    def check(self, length: int) -> None:
        """
        Args:
            length: tokens of the longest row, with those of encoders.

        Raises:
            DataError: it is too long.
        """
        if length <= self._longest:
            return
        try:
            model = small_language_model(self._source)
            width = input_embeddings(model).weight.shape[1]
        except USER_CODE_RAISES:  # nothing to try it on: the ranks will see
            self._longest = math.inf
            return
        try:
            with torch.no_grad():
                model(inputs_embeds=torch.zeros(1, length, width), use_cache=False)
        except (IndexError, RuntimeError, ValueError) as error:
            raise DataError(
                f"the longest row of the microbatch has {length} tokens, including those of "
                "encoders; "
                f"accepted: up to {self._stated}, the language model's max_position_embeddings "
                f"({' '.join(str(error).split())})"
            ) from error
        self._longest = length
