"""Trial of the maximum row length of a language model, in this process."""

from __future__ import annotations

import math
from typing import Any

import torch

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.probe.cut import small_language_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, DataError


class LengthTrial:
    """Check of the number of positions of a language model.

    Lengths up to the ``max_position_embeddings`` of the configuration are accepted. Longer rows run
    through a shallow replica: rotary positions extend to any length, a table of positions fails.
    """

    def __init__(self, source: ModuleSource) -> None:
        self._source = source
        stated = getattr(source.config, "max_position_embeddings", None)
        self._stated = stated if isinstance(stated, int) else math.inf
        self._longest: float = self._stated  # longest length known to work

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, without weights."""
        return {**vars(self), "_source": self._source.for_names(())}

    def check(self, length: int) -> None:
        """Raise a ``DataError`` if a row of ``length`` tokens, including those of encoders, is too
        long."""
        if length <= self._longest:
            return
        try:
            model = small_language_model(self._source)
            width = input_embeddings(model).weight.shape[1]
        except USER_CODE_RAISES:  # cannot be tried here; the ranks report errors
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
