"""Merge policies, which insert encoder outputs into the language model's sequence.

A policy is a callable ``policy(encoder_outputs, inputs) -> inputs`` (Cornstarch v1, Listing 2,
``cb_before_llm``). ``encoder_outputs[name]`` is (n_items, n_tokens, H). ``inputs`` has
``inputs_embeds`` (B, T, H), ``input_ids`` (B, T), ``attention_mask`` (B, T), ``labels`` (B, T) and
``sample_index``, a dict of (n_items,) row numbers per encoder. The result must have
``inputs_embeds`` and ``labels`` of the merged length and may have ``attention_mask`` and
``position_ids``. A policy may add positions, labelled -100, but must not add or drop label tokens.

On a GPU, integer inputs and the results of the policies below are also known on the host. A policy
that reads them with :func:`raymm.kernels.host_copies.on_host` and moves results back with
:func:`raymm.kernels.host_copies.to_device` does not wait for the device.

Optional attributes of a policy:

- ``ports``: names of returned tensors that layers read directly, with gradients (states for cross
  attention, features for some layers). A probe finds the layers that read them.
- ``model_arguments(arguments)``: called in every stage; maps the returned values to the model's
  keyword arguments.
- ``tried``: the same policy without placeholders, used to probe the model.
- ``check(inputs, tokens)``: called for every batch in memory and every sample on disk before it is
  sent to a rank, where an error would end the model. ``inputs`` has ``input_ids``,
  ``attention_mask``, ``labels`` and ``sample_index``; ``tokens[name]`` is the token count per item
  of each encoder that has items. It raises :class:`ModelError` where the policy would, and returns
  the merged length. Policies without it are tried with features of zeros
  (:mod:`raymm.batch.check`).

If the model has a mask policy, ``inputs`` also has ``encoder_kinds``, a number from 1 per encoder,
and the result must have ``token_layout`` (:mod:`raymm.actors.modules.token_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raymm.actors.modules.token_layout import MaskPolicy, checked_layout, place_items, text_layout
from raymm.errors import ModelError
from raymm.kernels.host_copies import on_host, to_device

IGNORE_INDEX = -100

MergePolicy = Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, Any]]


def merge_rows(
    policy: MergePolicy, features: dict[str, torch.Tensor], inputs: dict[str, Any]
) -> dict[str, Any]:
    """Call a merge policy and check the result. Raise a ``ModelError`` if the result lacks an entry
    or has another number of label tokens.

    Args:
        features: by encoder, (items, tokens, H) or another input of the policy.
        inputs: ``inputs_embeds`` (B, T, H), ``labels`` (B, T) int64, and other inputs of the first
            stage.
    """
    rows, width = len(inputs["labels"]), inputs["inputs_embeds"].shape[2]
    labelled = _label_count(inputs["labels"])  # counted first: the policy may change them in place
    returned = policy(features, inputs)
    if not isinstance(returned, Mapping):
        raise ModelError(f"the merge policy returned a {type(returned).__name__}; accepted: a dict")
    merged = dict(returned)
    for name, dims, form in (("inputs_embeds", 3, "(B, T, H)"), ("labels", 2, "(B, T)")):
        value = merged.get(name)
        if not isinstance(value, torch.Tensor) or value.dim() != dims:
            shape = getattr(value, "shape", None)
            description = repr(value) if shape is None else f"of shape {tuple(shape)}"
            raise ModelError(
                f"the merge policy returned {name} {description:.80}; accepted: a tensor {form}"
            )
    embeds, labels = merged["inputs_embeds"], merged["labels"]
    if tuple(embeds.shape) != (*labels.shape, width) or len(labels) != rows:
        raise ModelError(
            f"the merge policy returned inputs_embeds of shape {tuple(embeds.shape)} and labels of "
            f"shape {tuple(labels.shape)} for {rows} rows; accepted: one length for both, a row of "
            f"each per sample, embeddings {width} wide"
        )
    label_count = _label_count(labels)
    if labelled != label_count:
        raise ModelError(
            f"the merge policy turned {labelled} label tokens into {label_count}; the number must "
            "not change"
        )
    return merged


def _label_count(labels: torch.Tensor) -> int:
    return int((on_host(labels)[:, 1:] != IGNORE_INDEX).sum())


def merged_layout(merged: Mapping[str, Any], mask: MaskPolicy | None) -> torch.Tensor:
    """Return the token layout of a policy's result, on the host; without ``mask``, from padding
    alone. Raise a ``ModelError`` if the layout is missing or malformed."""
    layout, shape = merged.get("token_layout"), merged["labels"].shape
    seen = merged.get("attention_mask")
    if mask is None:
        if seen is not None and seen.shape != shape:
            raise ModelError(
                f"the merge policy returned an attention_mask of shape {tuple(seen.shape)}; "
                "accepted with context parallelism or packing: a padding mask (B, T), here "
                f"{tuple(shape)}. Use the model's mask to hide other tokens"
            )
    elif layout is None:
        raise ModelError(
            "the merge policy returned no token_layout, which the model's mask is built from; see "
            "raymm.actors.modules.token_layout"
        )
    try:
        if mask is None:
            return text_layout(torch.ones(shape, device="cpu") if seen is None else on_host(seen))
        return checked_layout(layout, shape)
    except ValueError as error:
        raise ModelError(f"the merge policy returned a {error}") from None


@dataclass(frozen=True)
class Prepend:
    """Merge policy that puts each sample's modality tokens before its text, encoder by encoder.
    Padding in the text is dropped and the merged rows are padded on the right."""

    def check(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """Return the merged length."""
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
        # Rows of all tokens: text, then every encoder, then one row of zeros.
        pool = [embeds.flatten(0, 1)]
        pool += [f.flatten(0, 1).to(embeds.dtype) for f in encoder_outputs.values()]
        first = dict(zip(encoder_outputs, np.cumsum([len(block) for block in pool]), strict=False))
        index = {name: on_host(inputs["sample_index"][name]).numpy() for name in encoder_outputs}
        mask = on_host(inputs["attention_mask"]).bool().numpy()
        row_sources, spans = [], {name: [] for name in encoder_outputs}
        for row in range(B):
            indices, start = [], 0
            for name, features in encoder_outputs.items():
                items, count = np.flatnonzero(index[name] == row), features.shape[1]
                rows = first[name] + items[:, None] * count + np.arange(count)
                indices.append(rows.reshape(-1))
                spans[name].append((start, start + rows.size))
                start += rows.size
            row_sources.append(np.concatenate([*indices, row * T + np.flatnonzero(mask[row])]))
        lengths = np.array([len(rows) for rows in row_sources])
        positions = np.arange(lengths.max(initial=0))
        seen = positions < lengths[:, None]
        sources = np.full(seen.shape, sum(map(len, pool)))
        sources[seen] = np.concatenate(row_sources)
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
                starts, stops = np.array(spans[name]).T[..., None]
                in_span = torch.from_numpy((starts <= positions) & (positions < stops))
                place_items(layout, in_span, kinds[name], features.shape[1])
        on_device = {name: to_device(value, embeds.device) for name, value in result.items()}
        merged = torch.cat(pool).index_select(0, chosen).view(*seen.shape, H)
        return {"inputs_embeds": merged, **on_device}


def _text_only(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the host layout of a microbatch without items, if the model has a mask policy."""
    if "encoder_kinds" not in inputs:
        return {}
    return {"token_layout": text_layout(on_host(inputs["attention_mask"]))}


