"""Stages of a plan: their layers, their ranks, and how each rank splits them over processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

SHARDINGS = ("none", "zero1", "fsdp")
"""State that processes with equal parameters shard: none; the optimizer state (ZeRO-1); or also
the parameters and gradients of blocks and untied embeddings (ZeRO-3, as in torch's FSDP2)."""


SPLITS = ("microbatches", "samples")
"""Unit of work that the replicas of a module split: the microbatches of a step, each of which runs
on one replica, or the samples of every microbatch, in consecutive shares."""


class StageId(NamedTuple):
    """Identifier of a stage: its module, its index in the module, and the replica of the module.

    Ids sort in that order and print as the names in files: ``llm.2``, or ``vision.0@1`` in the
    second replica. A module that runs whole (in a mapping) has the index :data:`WHOLE` and prints
    as its name. ``StageId("")`` (:data:`NO_STAGE`) stands for the whole rank.
    """

    module: str
    index: int = -1
    replica: int = 0

    def __str__(self) -> str:
        suffix = "" if self.index == WHOLE else f".{self.index}"
        return self.module + suffix + (f"@{self.replica}" if self.replica else "")

    @property
    def first_replica(self) -> StageId:
        """The same stage in the first replica of the module."""
        return self._replace(replica=0)


WHOLE = -1
NO_STAGE = StageId("")
Edge = tuple[StageId, StageId]
"""(from stage, to stage)."""


class Degrees(NamedTuple):
    """Parallel degrees of a rank: context parallel (tokens), tensor parallel (parameters), and
    fully sharded data parallel (samples)."""

    cp: int = 1
    tp: int = 1
    fsdp: int = 1


@dataclass(frozen=True)
class Stage:
    """Layers ``[layers[0], layers[1])`` of one module, on one rank.

    Attributes:
        index: position of the stage in the module.
        layers: first layer, and one past the last.
        replica: data-parallel replica of the module. Microbatches go to the replicas in turn;
            gradients are summed over replicas.
        recompute: True to keep only the inputs and run the forward again for the backward.
        cp: context parallel degree; the processes split the tokens of every sample.
        tp: tensor parallel degree; the processes split the parameters of the layers.
        sharding: what the processes with equal parameters shard, one of :data:`SHARDINGS`.
        fsdp: degree of fully sharded data parallelism; the processes split the samples of every
            microbatch (the items of an encoder). Needs ``sharding="fsdp"``, which shards the
            parameters of the blocks over all ``fsdp * cp`` processes.
        layer_options: activation handling of each block, one of
            :data:`raymm.scheduler.costs.recomputation.OPTIONS`; if empty, all blocks keep their
            activations.
        quota: share of the rank's multiprocessors, if stages of other modules run concurrently;
            None for the whole device (:mod:`raymm.scheduler.plan.rank_quotas`).
        split: what the replicas of the module split, one of :data:`SPLITS`.
        ep: expert parallel degree: 1, or the number of processes that shard the parameters of the
            blocks. With more than 1, these send tokens to each other's experts instead of gathering
            the experts.
        slot: time slot in schedule ``"slots"``: ranks run their slots forward in this order, then
            backward in reverse, and the stages of one slot concurrently.
        microbatch_factor: number of consecutive microbatches of a replica that share a forward and
            a backward of the module (:mod:`raymm.scheduler.plan.microbatch_groups`).
    """

    module: str
    index: int
    layers: tuple[int, int]
    rank: int
    replica: int = 0
    recompute: bool = False
    cp: int = 1
    tp: int = 1
    sharding: str = "none"
    fsdp: int = 1
    layer_options: tuple[str, ...] = ()
    quota: float | None = None
    split: str = "microbatches"
    slot: int | None = None
    ep: int = 1
    microbatch_factor: int = 1

    @cached_property
    def degrees(self) -> Degrees:
        """Parallel degrees of the stage's rank."""
        return Degrees(self.cp, self.tp, self.fsdp)

    @property
    def shards(self) -> int:
        """Number of processes that shard the parameters of the blocks; 1 without sharding."""
        return self.fsdp * self.cp if self.sharding == "fsdp" else 1

    @cached_property
    def id(self) -> StageId:
        return StageId(self.module, self.index, self.replica)
