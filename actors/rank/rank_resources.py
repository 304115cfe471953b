"""Resources that a rank reserves in Ray, and a check that the cluster can hold all ranks of a
plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from raymm.actors.placement.node_types import (
    all_types,
    autoscaled_types,
    reachable_resources,
    without_room,
)
from raymm.actors.placement.placement import ONLY_RANKS, PlacementOptions
from raymm.errors import ClusterError
from raymm.plural import plural


@dataclass(frozen=True)
class RankResources:
    """Ray resources of one rank, and environment variables that its process starts with.

    Raises:
        ClusterError: an amount is invalid, all amounts are 0, or a variable is invalid.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("CPU", "GPU"):
            if name in self.custom:
                raise ClusterError(f"resources.custom has {name!r}; give cpus or gpus instead")
        amounts = {"cpus": self.cpus, "gpus": self.gpus, **self.custom}
        for name, amount in amounts.items():
            number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not number or not 0 <= amount < math.inf:
                raise ClusterError(
                    f"resources: {name} is {amount!r}; it must be a finite number, at least 0"
                )
        if not any(amounts.values()):
            raise ClusterError(
                f"resources are {amounts}: a rank would reserve nothing; give cpus, gpus or a "
                "custom resource above 0 (a small share is fine)"
            )

        for name, value in self.env.items():
            if not name or "=" in name or "\0" in f"{name}{value}" or not isinstance(value, str):
                raise ClusterError(
                    f"resources.env has {name!r}: {value!r}; accepted: non-empty names "
                    "without '=' and string values, both without NUL characters"
                )

    def check_device(self, device: str) -> None:
        """Check that every rank has exactly one GPU if the device is CUDA, as NCCL requires.

        Raises:
            ClusterError: another number of GPUs.
        """
        if device == "cuda" and self.gpus != 1:
            raise ClusterError(
                f"resources: gpus is {self.gpus:g} with device 'cuda'; accepted: 1. A rank uses "
                "exactly one GPU, and NCCL cannot connect two processes on the same GPU"
            )

    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in bundle.items() if amount > 0}


def check_capacity(
    num_ranks: int, resources: RankResources, options: PlacementOptions = ONLY_RANKS
) -> None:
    """Compare a plan's resources with those of the cluster, including nodes that an autoscaler can
    add.

    Raises:
        ClusterError: the cluster cannot hold the ranks and data workers, even when idle.
    """
    scales = bool(autoscaled_types())
    if not scales and options.waits():
        return  # the resources of the nodes to come are unknown
    has = reachable_resources()
    for name, amount in resources.bundle().items():
        needed = amount * (num_ranks + options.spares)
        workers = sum(bundle.get(name, 0.0) for bundle in options.worker_bundles)
        if needed + workers > has.get(name, 0.0) + 1e-9:
            suffix = f", plus {workers:g} {name} for data workers" if workers else ""
            if options.spares:
                suffix = f" with {options.spares} spares (run.spares){suffix}"
            at_most = " at most, including all nodes that its autoscaler can add" if scales else ""
            raise ClusterError(
                f"the plan has {plural(num_ranks, 'rank')} of {amount:g} {name} each, {needed:g} "
                f"{name} in total{suffix}; the cluster has {has.get(name, 0.0):g} "
                f"{name}{at_most}. Use fewer "
                "ranks (parallel.*.pp, parallel.*.ranks), reserve less for each (resources), or "
                "connect to a larger cluster"
            )
    if not scales:
        return
    bundle = resources.bundle()
    bundles = [bundle] * num_ranks + list(map(dict, options.bundles_beside(bundle)))
    if (reason := without_room(bundles, all_types())) is not None:
        raise ClusterError(f"{reason}. Reserve less for each rank (resources)")
