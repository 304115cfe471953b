"""Check of the batches of encoders that feed a language model.

A callback, or a merge policy without ``check``, may still end the model with an error that does not
depend on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.merge import IGNORE_INDEX, MergePolicy, merge_rows, merged_layout
from raymm.actors.modules.token_layout import MaskPolicy
from raymm.actors.probe.cut import small_language_model
from raymm.actors.weights.source import ModuleSource
from raymm.data.loading.in_memory import split_batch
from raymm.errors import USER_CODE_RAISES, DataError, ModelError
from raymm.model.batch_rules import (
    LABELS,
    BatchCheck,
    Vocabulary,
    complete_microbatch,
    text_inputs,
)
from raymm.model.encoder_trial import EncoderTrial

if TYPE_CHECKING:
    from raymm.model.multimodal import MultimodalModule


class PartsCheck(BatchCheck):
    """Check of the batches of a model that runs on actors.

    Args:
        autocast: autocast dtype of the ranks; None without autocast.
    """

    def __init__(self, model: MultimodalModule, autocast: str | None = None) -> None:
        source = model.language_model.source()
        skeleton = source.skeleton()
        width = input_embeddings(skeleton).weight.shape[1]
        self._encoders = model.encoder_names
        self._merge = getattr(model.merge, "check", None) or MergeTrial(
            model.merge, width, model.encoder_names, model.mask, bool(model.mask or model.packing)
        )
        self._vocabulary = Vocabulary.of(skeleton)
        self._length = LengthTrial(source)
        self._trials = {
            name: EncoderTrial(model.encoder_spec(name), width, autocast, encoder.example_inputs)
            for name, encoder in model.encoders.items()
        }

    def of_samples(self) -> PartsCheck:
        """Return a check of single samples for other processes; it does not require labels.

        Example inputs are tried here, so that data workers need not try similar inputs again.
        """
        for trial in self._trials.values():
            trial.try_example()
        return self

    def split(self, batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        return split_batch(self.complete(batch), count)

    def complete(self, microbatch: Any) -> dict[str, Any]:
        return complete_microbatch(microbatch, self._encoders, self._vocabulary, to_send=True)

    def attempt(self, microbatch: Mapping[str, Any]) -> None:
        """Raise a ``DataError`` if encoders, the merge policy or the language model would refuse a
        microbatch."""
        tokens = {
            name: self._tokens(name, items) for name, items in microbatch.items()
            if name in self._trials
        }
        length = microbatch[LABELS].shape[1]
        counts = {name: count for name, count in tokens.items() if count is not None}
        if len(counts) == len(tokens):
            try:
                length = self._merge(text_inputs(microbatch), counts)
            except ModelError as error:
                raise DataError(str(error)) from None
            except USER_CODE_RAISES as error:  # a user's function may raise anything
                raise DataError(
                    f"the merge policy rejects the batch{because(error)}. If it accepts the batch "
                    "on a rank, give it a method check (raymm.actors.modules.merge)"
                ) from error
        self._length.check(length)

    def _tokens(self, name: str, items: Mapping[str, Any]) -> int | None:
        try:
            return self._trials[name].taken(items).tokens
        except DataError as error:
            raise error.of_items(name) from error.__cause__


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
            inputs: ``input_ids``, ``attention_mask``, ``labels`` (rows, tokens of the longest) and
                ``sample_index``.
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
