"""Application of a tensor plan: a module keeps and uses only its shard of the parameters.

The model's own code runs unchanged. Inputs and outputs of sharded modules pass through the
operators of :mod:`raymm.kernels.collectives.tensor_parallel`:

| style | before | after |
| --- | --- | --- |
| column | input gradients are summed, once for all sibling columns | |
| gathered_column | as column | outputs are gathered |
| row | | outputs are summed, then the bias is added |
| split_row | the local part of the input is selected | as row |
| embedding | tokens of other processes are masked | rows are summed |
| experts | as column, for every input | as row |

Outside attention and feed-forwards, dropout draws the same numbers on all processes; inside, those
of the process's heads and features. These follow from a row's weight, because a fused column has
several blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import AdaptedConv1D, AdaptedLayer, AdaptedLinear
from raymm.actors.sharding.tensor_plan import (
    COLUMN,
    CONFIG,
    EMBEDDING,
    EXPERTS,
    GATHERED_COLUMN,
    ROW,
    SPLIT_ROW,
    ParameterShard,
    Range,
    TensorPlan,
    local_query_heads,
    tied_names,
)
from raymm.actors.sharding.tensor_rules import widths
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.collectives.tensor_parallel import (
    copy_to_shards,
    gather_from_shards,
    reduce_from_shards,
    split_to_shards,
)
from raymm.kernels.shared_draws import Cut, Features, set_features


def shard_module(module: nn.Module, plan: TensorPlan, group: TensorGroup) -> None:
    """Reduce a module, in place, to this process's shard of the parameters; full ones are freed.

    ``module`` may be pruned to a stage. Frozen parameters stay frozen, tied ones tied.

    Raises:
        ValueError: the group has another size than the plan.
    """
    if group.size != plan.tp:
        raise ValueError(f"the group has {group.size} processes, the plan {plan.tp}")
    inner = _row_widths(module, plan)
    _cut_parameters(module, plan, group.rank)
    entries: dict[str, _Entry] = {}
    for name, style in plan.styles.items():
        child = _find(module, name)
        if child is None:
            continue
        if style in (COLUMN, GATHERED_COLUMN):
            parent = _around(module, name)
            if parent not in entries:
                entries[parent] = _Entry(group)
                entries[parent].observer(module.get_submodule(parent))
            child.register_forward_pre_hook(entries[parent].take, with_kwargs=True)
        _SHARD[style](child, plan.shards.get(f"{name}.weight"), group)
    for name, length in plan.tails.items():
        child = _find(module, name)
        if child is not None:
            child.register_forward_hook(_tail_hook(length, group))
    for name, values in plan.attributes.items():
        child = _find(module, name)
        if child is not None:
            _set_attributes(child, values)
    _cut_draws(module, plan, group.rank, inner)


def _around(module: nn.Module, name: str) -> str:
    """Return the innermost enclosing module that is called, unlike lists."""
    parent = name.rpartition(".")[0]
    while isinstance(module.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    return parent


def cut_tensor(tensor: torch.Tensor, shard: ParameterShard | None) -> torch.Tensor:
    """Return a copy of the shard of a full tensor; the tensor itself without ``shard``."""
    if shard is None:
        return tensor
    slices = [tensor.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    return torch.cat(slices, shard.dim)


class _LocalConfig:
    """View of a config with the local head counts; other fields are read from the model's config.
    """

    def __init__(self, config: Any, values: dict[str, int]) -> None:
        self.__dict__.update(values, _config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _set_attributes(child: nn.Module, values: Mapping[str, int]) -> None:
    in_config = {n.removeprefix(CONFIG): v for n, v in values.items() if n.startswith(CONFIG)}
    for name, value in values.items():
        if not name.startswith(CONFIG):
            setattr(child, name, value)
    if in_config:
        child.config = cast(Any, _LocalConfig(child.config, in_config))


def _find(module: nn.Module, name: str) -> nn.Module | None:
    """Return a submodule that has parameters; None if the stage does not have it."""
    for segment in filter(None, name.split(".")):
        child = module._modules.get(segment)
        if child is None:
            return None
        module = child
    return module if any(True for _ in module.parameters()) else None


def _cut_parameters(module: nn.Module, plan: TensorPlan, rank: int) -> None:
    for tied in tied_names(module):  # frees one full parameter at a time
        if (shard := plan.shard(tied[0], rank)) is None:
            continue
        full = module.get_parameter(tied[0])
        local = nn.Parameter(cut_tensor(full.detach(), shard), requires_grad=full.requires_grad)
        del full
        for name in tied:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = local


class _Entry:
    """Entry of a replicated tensor into sibling columns, which share one operator and one gradient
    sum."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._seen: tuple[torch.Tensor, int] | None = None
        self._shared: torch.Tensor | None = None

    def observer(self, around: nn.Module) -> None:
        """Forget the tensor when the module around the columns ends."""
        around.register_forward_hook(self._forget, always_call=True)

    def _forget(self, *_: Any) -> None:
        self._seen = self._shared = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._enter(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self._enter(kwargs[name])}

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        seen, shared = self._seen, self._shared
        if shared is None or seen is None or seen[0] is not tensor or seen[1] != tensor._version:
            self._seen = (tensor, tensor._version)
            self._shared = shared = copy_to_shards(tensor, self._group)
        return shared


