"""A step of a plan as arrays, and the rules of a schedule as numbers: what compiled code reads.

``S`` stages, ``M`` microbatches, ``R`` ranks, ``E`` data edges. Lists per stage or rank are one
array, with where each begins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Operations, as in :data:`raymm.scheduler.schedule.step_parts.OPS`.
F, F_NO_GRAD, F_CHECKPOINTED, R, B, B_INPUT, B_WEIGHT = range(7)
# Columns of stages: what they are, and where their lists begin.
RANK, MODULE, DEPTH, HELD, RECOMPUTES, TRAINS = range(6)
FORWARDS, BACKWARDS, PRODUCERS, CONSUMERS = range(6, 10)
# Columns of amounts, after seconds by operation.
KEPT, ACTIVATION, QUOTA_SHARE = range(7, 10)
# What a microbatch does in a stage: bits (ActiveStages of step_graph.py).
RUN, NEEDS, OWES = 1, 2, 4
# Columns of edges: by consumer the producer; by producer the consumer, and which edge that is.
PRODUCER, CONSUMER, CONSUMER_EDGE = range(3)


class StepArrays(NamedTuple):
    """A step of a plan, or of a part of it that has nothing to do with the rest.

    Attributes:
        stages: (S + 1, 10) int64; the last row only ends lists.
        amounts: (S, 10) float64: seconds by operation, bytes after a forward, and more after a
            recomputation, quota (0 where a stage has none).
        uses: (S, M) uint8.
        microbatches: of every stage's forwards, then of every stage's backwards.
        edges: (E, 3) int64, of which the first column is ordered by consumers, the others by
            producers, and of one producer by rank.
        consumers: (E,) int64, the consumer of each edge in the order of consumers.
        carried: (E, M) bool, whether an edge has something to carry to another rank.
        delays: (E, 2) float64, seconds of an output on its way, and of a gradient.
        consumer_modules: (S, modules) bool.
        rank_starts, rank_stages: a rank's stages, producers before consumers.
    """

    stages: np.ndarray
    amounts: np.ndarray
    uses: np.ndarray
    microbatches: np.ndarray
    edges: np.ndarray
    consumers: np.ndarray
    carried: np.ndarray
    delays: np.ndarray
    consumer_modules: np.ndarray
    rank_starts: np.ndarray
    rank_stages: np.ndarray


class RuleArrays(NamedTuple):
    """A schedule's rules (:mod:`raymm.scheduler.schedule.schedule_rules`) as numbers; ``limits`` is
    (R,) bytes, empty without any; ``ahead`` (S,) how many microbatches a stage may hold, 0 for as
    many as the other rules say."""

    priority: np.ndarray
    patience: float
    hops: int
    beyond_depth: bool
    flush: bool
    split: bool
    early: bool
    limits: np.ndarray
    ahead: np.ndarray
