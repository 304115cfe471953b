"""Oracle: one process, one sample at a time, without raymm.

A sample's items are encoded one by one, projected, put before its text (or at its placeholders),
and the language model runs on that one unpadded sequence. Slow, and obviously right: there is no
padding, batching or split that could be wrong.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Arguments: (kind, item) of two tokens, (0, 0) for text, and True if the second is at or before the
# first.
Visible = Callable[[tuple[int, int], tuple[int, int], bool], bool]
Row = dict[str, list[torch.Tensor]]  # modality -> features (tokens, H) of each of its items
MergeRow = Callable[[Row, torch.Tensor, torch.Tensor, torch.Tensor], tuple]

# Relative to a gradient's own norm.
GRADIENT_TOLERANCE = 1e-5
# Softmax ignores a constant added to all keys, so the gradient of a key's bias is zero up to
# rounding. Only these may differ by more, up to this share of the module's largest gradient norm.
ZERO_GRADIENT = re.compile(r"(k_proj|attention\.key)\.bias$")
ROUNDING_FLOOR = 1e-7


def prepend(features: Row, ids: torch.Tensor, embeds: torch.Tensor, labels: torch.Tensor):
    """Put all items of a sample, encoder by encoder, before its text."""
    items = [item for several in features.values() for item in several]
    extra = labels.new_full((sum(len(item) for item in items),), -100)
    return torch.cat([*items, embeds]), torch.cat([extra, labels])


def replace(tokens: Mapping[str, int]) -> MergeRow:
    """Put a sample's items at its placeholder tokens."""

    def merge(features: Row, ids: torch.Tensor, embeds: torch.Tensor, labels: torch.Tensor):
        queues = {tokens[name]: list(torch.cat(items)) for name, items in features.items() if items}
        rows = [
            queues[int(token)].pop(0) if int(token) in tokens.values() else embeds[place]
            for place, token in enumerate(ids)
        ]
        assert not any(queues.values()), "features are left over"
        return torch.stack(rows), labels

    return merge


