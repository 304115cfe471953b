"""Random numbers for a shard of a tensor, equal to those that a single process would draw.

A process that holds some rows, tokens, heads or features of a tensor draws random numbers in the
shape of the full tensor and keeps those of its shard. Dropout masks and router noise then do not
depend on the number of processes, and every generator ends in the state that a single process would
leave it in.

Legend: ``b`` local rows, ``t`` local tokens of a row, ``f`` local features, ``h`` local heads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raymm.errors import PlanError

_aten = torch.ops.aten
_DRAWS = torch.Tag.nondeterministic_seeded
_local = threading.local()


@dataclass(frozen=True)
class Cut:
    """The part of a dimension that this process holds.

    Attributes:
        size: local length. Entries beyond the ``ranges`` are padding.
        whole: length of the full dimension.
        ranges: [start, stop) of each stretch of local entries in the full dimension, in order.
    """

    size: int
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def from_range(cls, start: int, stop: int, whole: int) -> Cut:
        """Return the cut of a single stretch [start, stop) of a dimension of length ``whole``."""
        return cls(stop - start, whole, ((start, stop),))

    @classmethod
    def uncut(cls, size: int) -> Cut:
        """Return the cut of a dimension that is not split."""
        return cls(size, size, ((0, size),))

    @property
    def is_uncut(self) -> bool:
        """True if this process holds the full dimension."""
        return self.size == self.whole and self.ranges == ((0, self.whole),)

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the local entries of a full tensor along ``dim``, with zeros for padding."""
        if self.is_uncut:
            return whole
        shards = [
            whole.narrow(dim, start, min(stop, self.whole) - start)
            for start, stop in self.ranges if start < self.whole
        ]
        local = torch.cat(shards, dim) if shards else whole.narrow(dim, 0, 0)
        missing = self.size - local.shape[dim]
        return F.pad(local, (0, 0) * (local.dim() - dim - 1) + (0, missing)) if missing else local

    def grouped(self, count: int) -> Cut | None:
        """Return the cut of a dimension with ``count`` local entries that each stand for a group of
        these. Return None if a group would be split."""
        width, remainder = divmod(self.size, max(count, 1))
        if remainder or not width or self.whole % width:
            return None
        if any(start % width or stop % width for start, stop in self.ranges):
            return None
        ranges = tuple((start // width, stop // width) for start, stop in self.ranges)
        return Cut(count, self.whole // width, ranges)


@dataclass(frozen=True)
class Grid:
    """Rows and tokens of a microbatch that this process holds.

    Attributes:
        rows: cut of the first dimension.
        tokens: cut of the second dimension; None if its length is unknown and it is not split.
    """

    rows: Cut
    tokens: Cut | None = None


@dataclass(frozen=True)
class Features:
    """Features that this process holds between the columns and the rows of a sharded module.

    Attributes:
        cut: cut of the last dimension; None if the shapes do not show which features these are.
        heads: local number of attention heads, None if unknown.
    """

    cut: Cut | None
    heads: int | None = None


class SharedDraws(TorchDispatchMode):
    """Context in which random numbers equal those of a single process.

    Args:
        grid: rows and tokens of this process; None if it holds all of them.
        features: features of this process; None if it holds all of them.
    """

    def __init__(self, grid: Grid | None = None, features: Features | None = None) -> None:
        super().__init__()
        self.grid, self.features = grid, features

    def set_grid(self, grid: Grid | None) -> None:
        self.grid = grid

    def set_features(self, features: Features | None) -> None:
        self.features = features

    def __enter__(self) -> SharedDraws:
        self._before = current_draws()
        _local.draws = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _local.draws = self._before
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        uncut = self.grid is None and self.features is None
        if uncut or _DRAWS not in func.tags:
            return func(*args, **kwargs)
        schema = func._schema.arguments
        named = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        # Arguments with default values are not passed to this function.
        defaults = {argument.name: argument.default_value for argument in schema}
        if named.get("dropout_p", defaults.get("dropout_p")) == 0 or named.get("train") is False:
            return func(*args, **kwargs)
        with _disable_current_modes():  # selective checkpointing must see model operators only
            drawn = self._draw(func, args, kwargs, named)
        return func(*args, **kwargs) if drawn is None else drawn

    def _draw(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], named: dict[str, Any]
    ) -> Any:
        """Return the local part of an operator's random numbers, or None if the operator draws
        exactly those when it runs on the local tensor."""
        if "dropout_p" in named:  # a fused kernel, which draws its own mask
            return self._fused(func, args, kwargs)
        like = named.get("self", named.get("input"))
        if "size" in named:
            shape = tuple(named["size"])
        elif "n" in named:  # randperm
            shape = (named["n"],)
        else:  # normal: either the mean or the deviation is a tensor
            tensors = (value for value in (like, *args) if isinstance(value, torch.Tensor))
            shape = tuple(getattr(next(tensors, None), "shape", ()))
        axes = self._axes(shape, func)
        if all(axis.is_uncut for dimension in axes for axis in dimension):
            return None
        full_size = [prod(axis.whole for axis in dimension) for dimension in axes]
        take = _taker(axes, shape)
        if "size" in named:
            return take(func(**named | {"size": full_size}))
        if not isinstance(like, torch.Tensor) or isinstance(named.get("p"), torch.Tensor):
            raise self._refusal(func, shape)
        empty = _empty(like, full_size)
        if func is _aten.native_dropout.default:
            mask = take(func(empty, named["p"], True)[1])
            scale = 0.0 if named["p"] == 1 else 1 / (1 - named["p"])
            return like * mask * scale, mask
        if func._schema.name.endswith("_"):
            return like.copy_(take(func(empty, *args[1:], **kwargs)))
        if func._schema.name.endswith("_like"):
            return take(func(empty, *args[1:], **kwargs))
        raise self._refusal(func, shape)

    def _fused(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a fused attention kernel, whose dropout mask cannot be split. Processes with
        different rows draw different masks, and all generators end in the same state."""
        device, rows = args[0].device, None if self.grid is None else self.grid.rows
        if rows is None or rows.is_uncut or device.type != "cuda":
            return None
        state = torch.cuda.get_rng_state(device)
        seed = int(state.view(torch.int64).sum()) + 1 + rows.ranges[0][0]
        torch.cuda.manual_seed(seed % 2**63)
        try:
            return func(*args, **kwargs)
        finally:
            torch.cuda.set_rng_state(state, device)
            torch.empty((), device=device).uniform_()

    def _axes(self, shape: tuple[int, ...], func: Any) -> list[list[Cut]]:
        """Return, for each dimension of a local shape, the cuts that it consists of."""
        axes = [[Cut.uncut(size)] for size in shape]
        if prod(shape) == 1 and len(shape) < 2:
            return axes
        heads = None
        if self.features is not None:
            heads = self._place_features(axes, shape, func)
        if self.grid is not None:
            self._place_tokens(axes, shape, func, heads)
        return axes

    def _place_features(
        self, axes: list[list[Cut]], shape: tuple[int, ...], func: Any
    ) -> Cut | None:
        """Cut the dimension of features or heads. Return the cut of the heads if they share the
        first dimension with the rows."""
        assert self.features is not None
        cut, count = self.features.cut, self.features.heads
        if cut is None:
            raise self._refusal(func, shape)
        if len(shape) == 4 and (heads := cut.grouped(shape[1])) is not None:
            axes[1] = [heads]
            return None
        if shape[-1] == cut.size and (len(shape) != 3 or not self._has_heads_in_front(shape)):
            axes[-1] = [cut]
            return None
        heads = None if count is None or shape[0] % count else cut.grouped(count)
        if len(shape) != 3 or heads is None:
            raise self._refusal(func, shape)
        axes[0] = [Cut.uncut(shape[0] // heads.size), heads]
        return heads

    def _has_heads_in_front(self, shape: tuple[int, ...]) -> bool:
        """Return True if the shape is (b * h, t, s) rather than (b, t, f)."""
        assert self.features is not None
        if self.features.heads is None or self.grid is None:
            return False
        return shape[0] == self.grid.rows.size * self.features.heads != self.grid.rows.size

    def _place_tokens(
        self, axes: list[list[Cut]], shape: tuple[int, ...], func: Any, heads: Cut | None
    ) -> None:
        assert self.grid is not None
        rows, tokens = self.grid.rows, self.grid.tokens
        cut_tokens = tokens is not None and not tokens.is_uncut
        if rows.is_uncut and not cut_tokens:
            return
        if not rows.whole or tokens is not None and not tokens.whole:  # unknown
            raise self._refusal(func, shape)
        b, t = rows.size, None if tokens is None else tokens.size
        first, ends = shape[0], shape[:2]
        if heads is not None:
            if cut_tokens or first != b * heads.size:
                raise self._refusal(func, shape)
            axes[0] = [rows, heads]
        elif tokens is not None and len(shape) > 1 and ends == (b, t):
            axes[0], axes[1] = [rows], [tokens]
        elif tokens is not None and len(shape) > 2 and ends == (t, b):
            axes[0], axes[1] = [tokens], [rows]
        elif tokens is not None and first == b * tokens.size and len(shape) < 3:
            axes[0] = [rows, tokens]
        elif first == b and not (cut_tokens and t in shape[1:]):
            axes[0] = [rows]
        elif not cut_tokens and len(shape) > 2 and first % b == 0:
            axes[0] = [rows, Cut.uncut(first // b)]
        else:
            raise self._refusal(func, shape)

    def _refusal(self, func: Any, shape: tuple[int, ...]) -> PlanError:
        grid = self.grid
        have = "" if grid is None else (
            f"{grid.rows.size} of {grid.rows.whole} rows"
            + ("" if grid.tokens is None else f", {grid.tokens.size} of {grid.tokens.whole} tokens")
        )
        cut = None if self.features is None else self.features.cut
        if self.features is not None:
            have += ", " if have else ""
            have += f"{cut.size} of {cut.whole} features" if cut else "a part of every expert"
        return PlanError(
            f"cannot split random numbers of shape {shape} ({func}) over processes: this process "
            f"has {have}, and no dimension is known to hold them; accepted: shapes that begin with "
            "rows or tokens, or end with features. Set tp, cp and fsdp of the module to 1, or its "
            "dropout to 0"
        )


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of another shape with the same memory order of dimensions."""
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    return torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)


def _taker(
    axes: Sequence[Sequence[Cut]], shape: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    flat = [axis for dimension in axes for axis in dimension]

    def take(whole: torch.Tensor) -> torch.Tensor:
        local = whole.reshape([axis.whole for axis in flat])
        for dim, axis in enumerate(flat):
            local = axis.take(local, dim)
        return local.reshape(shape)

    return take


def current_draws() -> SharedDraws | None:
    """Return the innermost :class:`SharedDraws` of this thread."""
    return getattr(_local, "draws", None)


def set_grid(grid: Grid | None) -> None:
    """Set the rows and tokens that this process holds for the following draws, within
    :class:`SharedDraws`."""
    if (draws := current_draws()) is not None:
        draws.set_grid(grid)


def set_features(features: Features | None) -> None:
    """Set the features that this process holds for the following draws, within
    :class:`SharedDraws`."""
    if (draws := current_draws()) is not None:
        draws.set_features(features)


@contextmanager
def draws_suspended() -> Iterator[None]:
    """Disable :class:`SharedDraws`, so that compiled code runs compiled. Code in this context must
    not draw random numbers."""
    draws = current_draws()
    if draws is None:
        yield
        return
    with _disable_current_modes():
        yield


def same_draws(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that later calls draw with the grid and features of this moment."""
    draws = current_draws()
    if draws is None:
        return forward
    grid, features = draws.grid, draws.features

    def run(*args: Any, **kwargs: Any) -> Any:
        if current_draws() is draws:  # the first call
            return forward(*args, **kwargs)
        with SharedDraws(grid, features):
            return forward(*args, **kwargs)

    return run