def _sizes(shards: tuple[ParameterShard, ...]) -> tuple[int, ...]:
    return tuple(shard.length for shard in shards)


def _shard_column(child: nn.Module, shards: tuple[ParameterShard, ...], group: TensorGroup) -> None:
    _set_widths(child)


def _shard_gathered_column(
    child: nn.Module, shards: tuple[ParameterShard, ...], group: TensorGroup
) -> None:
    _set_widths(child)
    sizes = _sizes(shards)
    child.register_forward_hook(
        lambda _, args, out: gather_from_shards(cast(torch.Tensor, out), group, sizes)
    )


class _InGroup(nn.Module):
    """Mixin of a linear module with some of the inputs.

    Attributes:
        tensor_sizes: inputs per process, if the module splits its input; None if it receives only
            its part.
    """

    tensor_group: TensorGroup
    tensor_sizes: tuple[int, ...] | None

    def join(self, group: TensorGroup, sizes: tuple[int, ...] | None) -> None:
        """Sum products over the group from now on."""
        self.tensor_group, self.tensor_sizes = group, sizes


class _Row(_InGroup):
    """Mixin of a linear module that sums products over the group before the bias is added."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.tensor_sizes is not None:
            hidden = split_to_shards(hidden, self.tensor_group, self.tensor_sizes)
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        out = reduce_from_shards(F.linear(hidden, weight), self.tensor_group)
        # As in autocast, the bias is cast to the product's dtype.
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _RowLinear(_Row, nn.Linear):
    pass


class _RowConv1D(_Row, Conv1D):
    pass


class _AdaptedRow(_InGroup, AdaptedLayer):
    """Mixin of a row with an adapter; both products are summed over the group at once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.tensor_sizes is not None:
            hidden = split_to_shards(hidden, self.tensor_group, self.tensor_sizes)
        return super().forward(hidden)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return reduce_from_shards(part, self.tensor_group)

    def summed_squares(self, part: torch.Tensor) -> torch.Tensor:
        return reduce_from_shards(part, self.tensor_group)


class _AdaptedRowLinear(_AdaptedRow, AdaptedLinear):
    pass


class _AdaptedRowConv1D(_AdaptedRow, AdaptedConv1D):
    pass


_ROWS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _RowLinear, Conv1D: _RowConv1D, AdaptedLinear: _AdaptedRowLinear,
    AdaptedConv1D: _AdaptedRowConv1D,
}


def _shard_row(
    child: nn.Module, shards: tuple[ParameterShard, ...], group: TensorGroup, split: bool = False
) -> None:
    _set_widths(child)
    row = cast(Any, child)
    row.__class__ = _ROWS[type(child)]
    row.join(group, _sizes(shards) if split else None)


def _shard_split_row(
    child: nn.Module, shards: tuple[ParameterShard, ...], group: TensorGroup
) -> None:
    _shard_row(child, shards, group, split=True)


def _set_widths(child: nn.Module) -> None:
    inner, out = widths(child)
    if isinstance(child, Conv1D):
        child.nx, child.nf = inner, out
    else:
        linear = cast(nn.Linear, child)
        linear.out_features, linear.in_features = out, inner


class _VocabularyShare(nn.Module):
    """Mixin of an (otherwise elementwise) embedding with some rows; a sum over the group adds the
    others."""

    tensor_group: TensorGroup
    tensor_range: Range
    num_embeddings: int
    padding_idx: int | None

    def join(self, group: TensorGroup, rows: Range) -> None:
        """Look up these rows only, and sum over the group from now on."""
        self.tensor_group = group
        self.tensor_range = start, stop = rows
        self.num_embeddings = stop - start
        if self.padding_idx is not None:
            inside = start <= self.padding_idx < stop
            self.padding_idx = self.padding_idx - start if inside else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        start, stop = self.tensor_range
        elsewhere = (ids < start) | (ids >= stop)
        local = super().forward((ids - start).masked_fill(elsewhere, 0))
        return reduce_from_shards(local.masked_fill(elsewhere[..., None], 0), self.tensor_group)


