"""Training of the rows of new tokens only. An embedding and an output head are frozen, except for
the rows of a range of token ids, which are a separate parameter next to the weight.

Because the weight is frozen, no gradient, weight decay or optimizer state affects the rows of other
tokens. A head that shares its weight with the embedding also shares the new rows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from raymm.errors import ModelError

ROWS = "new_rows"
"""Name of the parameter, (new tokens, hidden)."""


class NewRows:
    """Mixin for an embedding or a linear layer whose weight is read with the rows [``first``,
    ``first`` + n) replaced by :attr:`new_rows`, (n, hidden)."""

    new_rows: nn.Parameter
    first: int

    def attach(self, first: int, rows: nn.Parameter) -> None:
        """Add the parameter to a layer that has become one of this class."""
        self.first = first
        cast(nn.Module, self).register_parameter(ROWS, rows)


class EmbeddingWithRows(NewRows, nn.Embedding):
    """Mixin for an embedding of any class whose forward looks up rows of its weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids: (...) int64 -> (..., hidden)."""
        out = super().forward(ids)
        local = ids - self.first
        is_new = (local >= 0) & (local < len(self.new_rows))
        # Call the class's own forward, because it may scale the rows.
        local = local.clamp(0, len(self.new_rows) - 1)
        shown = {"weight": self.new_rows, "padding_idx": None}
        saved = {name: vars(self)[name] for name in shown if name in vars(self)}
        vars(self).update(shown)
        try:
            rows = super().forward(local)
        finally:
            for name in shown:
                del vars(self)[name]
            vars(self).update(saved)
        return torch.where(is_new[..., None], rows.to(out.dtype), out)


class LinearWithRows(NewRows, nn.Linear):
    """``nn.Linear`` whose outputs are the logits of tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits: (..., hidden) -> (..., tokens)."""
        stop = self.first + len(self.new_rows)
        bias = None if self.bias is None else self.bias[self.first : stop]
        rows = F.linear(input, self.new_rows, bias)
        out = F.linear(input, self.weight, self.bias)
        return torch.cat((out[..., : self.first], rows, out[..., stop:]), dim=-1)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: LinearWithRows}


def _class_with_rows(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"{kind.__name__}WithRows", (EmbeddingWithRows, kind), {})
    return _CLASSES[kind]


def add_rows(module: nn.Module, rows: range) -> nn.Module:
    """Train the rows of new tokens, in place, starting from their current values. The module is
    whole, pruned to a stage, or a skeleton; layers without weights are skipped. Raise a
    ``ModelError`` if the head is not a plain linear layer."""
    model = cast(Any, module)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and type(head) is not nn.Linear:
        raise ModelError(
            f"new tokens cannot be trained next to adapters: the head of {type(module).__name__} "
            f"is of class {type(head).__name__}; accepted: nn.Linear. Train the language model in "
            "full"
        )
    parameters: dict[int, nn.Parameter] = {}
    for layer in cast(list[Any], [embedding] if head is None else [embedding, head]):
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) not in parameters:
            row_values = weight.detach()[rows.start : rows.stop].clone()
            parameters[id(weight)] = nn.Parameter(row_values)
        weight.requires_grad_(False)
        layer.__class__ = _class_with_rows(type(layer))
        layer.attach(rows.start, parameters[id(weight)])
    return module


def merge_rows(module: nn.Module) -> None:
    """Write new rows into the weights of a whole module, in place, and restore the plain layer
    classes."""
    for layer in module.modules():
        if isinstance(layer, NewRows):
            plain = cast(Any, layer)
            rows = plain._parameters.pop(ROWS)
            with torch.no_grad():
                plain.weight[plain.first : plain.first + len(rows)] = rows
            del plain.first
            plain.__class__ = type(layer).__bases__[1]


def is_new_rows(name: str) -> bool:
    return name.rpartition(".")[2] == ROWS
