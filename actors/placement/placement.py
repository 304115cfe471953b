"""One reservation for all processes of a run, and the wait for the nodes that it needs.

Everything is asked for at once: an autoscaler then brings the nodes for all of it, where a process
that asks by itself can cost a node of its own; and nothing starts before everything can.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raymm.actors.placement.node_types import has_autoscaler, pending_nodes, spell
from raymm.errors import InputError

# Seconds a placement group may take where all nodes are there and big enough.
PLACEMENT_TIMEOUT_S = 120.0
# Seconds to wait for nodes that an autoscaler brings: a GPU machine and its image take minutes.
WAIT_FOR_NODES_S = 1800.0
# Seconds between two lines about it.
LINE_EVERY_S = 10.0

Bundle = Mapping[str, float]


class ClusterError(InputError, RuntimeError):
    """The cluster lacks what the plan needs; says what it has."""


@dataclass(frozen=True)
class PlacementOptions:
    """What is reserved with the ranks, and how long nodes may take.

    Attributes:
        beside: bundles of processes beside the ranks: data workers.
        wait_for_nodes_s: seconds; None: :data:`WAIT_FOR_NODES_S` with an autoscaler, and none
            without, where what is not there will not come.
        say: is told what is waited for.
    """

    beside: tuple[Bundle, ...] = ()
    wait_for_nodes_s: float | None = None
    say: Callable[[str], None] = print

    def waits(self) -> float:
        """Seconds to wait for nodes of the connected cluster; 0: they must be there."""
        if self.wait_for_nodes_s is not None:
            return self.wait_for_nodes_s
        return WAIT_FOR_NODES_S if has_autoscaler() else 0.0


ONLY_RANKS = PlacementOptions()


class Placement:
    """Places for processes, one each.

    Args:
        bundles: what each process of a plan reserves.
        options: what is reserved with them.
    """

    def __init__(self, bundles: Sequence[Bundle], options: PlacementOptions) -> None:
        self._bundles = [dict(bundle) for bundle in (*bundles, *options.beside)]
        self._first_beside = len(bundles)
        self._options, self._waits = options, options.waits()
        self._group = placement_group(self._bundles, strategy="PACK")

    def wait(self) -> None:
        """Until all places are there.

        Raises:
            ClusterError: they do not come in time.
        """
        start = time.monotonic()
        patience = self._waits or PLACEMENT_TIMEOUT_S
        line_due = start + LINE_EVERY_S
        # In slices, so that Ctrl-C is heard; not ready(), whose task takes a worker process.
        while not self._group.wait(1.0):
            now = time.monotonic()
            if now - start > patience:
                raise ClusterError(self._too_late(patience))
            if self._waits and now >= line_due:
                line_due += LINE_EVERY_S
                self._options.say(
                    f"waiting for nodes, {now - start:.0f} s: {_there()}; asked for: "
                    f"{_counted(self._bundles)}; at most {patience:g} s (run.wait_for_nodes_s)"
                )

    def place(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where a process of the plan goes."""
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    @property
    def beside(self) -> tuple[PlacementGroupSchedulingStrategy, ...]:
        """Where those beside them go."""
        return tuple(self.place(n) for n in range(self._first_beside, len(self._bundles)))

    def nodes(self) -> frozenset[str]:
        """Ray's ids of the nodes that have the places; known once they are there."""
        table: Any = placement_group_table(self._group)
        return frozenset(table["bundles_to_node_id"].values())

    def remove(self) -> None:
        """Give everything back."""
        remove_placement_group(self._group)

    def _too_late(self, patience: float) -> str:
        text = f"{_counted(self._bundles)} could not be placed within {patience:g} s"
        if self._waits:
            return (
                f"{text} (run.wait_for_nodes_s): {_there()}. Look at what the autoscaler says "
                "(`ray status`; on Kubernetes `kubectl get pods` and the head's container "
                "'autoscaler'), or wait longer"
            )
        return f"{text}; free in the cluster now: {ray.available_resources()}"


def _counted(bundles: Sequence[Bundle]) -> str:
    counts = Counter(spell(bundle) for bundle in bundles)
    return " and ".join(f"{count} x ({text})" for text, count in counts.items())


def _there() -> str:
    alive = [node for node in ray.nodes() if node["Alive"]]
    total: dict[str, float] = {}
    for node in alive:
        for name, amount in node["Resources"].items():
            total[name] = total.get(name, 0.0) + amount
    pending = ", ".join(f"{count} {name}" for name, count in sorted(pending_nodes().items()))
    noun = "node" if len(alive) == 1 else "nodes"
    return f"{len(alive)} {noun} there ({spell(total)}), pending: {pending or 'none'}"
