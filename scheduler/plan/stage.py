"""A stage of a plan: which layers, where, and how its rank shares them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

SHARDINGS = ("none", "zero1", "fsdp")
"""Nothing; the optimizer's state (ZeRO-1); or that and the parameters and gradients of blocks and
untied embeddings (ZeRO-3, as torch's FSDP2 has it)."""


SPLITS = ("microbatches", "samples")
"""What a module's replicas deal out among themselves: a step's microbatches, each of which goes
through one of them, or the samples of every microbatch, in consecutive shares."""


class StageId(NamedTuple):
    """Which stage: its module, its place in the module, and the module's replica. Ids sort like
    that, and print as the name that people and files have: ``llm.2``, or ``vision.0@1`` in the
    module's second replica.

    A module that runs whole (one of a mapping) has :data:`WHOLE` as its place and the module's
    name as its own. ``StageId("")`` is no stage: what concerns all of a rank.
    """

    module: str
    index: int = -1
    replica: int = 0

    def __str__(self) -> str:
        place = "" if self.index == WHOLE else f".{self.index}"
        return self.module + place + (f"@{self.replica}" if self.replica else "")

    @property
    def first_replica(self) -> StageId:
        """The same stage in the module's first replica."""
        return self._replace(replica=0)


WHOLE = -1
NO_STAGE = StageId("")
Edge = tuple[StageId, StageId]
"""From one stage to another."""


class Degrees(NamedTuple):
    """How a rank is several processes: by tokens (context parallel), by parameters (tensor
    parallel), by samples (fully sharded data parallel)."""

    cp: int = 1
    tp: int = 1
    fsdp: int = 1


@dataclass(frozen=True)
class Stage:
    """Layers ``[layers[0], layers[1])`` of one module, on one rank.

    Attributes:
        module, index: the module, and the stage's place in it.
        layers: first layer, and one past the last.
        rank: where it runs.
        replica: which replica of the module it belongs to (data parallelism). Microbatches are
            split over the copies in turn; gradients of all copies are summed.
        recompute: keep only its inputs, and run its forward again for the backward.
        cp: context parallel degree: its rank is that many processes, each with its share of
            every sample's tokens.
        tp: tensor parallel degree: each of those is that many processes, each with its share of
            the layers' parameters.
        sharding: what of the module the processes that share its parameters keep one copy of
            among themselves: one of :data:`SHARDINGS`.
        fsdp: degree of fully sharded data parallelism: its rank is that many times as many
            processes, each with its share of every microbatch's samples (an encoder's items).
            With ``sharding="fsdp"`` only; the blocks' parameters are then shared out over the
            ``fsdp * cp`` processes that have the same of everything else.
        layer_options: what each of its blocks does with its activations, one of
            :data:`raymm.scheduler.costs.recomputation.OPTIONS`; all keep them if none are given.
        quota: share of the rank's multiprocessors that it runs on beside other modules' stages;
            None: nothing runs beside it (:mod:`raymm.scheduler.plan.rank_quotas`).
        split: what the module's replicas deal out, one of :data:`SPLITS`.
        ep: expert parallel degree: 1, or the number of processes that its blocks' parameters are
            shared out over. These then send tokens to one another's experts instead of gathering
            the experts.
        slot: in schedule ``"slots"``, when it runs: ranks run their slots forward in this order,
            then backward in reverse, and the stages of one slot concurrently.
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

    @cached_property
    def degrees(self) -> Degrees:
        """How its rank is several processes."""
        return Degrees(self.cp, self.tp, self.fsdp)

    @property
    def shards(self) -> int:
        """How many processes the blocks' parameters are shared out over; 1 if each has them all."""
        return self.fsdp * self.cp if self.sharding == "fsdp" else 1

    @cached_property
    def id(self) -> StageId:
        """Which stage it is."""
        return StageId(self.module, self.index, self.replica)
