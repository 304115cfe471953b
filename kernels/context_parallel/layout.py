"""Split of a sequence's tokens over the ranks of a group, and the tokens that ranks need from
others.

Legend: ``n`` ranks, ``T`` tokens. Positions are global; a rank's tokens are in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from raymm.errors import ModelError
from raymm.kernels.mask.mask import AttentionMask

Ranges = tuple[tuple[int, int], ...]
_CACHED_PLANS = 256


@dataclass(frozen=True)
class ContextLayout:
    """Token ranges [start, stop) of every rank; together they cover [0, T), each token once.

    Raises:
        ModelError: ranges are out of order, or a token belongs to no rank or to two ranks.
    """

    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        ranges = sorted(r for owned in self.ranges for r in owned if r[0] < r[1])
        for owned in self.ranges:
            if any(a[1] > b[0] for a, b in zip(owned, owned[1:], strict=False)):
                raise ModelError(f"a rank's ranges must ascend, got {owned}")
        edge = 0
        for start, stop in ranges:
            if start != edge:
                fault = "have no rank" if start > edge else "are on two ranks"
                raise ModelError(f"tokens {min(start, edge)} to {max(start, edge)} {fault}")
            edge = stop

    @classmethod
    def even(cls, length: int, ranks: int) -> ContextLayout:
        """Return a layout of contiguous parts that differ by at most one token."""
        edges = [length * rank // ranks for rank in range(ranks + 1)]
        return cls(tuple(((a, b),) for a, b in zip(edges, edges[1:], strict=False)))

    @classmethod
    def of_blocks(
        cls, blocks: Sequence[Sequence[int]], block: int, length: int
    ) -> ContextLayout:
        """Return the layout of a distribution of blocks
        (``raymm.scheduler.context_parallel.distribution``).

        Args:
            blocks: ascending block numbers of each rank.
            block: tokens per block.
            length: tokens of the sequence.
        """
        return cls(
            tuple(
                join_ranges(
                    [(n * block, min((n + 1) * block, length)) for n in sorted(numbers)]
                )
                for numbers in blocks
            )
        )

    @property
    def num_ranks(self) -> int:
        """n."""
        return len(self.ranges)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of every rank."""
        return tuple(sum(stop - start for start, stop in owned) for owned in self.ranges)

    @property
    def length(self) -> int:
        """T."""
        return sum(self.sizes)

    def positions(self, rank: int) -> torch.Tensor:
        """Return the global positions of a rank's tokens, its position ids: (tokens,) int64."""
        return indices(self.ranges[rank])

    def local(self, rank: int, ranges: Ranges) -> torch.Tensor:
        """Return the indices of global ``ranges`` among a rank's tokens: (tokens,) int64."""
        return torch.searchsorted(self.positions(rank), indices(ranges))


def indices(ranges: Ranges) -> torch.Tensor:
    """Return the concatenated positions of ranges."""
    positions = [torch.arange(start, stop) for start, stop in ranges]
    return torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)


def join_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Merge adjacent ranges of an ascending sequence."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def ranges_of(chosen: np.ndarray) -> Ranges:
    """Return the ranges of True entries of a (T,) bool array."""
    edges = np.flatnonzero(np.diff(np.pad(chosen.astype(np.int8), 1)))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


@lru_cache(maxsize=_CACHED_PLANS)
def local_masks(
    masks: tuple[AttentionMask, ...], queries: Ranges, keys: Ranges
) -> tuple[AttentionMask, ...]:
    """Return the masks restricted to the given rows and keys (ascending token ranges).

    Results are cached, so that all layers share one object and its plans. Sequences with the same
    mask share one result.
    """
    local = {mask: mask.select_queries(queries).select_keys(keys) for mask in dict.fromkeys(masks)}
    return tuple(local[mask] for mask in masks)


@lru_cache(maxsize=_CACHED_PLANS)
def needed_keys(
    masks: tuple[AttentionMask, ...], queries: Ranges, keys: Ranges
) -> Ranges:
    """Return the ranges of a rank's ``keys`` that some row of ``queries`` sees under some mask. All
    ranges ascend."""
    positions = indices(keys).numpy()
    seen = np.zeros(len(positions), dtype=bool)
    for mask in set(local_masks(masks, queries, keys)):
        seen |= mask.seen_keys()
    if not len(positions):
        return ()
    needed = np.zeros(int(positions[-1]) + 1, dtype=bool)
    needed[positions[seen]] = True
    return ranges_of(needed)
