"""Host memory of a plan's nodes, from the shapes of parameters: no module is probed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.table import Table
from torch import nn

from raymm.actors.host.memory import CopyOptions, HostMemory, available_memory
from raymm.actors.modules.blocks import find_blocks
from raymm.actors.modules.cut import CutInfo
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.sharding.tensor_plan import tensor_plan
from raymm.actors.weights.source import LiveSource
from raymm.costs.optimizer_state import parameter_layers
from raymm.draw.row_table import row_table
from raymm.layout.host_memory import HostNeed, ProcessParameters, check_hosts, needs_of, node_needs
from raymm.layout.parameter_owners import parameter_ownership
from raymm.layout.stage_builders import AnySpec, parameter_sizes, shard_spec
from raymm.model.model import Model
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.process_grid import Processes
from raymm.scheduler.schedule.memory import GIB

# Seconds in which a node must report its memory.
_TIMEOUT_S = 60.0
_CAPTION = (
    "in GiB. checkpoint: copies of asynchronous checkpoints; snapshots: see run.snapshot_every; "
    "pinned: page-locked memory for both; offloaded: activations. Data workers, Ray and the "
    "driver need more"
)


@dataclass(frozen=True)
class PlannedHosts:
    """Host memory that the processes of a plan need, on nodes of ``ranks_per_node`` processes."""

    needs: tuple[HostNeed, ...]
    ranks_per_node: int

    @classmethod
    def of(
        cls, model: Model, plan: Plan, optimizer: OptimizerConfig,
        copies: CopyOptions, device: str, ranks_per_node: int,
    ) -> PlannedHosts:
        """Count the bytes of a plan. ``device`` is ``"cpu"`` or ``"cuda"``."""
        return cls(needs_of(process_parameters(model, plan, optimizer), optimizer, copies, device),
                   ranks_per_node)  # fmt: skip

    @property
    def _nodes(self) -> list[str]:
        return [str(number // self.ranks_per_node) for number in range(len(self.needs))]

    def rows(self) -> list[dict[str, str]]:
        """Return one row per node; adjacent nodes with equal needs share a row."""
        groups: list[tuple[list[str], tuple[int, ...], list[int]]] = []
        for node, need in node_needs(self.needs, self._nodes).items():
            if groups and groups[-1][1] == need[1:]:
                groups[-1][0].append(node)
                groups[-1][2].extend(need.processes)
            else:
                groups.append(([node], need[1:], list(need.processes)))
        return [
            {
                "node": _span(nodes), "processes": _span(processes),
                "checkpoint": _gib(amounts[0]), "snapshots": _gib(amounts[1]),
                "pinned": _gib(amounts[2]), "offloaded": _gib(amounts[3]),
                "total": _gib(sum(amounts)),
            }
            for nodes, amounts, processes in groups
        ]

    def table(self) -> Table:
        """Return a table of all nodes for a rich console."""
        return row_table(
            self.rows(), title=f"host memory of {plural(len(set(self._nodes)), 'node')}",
            caption=_CAPTION, left=("node", "processes"),
        )

    def check(self, available: Sequence[HostMemory]) -> None:
        """Raise a PlanError if the plan does not fit on nodes with this memory. The node that needs
        most is compared with the node that has most, and so on; further nodes are not checked."""
        nodes = node_needs(self.needs, self._nodes)
        largest = sorted(nodes, key=lambda node: nodes[node].total, reverse=True)
        hosts = sorted(available, key=lambda host: host.available, reverse=True)
        by_node = {
            node: host._replace(node=node) for node, host in zip(largest, hosts, strict=False)
        }
        unknown = HostMemory("", "", max((need.total for need in nodes.values()), default=0))
        check_hosts(
            self.needs, [by_node.get(node, unknown._replace(node=node)) for node in self._nodes]
        )


def process_parameters(
    model: Model, plan: Plan, optimizer: OptimizerConfig
) -> ProcessParameters:
    """Return the parameters of a plan's processes, as stages will hold them.

    The cut and the tensor plan are those that the structure of a module suggests. Ranks have others
    if a probe finds that the module needs them, as for parameters that no forward uses.
    """
    specs: dict[str, AnySpec] = {}
    shard_specs, owned = {}, {}
    for node in plan.graph.nodes:
        module = model.module(node.name)
        spec: Any = module.spec
        first = plan.replicas(node.name)[0][0]
        structure = spec.source.skeleton()
        specs[node.name] = shaped = replace(
            spec, source=LiveSource(structure, {}), cut=_cut(structure, spec.num_blocks)
        )
        # Experts are found by running a small model, for which the structure is not enough.
        shard_specs[node.name] = shard_spec(
            shaped if first.ep == 1 else spec, first,
            partial(tensor_plan, shaped.source, first.tp, node.name),
        )
        sizes = parameter_sizes(shaped)
        by_layers = {
            stage.layers: {
                name: sizes[name] for name in module.stage_parameters(shaped, *stage.layers)
            }
            for stage in plan.module_stages(node.name)
        }
        for stage in plan.module_stages(node.name):
            owned[stage.id] = by_layers[stage.layers]
    processes = Processes(plan)
    ownership = parameter_ownership(processes, owned, shard_specs, optimizer)
    return ProcessParameters(processes, specs, shard_specs, owned, ownership, model.reloadable())


def _cut(module: nn.Module, num_blocks: int) -> CutInfo | None:
    """Return the parameters outside the blocks by the stage that uses them: those before the blocks
    in the first, those after them in the last."""
    if (blocks := find_blocks(module)) is None:
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    ends: tuple[set[str], set[str]] = set(), set()
    for layer, parameter in parameter_layers(module, num_blocks):
        name = names[id(parameter)]
        if not name.startswith(f"{blocks}."):
            ends[layer > 0].add(name)
    return CutInfo(blocks, 0, frozenset(ends[0]), frozenset(), frozenset(ends[1]))


def cluster_hosts(device: str) -> list[HostMemory]:
    """Return the available memory of the connected cluster's nodes, on ``"cuda"`` of those with
    GPUs. Nodes that do not answer are omitted."""
    visit = ray.remote(num_cpus=0, max_retries=0)(available_memory)
    pending = {
        visit.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node
        for node in ray.nodes()
        if node["Alive"] and (device == "cpu" or node["Resources"].get("GPU"))
    }
    answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_TIMEOUT_S)
    hosts = []
    for answer in answered:
        node = pending[answer]
        try:
            hosts.append(HostMemory(node["NodeID"], node["NodeName"], ray.get(answer)))
        except RayError:
            continue
    return hosts


def _span(numbers: Sequence[Any]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
