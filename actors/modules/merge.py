"""Merge policies: how encoder outputs enter the language model's sequence.

A policy is a callable ``policy(encoder_outputs, inputs) -> inputs`` (Cornstarch v1,
Listing 2, ``cb_before_llm``). ``encoder_outputs[name]`` is (n_items, n_tokens, H);
``inputs`` holds ``inputs_embeds`` (B, T, H), ``input_ids`` (B, T), ``attention_mask``
(B, T), ``labels`` (B, T) and ``sample_index``, a dict of (n_items,) row numbers per
encoder. What is returned must hold ``inputs_embeds`` and ``labels`` of the merged length
and may hold ``attention_mask`` and ``position_ids``. It may add positions, labelled -100,
but never add or drop label tokens.

On a GPU the host knows the integers among the inputs, and what policies here return: a policy that
reads them with :func:`raymm.kernels.host_copies.on_host`, and moves what it makes of them there
with :func:`raymm.kernels.host_copies.to_device`, does not wait for the device.

A policy may hand the language model's layers tensors beside its sequence, whose gradients go back
(states for cross attention, features for some layers): ``ports`` names those that it may return.
Which layers read them is found by trying. Its ``model_arguments(side, ports)``, if it has one, is
asked in every stage for more keyword arguments of the model, given what it has returned besides.

If the model has a mask policy, ``inputs`` also holds ``encoder_kinds``, a number from 1 per
encoder, and what is returned must hold ``token_layout``
(:mod:`raymm.actors.modules.token_layout`).

A policy may have a method ``check(inputs, tokens)``, which is asked about every batch in memory,
and every sample of data on disk, before it is sent to a rank, where an error would end the model:
``inputs`` holds ``input_ids``, ``attention_mask``, ``labels`` and ``sample_index``,
``tokens[name]`` is how many an item of each encoder that has items becomes. It raises
:class:`MergeError` where the policy would, and returns the merged length. Policies without one are
tried on features of zeros (:mod:`raymm.batch.merge_trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raymm.actors.modules.token_layout import (
    MaskPolicy,
    checked_layout,
    place_items,
    text_layout,
)
from raymm.errors import InputError
from raymm.kernels.host_copies import on_host, to_device

IGNORE_INDEX = -100

MergePolicy = Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, Any]]


class MergeError(InputError, ValueError):
    """Encoder outputs that do not fit the text they are merged into. ``row`` is the sample's
    number in the microbatch, if it is one sample's fault."""

    row: int | None = None