def _shard_embedding(
    child: nn.Module, shards: tuple[ParameterShard, ...], group: TensorGroup
) -> None:
    kind = type(child)
    child.__class__ = type(kind.__name__, (_VocabularyShare, kind), {})
    cast(_VocabularyShare, child).join(group, shards[group.rank].ranges[0])


def _shard_experts(child: nn.Module, shards: None, group: TensorGroup) -> None:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args = tuple(_copy(value, group) for value in args)
        return args, {name: _copy(value, group) for name, value in kwargs.items()}

    child.register_forward_pre_hook(enter, with_kwargs=True)
    child.register_forward_hook(
        lambda _, args, out: reduce_from_shards(cast(torch.Tensor, out), group)
    )


def _copy(value: Any, group: TensorGroup) -> Any:
    return copy_to_shards(value, group) if isinstance(value, torch.Tensor) else value


def _tail_hook(length: int, group: TensorGroup) -> Any:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        head, tail = out.split([out.shape[-1] - length, length], -1)
        return torch.cat([head, copy_to_shards(tail, group)], -1)

    return hook


_SHARD = {
    COLUMN: _shard_column,
    GATHERED_COLUMN: _shard_gathered_column,
    ROW: _shard_row,
    SPLIT_ROW: _shard_split_row,
    EMBEDDING: _shard_embedding,
    EXPERTS: _shard_experts,
}


def _cut_draws(module: nn.Module, plan: TensorPlan, rank: int, inner: Mapping[str, int]) -> None:
    """Add hooks that select features for slicing the random numbers of a sharded module.

    ``inner`` has the number of inputs of each row over all processes.
    """
    names = [name for name, _ in module.named_modules() if name in plan.styles]
    order = {name: number for number, name in enumerate(names)}
    rows = [name for name in names if name in inner]
    head = None if plan.head is None else plan.head.removesuffix(".weight")
    for name in names:
        child, style = module.get_submodule(name), plan.styles[name]
        if style == EXPERTS:
            _set_features_around(child, Features(None), None)
        elif name in inner:
            _set_features_around(child, _features(plan, name, rank, inner[name]), None)
        elif style in (COLUMN, GATHERED_COLUMN):
            keeps_all = style == GATHERED_COLUMN or name == head
            row = None if keeps_all else _row_of(name, order, rows)
            features = None if row is None else _features(plan, row, rank, inner[row])
            _set_features_around(child, None, features)


def _row_widths(module: nn.Module, plan: TensorPlan) -> dict[str, int]:
    """Return the number of inputs of each row of a plan, before the module is sharded."""
    present = dict(module.named_modules())
    return {
        name: widths(present[name])[0] for name, style in plan.styles.items()
        if style in (ROW, SPLIT_ROW) and isinstance(present.get(name), nn.Module)
        and present[name]._parameters.get("weight") is not None
    }


def _features(plan: TensorPlan, row: str, rank: int, inner: int) -> Features:
    ranges = plan.shards[f"{row}.weight"][rank].ranges
    cut = Cut(sum(stop - start for start, stop in ranges), inner, tuple(ranges))
    return Features(cut, _heads(plan, row, cut))


def _heads(plan: TensorPlan, row: str, cut: Cut) -> int | None:
    """Return the local number of heads of a row's attention; None if unknown or not an attention.
    """
    units = [where for where in plan.attributes if row.startswith(f"{where}.")]
    heads = local_query_heads(plan.attributes[max(units, key=len)]) if units else None
    return heads if heads is not None and cut.grouped(heads) is not None else None


def _row_of(column: str, order: Mapping[str, int], rows: Sequence[str]) -> str | None:
    """Return the row that takes a column's outputs: the next one with the longest common prefix."""
    def rank(row: str) -> tuple[int, bool, int]:
        shared = 0
        for a, b in zip(column.split("."), row.split("."), strict=False):
            if a != b:
                break
            shared += 1
        distance = order[row] - order[column]
        return shared, distance > 0, -abs(distance)

    return max(rows, key=rank, default=None)


def _set_features_around(child: nn.Module, inside: Features | None, after: Features | None) -> None:
    def enter(*_: Any) -> None:
        set_features(inside)

    def leave(*_: Any) -> None:
        set_features(after)

    child.register_forward_pre_hook(enter)
    child.register_forward_hook(leave)
