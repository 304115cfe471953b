"""Trial of a merge policy without ``check`` on a batch, in this process.

Legend: ``B`` rows, ``T`` tokens of the longest row, ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX, MergePolicy, merge_rows, merged_layout
from raymm.actors.modules.token_layout import MaskPolicy
from raymm.errors import USER_CODE_RAISES

# Width of the features in the first trial. Few policies depend on the width, and a trial with the
# width of the model, which follows if the first fails, is slow.
NARROW = 2


class MergeTrial:
    """Replacement for ``policy.check``.

    Args:
        policy: called with zeros as embeddings and features.
        width: embedding width of the language model.
        wants_layout: True if the policy must return the layout of the tokens.
    """

    def __init__(
        self, policy: MergePolicy, width: int, encoders: Sequence[str],
        mask: MaskPolicy | None, wants_layout: bool,
    ) -> None:
        self._policy, self._mask, self._wants_layout = policy, mask, wants_layout
        self._kinds = {name: number for number, name in enumerate(encoders, 1)}
        self._widths = (NARROW, width)

    def __call__(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """Return the merged length. Raise any error of the policy, and a ``ModelError`` for an
        invalid result.

        Args:
            inputs: ``input_ids``, ``attention_mask``, ``labels`` (B, T) and ``sample_index``.
            tokens: tokens of an item, by encoder with items.
        """
        *narrower, _ = self._widths
        for width in narrower:
            try:
                return self._merge(inputs, tokens, width)
            except USER_CODE_RAISES:  # may be caused by the narrow width
                pass
        length = self._merge(inputs, tokens, self._widths[-1])
        self._widths = self._widths[-1:]
        return length

    def _merge(self, inputs: Mapping[str, Any], tokens: Mapping[str, int], width: int) -> int:
        index = inputs["sample_index"]
        features = {
            name: torch.zeros(len(index[name]), count, width) for name, count in tokens.items()
        }
        labels = inputs["labels"].clone()
        labels[:, 0] = IGNORE_INDEX
        merge_inputs = {
            **{key: value.clone() for key, value in inputs.items() if key != "sample_index"},
            "sample_index": {name: rows.clone() for name, rows in index.items()},
            "inputs_embeds": torch.zeros(*labels.shape, width), "labels": labels,
        }
        if self._wants_layout:
            merge_inputs["encoder_kinds"] = self._kinds
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            merged = merge_rows(self._policy, features, merge_inputs)
        if self._wants_layout:
            merged_layout(merged, self._mask)
        return merged["labels"].shape[1]