class Oracle(nn.Module):
    """Copy of the modules of a model, with raymm's parameter names.

    Args:
        encoders: name -> (encoder, projector or None).
        language_model: causal language model.
        merge: merges one sample's features into its text.
        visible: visibility of one token of a merged sample to another; default: the language
            model's mask.
    """

    def __init__(
        self,
        encoders: Mapping[str, tuple[nn.Module, nn.Module | None]],
        language_model: nn.Module,
        merge: MergeRow = prepend,
        visible: Visible | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(encoders)
        self.merge = merge
        self.visible = visible
        for name, (module, projector) in encoders.items():
            part = nn.Module()
            part.module = copy.deepcopy(module)
            part.projector = copy.deepcopy(projector)
            self.add_module(f"{name}_encoder", part)
        self.language_model = nn.Module()
        self.language_model.module = copy.deepcopy(language_model)

    def _encode(self, name: str, one: dict[str, torch.Tensor]) -> torch.Tensor:
        part = getattr(self, f"{name}_encoder")
        output = part.module(**one)
        hidden = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        if hidden.dim() == 4:  # (1, C, h, w): one token per pixel of the feature map
            hidden = hidden.permute(0, 2, 3, 1).reshape(1, -1, hidden.shape[1])
        return hidden[0] if part.projector is None else part.projector(hidden[0])

    def _dense_mask(self, features: Row, ids: torch.Tensor, labels: torch.Tensor) -> dict:
        """Return the mask as the model takes it, pair by pair.

        The kind of a token is found by merging features that contain only their encoder's and
        item's number.
        """
        if self.visible is None:
            return {}
        marks: Row = {
            name: [torch.full((len(item), 2), float(kind)) + torch.tensor([0.0, number - kind])
                   for number, item in enumerate(features[name], 1)]
            for kind, name in enumerate(self.names, 1)
        }  # fmt: skip
        merged, _ = self.merge(marks, ids, torch.zeros(len(ids), 2), labels)
        tokens = [tuple(int(value) for value in token) for token in merged]
        dense = torch.tensor([
            [self.visible(query, key, k <= q) for k, key in enumerate(tokens)]
            for q, query in enumerate(tokens)
        ])
        return {"attention_mask": dense[None, None]}

    def loss_sum(self, microbatch: Mapping[str, Any]) -> torch.Tensor:
        """Return the sum of cross entropies over the label tokens of all samples."""
        llm = self.language_model.module
        total = torch.zeros(())
        for row in range(microbatch["input_ids"].shape[0]):
            real = microbatch["attention_mask"][row].bool()
            ids = microbatch["input_ids"][row][real]
            labels = microbatch["labels"][row][real].clone()
            labels[0] = -100
            features: Row = {}
            for name in self.names:
                part = microbatch.get(name, {"sample_index": torch.empty(0)})
                features[name] = [
                    self._encode(name, {k: v[i : i + 1] for k, v in part.items()
                                        if k != "sample_index"})
                    for i in range(len(part["sample_index"]))
                    if int(part["sample_index"][i]) == row
                ]
            embeds = llm.get_input_embeddings()(ids)
            mask = self._dense_mask(features, ids, labels)
            embeds, labels = self.merge(features, ids, embeds, labels)
            logits = llm(inputs_embeds=embeds[None], use_cache=False, **mask).logits[0]
            total = total + F.cross_entropy(
                logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
            )
        return total

    def loss(self, step: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Return the loss of a step of microbatches, per label token of the whole step."""
        return sum(self.loss_sum(one) for one in step) / label_tokens(step)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            name: None if p.grad is None else p.grad.clone()
            for name, p in self.named_parameters() if p.requires_grad
        }


def label_tokens(step: Sequence[Mapping[str, Any]]) -> int:
    """Return the label tokens of a step; a sample's first token has no label."""
    return sum(int((one["labels"][:, 1:] != -100).sum()) for one in step)


def _module_of(name: str) -> str:
    return ".".join(name.split(".")[:2])  # "vision_encoder.projector", "language_model.module"


def gradient_errors(
    actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]
) -> list[str]:
    """Return the errors of ``actual``; empty if there are none.

    The names must be equal, and None matches only None. The difference is measured against that
    gradient's own norm, so a zero gradient fails unless the expected one is zero.
    """
    problems = [f"{name}: missing" for name in expected if name not in actual]
    problems += [f"{name}: not expected" for name in actual if name not in expected]
    largest: dict[str, float] = {}
    for name, gradient in expected.items():
        if gradient is not None:
            norm = float(gradient.double().norm())
            largest[_module_of(name)] = max(largest.get(_module_of(name), 0.0), norm)
    for name in expected.keys() & actual.keys():
        mine, due = actual[name], expected[name]
        if (mine is None) != (due is None):
            problems.append(f"{name}: is {'None' if mine is None else 'there'}, should not be")
            continue
        if due is None:
            continue
        if mine.shape != due.shape:
            problems.append(f"{name}: shape {tuple(mine.shape)}, not {tuple(due.shape)}")
            continue
        error = float((mine.double() - due.double()).norm())
        allowed = GRADIENT_TOLERANCE * float(due.double().norm())
        if ZERO_GRADIENT.search(name):
            allowed = max(allowed, ROUNDING_FLOOR * largest[_module_of(name)])
        if not error <= allowed:
            problems.append(f"{name}: error {error:.3e}, allowed {allowed:.3e}")
    return sorted(problems)


# Accepted error as a share of a parameter's own change over the steps. AdamW divides each element
# by its own gradient's size, so elements with tiny gradients amplify rounding.
PARAMETER_TOLERANCE = 1e-3


def parameter_errors(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    learning_rate: float,
    tolerance: float = PARAMETER_TOLERANCE,
) -> list[str]:
    """Return the errors of parameters after some steps, relative to the change of each."""
    problems = [f"{name}: missing" for name in expected if name not in actual]
    problems += [f"{name}: not expected" for name in actual if name not in expected]
    for name in expected.keys() & actual.keys():
        moved = float((expected[name] - before[name]).double().norm())
        error = float((actual[name] - expected[name]).double().norm())
        allowed = tolerance * moved
        if ZERO_GRADIENT.search(name):
            allowed = max(allowed, 1e-2 * learning_rate * expected[name].numel() ** 0.5)
        if not error <= allowed:
            problems.append(f"{name}: error {error:.3e}, moved {moved:.3e}")
    return sorted(problems)