@dataclass(frozen=True)
class ReplaceTokens:
    """Merge policy that replaces placeholder tokens in the text by modality tokens. ``token_ids``
    maps encoders to placeholder token ids. Each sample must have exactly as many placeholders as
    its items of that modality have tokens."""

    token_ids: Mapping[str, int]

    def __call__(
        self, encoder_outputs: dict[str, torch.Tensor], inputs: dict[str, Any]
    ) -> dict[str, Any]:
        embeds, labels = inputs["inputs_embeds"], on_host(inputs["labels"])
        self._check_counts(inputs, {n: f.shape[1] for n, f in encoder_outputs.items()})
        extra, ids = _text_only(inputs), on_host(inputs["input_ids"])
        rows = embeds.flatten(0, 1)
        for name, token_id in self.token_ids.items():
            placeholders = ids == token_id
            labels = labels.masked_fill(placeholders, IGNORE_INDEX)
            if name in encoder_outputs:
                features = encoder_outputs[name]
                order = torch.argsort(on_host(inputs["sample_index"][name]), stable=True)
                flat = features[to_device(order, embeds.device)].flatten(0, 1).to(embeds.dtype)
                indices = to_device(placeholders.flatten().nonzero()[:, 0], embeds.device)
                rows = rows.index_copy(0, indices, flat)
                if extra:
                    kind = inputs["encoder_kinds"][name]
                    place_items(extra["token_layout"], placeholders, kind, features.shape[1])
        on_device = {
            name: to_device(value, embeds.device)
            for name, value in {"labels": labels, **extra}.items()
        }
        return {**inputs, "inputs_embeds": rows.view_as(embeds), **on_device}

    def check(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """Return the merged length, which is that of the text. Raise a ``ModelError`` if
        placeholders do not match the items' tokens, or are labels."""
        self._check_counts(inputs, tokens)
        labels = inputs["labels"]
        for name, token_id in self.token_ids.items():
            wrong = (inputs["input_ids"] == token_id) & (labels != IGNORE_INDEX)
            wrong[:, 0] = False  # the first token is never a label
            if wrong.any():
                row, token = wrong.nonzero()[0].tolist()
                raise ModelError(
                    f"labels[{row}, {token}] is {int(labels[row, token])} at a placeholder token "
                    f"(id {token_id}) for encoder {name!r}; accepted: {IGNORE_INDEX}, because the "
                    "features of an encoder are not predicted"
                )
        return labels.shape[1]

    def _check_counts(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        if unknown := sorted(set(tokens) - set(self.token_ids)):
            raise ModelError(
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
                error = ModelError(
                    f"sample {row} of the microbatch has {int(placeholders[row])} placeholder "
                    f"tokens (id {token_id}) for encoder {name!r}, but its inputs give "
                    f"{int(counts[row])} features; the two must be equal"
                )
                error.row = row
                raise error


@dataclass(frozen=True)
class CrossAttend:
    """Merge policy that passes modality tokens to cross-attention layers, as in Mllama.

    Layers get ``cross_attention_states`` (B, V, H) with the items of each row concatenated; the
    text is unchanged. With ``token_id``, text tokens see an item from its placeholder on, else all
    items of their row. All stages get ``cross_shown``, one byte per token and item, and build the
    masks from it.
    """

    token_id: int | None = None

    ports = ("cross_attention_states",)

    @property
    def tried(self) -> CrossAttend:
        """The policy without placeholders, for probes."""
        return CrossAttend()

    def check(self, inputs: Mapping[str, Any], tokens: Mapping[str, int]) -> int:
        """Return the merged length, which is that of the text."""
        if len(tokens) > 1:
            raise ModelError(f"cross attention reads items of one encoder, not {list(tokens)}")
        for name in tokens:
            self._shown(inputs, *_slots(inputs, name)[2:])
        return inputs["labels"].shape[1]

    def __call__(
        self, encoder_outputs: dict[str, torch.Tensor], inputs: dict[str, Any]
    ) -> dict[str, Any]:
        extra = _text_only(inputs)
        if not encoder_outputs:
            return {**inputs, **extra}
        self.check(inputs, {name: f.shape[1] for name, f in encoder_outputs.items()})
        ((name, features),) = encoder_outputs.items()
        rows, slots, counts = _slots(inputs, name)
        embeds = inputs["inputs_embeds"]
        most, (_, tokens, width) = int(counts.max()), features.shape
        states = embeds.new_zeros(len(counts) * most, tokens, width)
        indices = to_device(rows * most + slots, embeds.device)
        states = states.index_copy(0, indices, features.to(embeds.dtype))
        return {
            **inputs, **extra, "cross_shown": self._shown(inputs, counts),
            "cross_attention_states": states.view(len(counts), most * tokens, width),
        }

    def _shown(self, inputs: Mapping[str, Any], counts: torch.Tensor) -> torch.Tensor:
        # (B, T, I) uint8 on the host: 1 for an item of the token's row, 2 if the token also sees it
        present = (torch.arange(int(counts.max())) < counts[:, None])[:, None].to(torch.uint8)
        ids = on_host(inputs["input_ids"])
        if self.token_id is None:
            return 2 * present.expand(-1, ids.shape[1], -1)
        placeholders = ids == self.token_id
        if not torch.equal(placeholders.sum(1), counts):
            row = int((placeholders.sum(1) != counts).nonzero()[0])
            error = ModelError(
                f"sample {row} of the microbatch has {int(placeholders[row].sum())} placeholder "
                f"tokens (id {self.token_id}) and {int(counts[row])} items; the two must be equal"
            )
            error.row = row
            raise error
        begun = placeholders.cumsum(1)[..., None] > torch.arange(int(counts.max()))
        return present * (1 + begun.to(torch.uint8))

    def model_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the model's keyword arguments, with attention masks in place of ``cross_shown``.
        With items, ``arguments`` has ``cross_shown`` (B, T, I) and ``cross_attention_states`` (B,
        V, H)."""
        arguments = dict(arguments)
        shown = arguments.pop("cross_shown", None)
        if shown is None:
            return arguments
        states = arguments["cross_attention_states"]
        dtype, tokens = states.dtype, states.shape[1] // shown.shape[2]
        sees_items = to_device(shown == 2, states.device).any(-1)[:, None, :, None]
        hidden = to_device(~seen_items(shown), states.device)[:, None]
        hidden = hidden.repeat_interleave(tokens, dim=3)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return {
            **arguments, "full_text_row_masked_out_mask": sees_items.to(dtype),
            "cross_attention_mask": mask.masked_fill_(hidden, torch.finfo(dtype).min),
        }


def seen_items(shown: torch.Tensor) -> torch.Tensor:
    """Return the items that text tokens attend to, (B, T, I) bool on the host. Tokens that see no
    item attend to all items of their row, as in Mllama, whose layers then discard the result.
    ``shown`` (B, T, I) uint8 comes from :class:`CrossAttend`."""
    shown = on_host(shown)
    return shown == shown.amax(-1, keepdim=True)


def _slots(inputs: Mapping[str, Any], name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return on the host each item's row and index within it, and the item count per row."""
    rows = on_host(inputs["sample_index"][name])
    counts = torch.bincount(rows, minlength=len(inputs["labels"]))
    order = torch.argsort(rows, stable=True)
    slots = torch.empty_like(rows)
    starts = counts.cumsum(0) - counts
    slots[order] = torch.arange(len(rows)) - starts[rows[order]]
    return rows, slots, counts
