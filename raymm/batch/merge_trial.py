"""Trying a merge policy on a batch in this process, where it has no ``check`` of its own.

Legend: ``B`` rows, ``T`` tokens of the longest, ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX, MergePolicy, merge_rows, merged_layout
from raymm.actors.modules.token_layout import MaskPolicy
from raymm.errors import USER_CODE_RAISES

# Width of features that a policy is tried on first. Few look at it, and those of a real model,
# which are tried next, take long.
NARROW = 2


class MergeTrial:
    """What ``policy.check`` would say.

    Args:
        policy: gets zeros for embeddings and features.
        width: of the language model's embeddings.
        encoders: the model's, in order.
        mask: of the model.
        wants_layout: whether the policy is to return where the tokens are.
    """

    def __init__(
        self, policy: MergePolicy, width: int, encoders: Sequence[str],
        mask: MaskPolicy | None, wants_layout: bool,
    ) -> None:
        self._policy, self._mask, self._wants_layout = policy, mask, wants_layout
        self._kinds = {name: number for number, name in enumerate(encoders, 1)}
        self._widths = (NARROW, width)

    def __call__(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """The merged length.

        Args:
            inputs: ``input_ids``, ``attention_mask``, ``labels`` (B, T) and ``sample_index``.
            tokens: of an item, per encoder that has items.

        Raises:
            Exception: whatever the policy raises, and a ``ModelError`` for what it must not
                return.
        """
        *narrower, _ = self._widths
        for width in narrower:
            try:
                return self._merge(inputs, tokens, width)
            except USER_CODE_RAISES:  # of the policy, or of these few columns
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
