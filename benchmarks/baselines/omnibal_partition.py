"""OmniBal's balanced model partitioning (§4.2): the best candidates near an origin.

The best candidates are meant to be measured in real runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.baselines.parametric_partition import partition_layers
from raymm.errors import NoPlanError
from raymm.scheduler.search.partition import Ranges, even_layers

DEFAULT_TOP = 8


@dataclass(frozen=True)
class PartitionCandidate:
    """Partition with its scores.

    Attributes:
        ranges: layers ``[lo, hi)`` of each stage.
        variance: eq. 4, the sum of squared differences of the stages' forward times from their
            mean; seconds squared.
        communication: eq. 5, bytes over all cuts.
        score: sort key of candidates, from 0 (best in both) to 2.
    """

    ranges: Ranges
    variance: float
    communication: float
    score: float


def greedy_start(forward: Sequence[float], stages: int) -> Ranges:
    """Return OmniBal's origin.

    Each stage in turn takes the layers that bring it nearest to an equal share of the remaining
    forward time.

    Raises:
        NoPlanError: there are fewer layers than stages, or a time is negative or not finite.
    """
    partition_layers(forward, stages)  # checks the arguments
    num_layers, cuts, left = len(forward), [0], sum(forward)
    for index in range(stages - 1):
        others = stages - 1 - index
        share, end, time = left / (others + 1), cuts[-1] + 1, forward[cuts[-1]]
        while end < num_layers - others and abs(time + forward[end] - share) <= abs(time - share):
            time += forward[end]
            end += 1
        cuts.append(end)
        left -= time
    return tuple(zip(cuts, [*cuts[1:], num_layers], strict=True))


def partition_candidates(
    forward: Sequence[float],
    output_bytes: Sequence[float],
    stages: int,
    radius: int = 1,
    origin: Ranges | None = None,
    top: int = DEFAULT_TOP,
) -> tuple[PartitionCandidate, ...]:
    """Return the best neighbours of the origin by VAR(forward) + SUM(communication).

    Neighbours are the partitions whose cuts are each within ``radius`` layers of the origin's.

    Seconds squared and bytes cannot be added, so each is first scaled to 0..1 by its range over all
    neighbours (a constant counts as 0).

    Exact for any radius and any number of stages. The stages' mean forward time is the same for
    every partition, so both terms, and their ranges, are sums over stages and cuts. The ranking is
    a search for the ``top`` shortest paths through a graph with a node per cut and offset. These
    are found best first without enumerating the rest, by visiting about ``top * stages * (2 *
    radius + 1)`` partial paths.

    Args:
        forward: seconds of each layer's forward.
        output_bytes: bytes that each layer sends to the next.
        radius: largest distance that a cut moves, in layers.
        origin: partition to start from; :func:`greedy_start` by default. An origin with the least
            bottleneck of 1F + 1B (:func:`.parametric_partition.partition_layers`) takes frozen
            layers into account.

    Returns:
        Up to ``top`` candidates, best first.

    Raises:
        NoPlanError: the lists differ in length, the origin does not partition these layers, or as
            in :func:`greedy_start`.
        ValueError: ``radius`` or ``top`` is out of range.
    """
    if radius < 0 or top < 1:
        raise ValueError(f"radius is {radius} and top {top}; accepted: radius >= 0, top >= 1")
    if len(output_bytes) != len(forward):
        raise NoPlanError(
            f"output_bytes has {len(output_bytes)} entries; "
            f"it needs one per layer ({len(forward)})"
        )
    partition_layers(output_bytes, stages)  # checks the volumes
    greedy = greedy_start(forward, stages)
    origin = greedy if origin is None else origin
    _check_start(origin, len(forward), stages)

    terms = _Terms(forward, output_bytes, stages)
    levels = _levels(origin, radius, len(forward))
    variances = _extremes(levels, terms.variance)
    volumes = _extremes(levels, terms.communication)

    def score(lo: int, hi: int) -> float:
        total = 0.0
        for term, (least, most) in ((terms.variance, variances), (terms.communication, volumes)):
            if most > least:
                total += (term(lo, hi) - least / stages) / (most - least)
        return total

    candidates = []
    for bounds in itertools.islice(_best_first(levels, score), top):
        ranges = tuple(itertools.pairwise(bounds))
        candidates.append(
            PartitionCandidate(
                ranges,
                sum(terms.variance(lo, hi) for lo, hi in ranges),
                sum(terms.communication(lo, hi) for lo, hi in ranges),
                max(sum(score(lo, hi) for lo, hi in ranges), 0.0),
            )
        )
    return tuple(sorted(candidates, key=lambda candidate: candidate.score))


class _Terms:
    """Contributions of one stage ``[lo, hi)`` to eq. 4 and eq. 5."""

    def __init__(
        self, forward: Sequence[float], output_bytes: Sequence[float], stages: int
    ) -> None:
        self.prefix = [0.0, *itertools.accumulate(map(float, forward))]
        self.mean = self.prefix[-1] / stages
        self.output_bytes = output_bytes

    def variance(self, lo: int, hi: int) -> float:
        return (self.prefix[hi] - self.prefix[lo] - self.mean) ** 2

    def communication(self, lo: int, hi: int) -> float:
        """Return the bytes that the stage sends; 0 for the last."""
        return float(self.output_bytes[hi - 1]) if hi < len(self.output_bytes) else 0.0


def _levels(origin: Ranges, radius: int, num_layers: int) -> list[list[int]]:
    """Return the possible positions of each cut, including 0 and the end.

    Cuts that leave too few layers before or after them are excluded; a path must still ascend.
    """
    stages = len(origin)
    inner = [
        [
            cut
            for cut in range(lo - radius, lo + radius + 1)
            if index <= cut <= num_layers - stages + index
        ]
        for index, (lo, _) in enumerate(origin[1:], start=1)
    ]
    return [[0], *inner, [num_layers]]


def _distances(
    levels: Sequence[Sequence[int]],
    term: Callable[[int, int], float],
    choose: Callable[..., float],
) -> list[dict[int, float]]:
    """Return, per level and cut, the least (or most) sum of terms from there to the end.

    Cuts without an ascending path to the end are excluded.
    """
    result: list[dict[int, float]] = [{cut: 0.0 for cut in levels[-1]}]
    for level in reversed(levels[:-1]):
        after = result[-1]
        options = {
            cut: [term(cut, end) + rest for end, rest in after.items() if end > cut]
            for cut in level
        }
        result.append({cut: choose(values) for cut, values in options.items() if values})
    return result[::-1]


def _extremes(
    levels: Sequence[Sequence[int]], term: Callable[[int, int], float]
) -> tuple[float, float]:
    """Return least and most sum of terms over all paths; equal if they differ by rounding only."""
    least, most = (_distances(levels, term, choose)[0][0] for choose in (min, max))
    return (least, least) if math.isclose(least, most, rel_tol=1e-12) else (least, most)


def _best_first(
    levels: Sequence[Sequence[int]], term: Callable[[int, int], float]
) -> Iterator[tuple[int, ...]]:
    """Yield all ascending paths through the levels, cheapest first (to within 1e-9).

    Equal layers make very many paths equal up to rounding. Among these the longest partial path is
    extended first, so that paths are finished one after the other.
    """
    to_end = _distances(levels, term, min)
    queue: list[tuple[float, int, float, tuple[int, ...]]] = [(0.0, 0, 0.0, (0,))]
    while queue:
        *_, so_far, path = heapq.heappop(queue)
        if len(path) == len(levels):
            yield path
            continue
        for cut, rest in to_end[len(path)].items():
            if cut > path[-1]:
                cost = so_far + term(path[-1], cut)
                key = (round(cost + rest, 9), -len(path))
                heapq.heappush(queue, (*key, cost, (*path, cut)))


def _check_start(origin: Ranges, num_layers: int, stages: int) -> None:
    bounds = [0, *(hi for _, hi in origin)]
    pairs = tuple(itertools.pairwise(bounds))
    if (
        len(origin) != stages
        or tuple(map(tuple, origin)) != pairs
        or bounds[-1] != num_layers
        or any(lo >= hi for lo, hi in pairs)
    ):
        raise NoPlanError(
            f"origin is {origin}; it must cut {num_layers} layers into {stages} non-empty "
            f"ranges, e.g. {even_layers(num_layers, stages)}"
        )
