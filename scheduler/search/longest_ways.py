"""Longest paths of a microbatch and its gradient through a graph of modules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raymm.scheduler.graph.module_graph import ModuleGraph


class LongestWays:
    """Seconds of the longest path of one microbatch to or from each cut (n + 1 of them) of a
    module, from (n,) forward seconds of every layer and (n,) seconds in which a gradient passes, by
    module."""

    def __init__(
        self,
        graph: ModuleGraph,
        forward: Mapping[str, np.ndarray],
        gradient: Mapping[str, np.ndarray],
    ) -> None:
        self.forward = {m: np.array([0.0, *np.cumsum(f)]) for m, f in forward.items()}
        self.gradient = {m: np.array([0.0, *np.cumsum(g)]) for m, g in gradient.items()}
        self.before: dict[str, float] = {}  # from the data to the module's input
        self.back: dict[str, float] = {}  # a gradient from there to the first layers
        # From the module's output to a loss, and the loss's gradient to the first layers.
        self.beyond: dict[str, float] = {}
        for m in graph.topological:
            feeding = graph.producers(m)
            self.before[m] = max((self.before[p] + self.forward[p][-1] for p in feeding), default=0)
            self.back[m] = max((self.back[p] + self.gradient[p][-1] for p in feeding), default=0)
        for m in reversed(graph.topological):
            ways = [self.beyond[c] + self.forward[c][-1] for c in graph.consumers(m)]
            self.beyond[m] = max(ways, default=self.gradient[m][-1] + self.back[m])

    def from_data(self, module: str) -> np.ndarray:
        """Return the forward seconds from the data to each cut."""
        return self.before[module] + self.forward[module]

    def to_first(self, module: str) -> np.ndarray:
        """Return the seconds of a gradient from each cut to the first layers."""
        return self.back[module] + self.gradient[module]

    def to_loss_and_back(self, module: str) -> np.ndarray:
        """Return the seconds from each cut to a loss, and of its gradient to the first layers."""
        forward = self.forward[module]
        return forward[-1] - forward + self.beyond[module]
