"""What a GPU keeps from iteration to iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from raymm.actors.modules.node import NodeSpec
from raymm.actors.multiplexed.messages import Messages
from raymm.actors.multiplexed.samples import KnownLayout
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.quota import ConcurrentModules, StreamPool
from raymm.scheduler.graph.module_graph import ModuleGraph


class Mode(NamedTuple):
    """The mode that a submodule trains in: frozen ones are in evaluation mode."""

    module: nn.Module
    training: bool

    def apply(self, training: bool) -> None:
        """Set it; evaluation mode for everything where not ``training``."""
        self.module.training = training and self.training


@dataclass
class Device:
    """What stays from iteration to iteration.

    Attributes:
        device: of the tensors.
        graph: of all nodes.
        specs, modules: of the nodes here.
        modes: of all submodules, as they were built.
        pool, concurrent_modules: streams and threads.
        messages: to other GPUs; None where there are none.
        optimizer: of the parameters here.
        autocast: dtype of automatic mixed precision, None for none.
        layouts: by layout key and producer.
    """

    device: torch.device
    graph: ModuleGraph
    specs: Mapping[str, NodeSpec]
    modules: Mapping[str, nn.Module]
    modes: Sequence[Mode]
    pool: StreamPool
    concurrent_modules: ConcurrentModules
    messages: Messages | None
    optimizer: RankOptimizer
    autocast: torch.dtype | None = None
    layouts: dict[tuple[str, str], KnownLayout] = field(default_factory=dict)