def merge_rows(
    policy: MergePolicy, features: dict[str, torch.Tensor], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Call a merge policy and check what it returns.

    Args:
        policy: the merge policy.
        features: by encoder, the received features (items, tokens, H) or what the policy takes.
        inputs: ``inputs_embeds`` (B, T, H), ``labels`` (B, T) int64, and what else the first stage
            has.

    Raises:
        MergeError: it lacks something, or other tokens are labels. Else what the policy raises.
    """
    rows, width = len(inputs["labels"]), inputs["inputs_embeds"].shape[2]
    labelled = _label_count(inputs["labels"])  # before the policy, which may write into them
    returned = policy(features, inputs)
    if not isinstance(returned, Mapping):
        raise MergeError(f"the merge policy returned a {type(returned).__name__}; accepted: a dict")
    merged = dict(returned)
    for name, dims, form in (("inputs_embeds", 3, "(B, T, H)"), ("labels", 2, "(B, T)")):
        value = merged.get(name)
        if not isinstance(value, torch.Tensor) or value.dim() != dims:
            shape = getattr(value, "shape", None)
            what = repr(value) if shape is None else f"of shape {tuple(shape)}"
            raise MergeError(
                f"the merge policy returned {name} {what:.80}; accepted: a tensor {form}"
            )
    embeds, labels = merged["inputs_embeds"], merged["labels"]
    if tuple(embeds.shape) != (*labels.shape, width) or len(labels) != rows:
        raise MergeError(
            f"the merge policy returned inputs_embeds of shape {tuple(embeds.shape)} and labels of "
            f"shape {tuple(labels.shape)} for {rows} rows; accepted: one length for both, a row of "
            f"each per sample, embeddings {width} wide"
        )
    kept = _label_count(labels)
    if labelled != kept:
        raise MergeError(f"the merge policy turned {labelled} label tokens into {kept}")
    return merged


def _label_count(labels: torch.Tensor) -> int:
    return int((on_host(labels)[:, 1:] != IGNORE_INDEX).sum())


def merged_layout(merged: Mapping[str, Any], mask: MaskPolicy | None) -> torch.Tensor:
    """Where the tokens are that a policy returns, for a model's mask (None: causal, for which only
    padding matters); on the host.

    Raises:
        MergeError: it says no such thing.
    """
    layout, shape = merged.get("token_layout"), merged["labels"].shape
    seen = merged.get("attention_mask")
    if mask is None:
        if seen is not None and seen.shape != shape:
            raise MergeError(
                f"the merge policy returned an attention_mask of shape {tuple(seen.shape)}; "
                f"with context parallelism or packing it is (B, T), here {tuple(shape)}: what "
                "else hides tokens is the model's mask"
            )
    elif layout is None:
        raise MergeError(
            "the merge policy returned no token_layout, which the model's mask is made "
            "from; see raymm.actors.modules.token_layout"
        )
    try:
        if mask is None:
            return text_layout(torch.ones(shape, device="cpu") if seen is None else on_host(seen))
        return checked_layout(layout, shape)
    except ValueError as error:
        raise MergeError(f"the merge policy returned a {error}") from None


@dataclass(frozen=True)
class Prepend:
    """Put each sample's modality tokens before its text, encoder by encoder.

    Padding in the text is dropped and the merged rows are padded on the right.
    """

    def check(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """The merged length."""
        if not tokens:
            return inputs["labels"].shape[1]
        lengths = inputs["attention_mask"].sum(dim=1)
        for name, count in tokens.items():
            items = torch.bincount(inputs["sample_index"][name], minlength=len(lengths))
            lengths = lengths + items * count
        return int(lengths.max())

    def __call__(
        self, encoder_outputs: dict[str, torch.Tensor], inputs: dict[str, Any]
    ) -> dict[str, Any]:
        kinds = inputs.get("encoder_kinds")
        if not encoder_outputs:
            return {**inputs, **_text_only(inputs)}
        embeds, labels = inputs["inputs_embeds"], on_host(inputs["labels"])
        B, T, H = embeds.shape
        # Of rows of tokens, one after another: the text's, every encoder's, and one of zeros.
        pool = [embeds.flatten(0, 1)]
        pool += [f.flatten(0, 1).to(embeds.dtype) for f in encoder_outputs.values()]
        first = dict(zip(encoder_outputs, np.cumsum([len(part) for part in pool]), strict=False))
        index = {name: on_host(inputs["sample_index"][name]).numpy() for name in encoder_outputs}
        mask = on_host(inputs["attention_mask"]).bool().numpy()
        taken, places = [], {name: [] for name in encoder_outputs}
        for row in range(B):
            parts, start = [], 0
            for name, features in encoder_outputs.items():
                items, count = np.flatnonzero(index[name] == row), features.shape[1]
                rows = first[name] + items[:, None] * count + np.arange(count)
                parts.append(rows.reshape(-1))
                places[name].append((start, start + rows.size))
                start += rows.size
            taken.append(np.concatenate([*parts, row * T + np.flatnonzero(mask[row])]))
        lengths = np.array([len(rows) for rows in taken])
        positions = np.arange(lengths.max(initial=0))
        seen = positions < lengths[:, None]
        sources = np.full(seen.shape, sum(map(len, pool)))
        sources[seen] = np.concatenate(taken)
        pool.append(embeds.new_zeros(1, H))
        chosen = to_device(torch.from_numpy(sources.reshape(-1)), embeds.device)
        is_text = sources < B * T
        merged_labels = np.full(seen.shape, IGNORE_INDEX)
        merged_labels[is_text] = labels.reshape(-1).numpy()[sources[is_text]]
        result = {
            "labels": torch.from_numpy(merged_labels),
            "attention_mask": torch.from_numpy(seen.astype(np.int64)),
        }
        if kinds is not None:
            result["token_layout"] = layout = text_layout(result["attention_mask"])
            for name, features in encoder_outputs.items():
                starts, stops = np.array(places[name]).T[..., None]
                own = torch.from_numpy((starts <= positions) & (positions < stops))
                place_items(layout, own, kinds[name], features.shape[1])
        on_device = {name: to_device(value, embeds.device) for name, value in result.items()}
        merged = torch.cat(pool).index_select(0, chosen).view(*seen.shape, H)
        return {"inputs_embeds": merged, **on_device}


def _text_only(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The layout of a microbatch without items, if it is wanted; on the host."""
    if "encoder_kinds" not in inputs:
        return {}
    return {"token_layout": text_layout(on_host(inputs["attention_mask"]))}


@dataclass(frozen=True)
class ReplaceTokens:
    """Put modality tokens where the text has placeholder tokens.

    Attributes:
        token_ids: the placeholder's token id per encoder. Each sample must have exactly
            as many of them as its items of that modality have tokens.
    """

    token_ids: Mapping[str, int]

    def __call__(
        self, encoder_outputs: dict[str, torch.Tensor], inputs: dict[str, Any]
    ) -> dict[str, Any]:
        embeds, labels = inputs["inputs_embeds"], on_host(inputs["labels"])
        self._check_counts(inputs, {n: f.shape[1] for n, f in encoder_outputs.items()})
        extra, ids = _text_only(inputs), on_host(inputs["input_ids"])
        rows = embeds.flatten(0, 1)
        for name, token_id in self.token_ids.items():
            places = ids == token_id
            labels = labels.masked_fill(places, IGNORE_INDEX)
            if name in encoder_outputs:
                features = encoder_outputs[name]
                order = torch.argsort(on_host(inputs["sample_index"][name]), stable=True)
                flat = features[to_device(order, embeds.device)].flatten(0, 1).to(embeds.dtype)
                at = to_device(places.flatten().nonzero()[:, 0], embeds.device)
                rows = rows.index_copy(0, at, flat)
                if extra:
                    kind = inputs["encoder_kinds"][name]
                    place_items(extra["token_layout"], places, kind, features.shape[1])
        on_device = {
            name: to_device(value, embeds.device)
            for name, value in {"labels": labels, **extra}.items()
        }
        return {**inputs, "inputs_embeds": rows.view_as(embeds), **on_device}

    def check(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """The merged length: that of the text.

        Raises:
            MergeError: placeholders that are not as many as the items' tokens, or are labels.
        """
        self._check_counts(inputs, tokens)
        labels = inputs["labels"]
        for name, token_id in self.token_ids.items():
            wrong = (inputs["input_ids"] == token_id) & (labels != IGNORE_INDEX)
            wrong[:, 0] = False  # never a label
            if wrong.any():
                row, place = wrong.nonzero()[0].tolist()
                raise MergeError(
                    f"labels[{row}, {place}] is {int(labels[row, place])} at a placeholder token "
                    f"(id {token_id}) for encoder {name!r}; accepted: {IGNORE_INDEX}, as nothing "
                    "is to predict what an encoder says"
                )
        return labels.shape[1]

    def _check_counts(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        if unknown := sorted(set(tokens) - set(self.token_ids)):
            raise MergeError(
                f"there are items for encoder {unknown[0]!r}, which has no placeholder token; "
                f"token_ids has {', '.join(self.token_ids)}"
            )
        for name, token_id in self.token_ids.items():
            placeholders = (on_host(inputs["input_ids"]) == token_id).sum(dim=1)
            counts = torch.zeros_like(placeholders)
            if name in tokens:
                index = on_host(inputs["sample_index"][name])
                counts.index_add_(0, index, torch.full_like(index, tokens[name]))
            if not torch.equal(placeholders, counts):
                row = int((placeholders != counts).nonzero()[0])
                error = MergeError(
                    f"sample {row} of the microbatch has {int(placeholders[row])} placeholder "
                    f"tokens (id {token_id}) for encoder {name!r}, but its inputs give "
                    f"{int(counts[row])} features; the two must be equal"
                )
                error.row = row
                raise error
