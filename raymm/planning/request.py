"""What is to be planned, put together from a configuration, the data and the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raymm.actors.placement.node_types import reachable_resources
from raymm.actors.rank.rank_group import RankResources
from raymm.config.sections import TrainConfig
from raymm.costs.full_microbatch import full_microbatch
from raymm.costs.named_devices import cluster_device
from raymm.costs.profile_files import load_table
from raymm.costs.workload import check_tokens
from raymm.data import DataConfig, is_there, local_steps
from raymm.data.loading.in_memory import split_batch
from raymm.model.batch_rules import complete_microbatch
from raymm.model.multimodal import LANGUAGE_MODEL, MultimodalModule, module_graph
from raymm.planning.degrees import DegreeRequest
from raymm.planning.plan_model import Planned, plan_model
from raymm.planning.planned_costs import Costs, model_costs
from raymm.planning.strategies import OMNIBAL_RADIUS, Search
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import ProfileError
from raymm.scheduler.plan.plan import PlanError
from raymm.scheduler.plan.plan_error import check_number
from raymm.scheduler.search.planner import LAYOUTS, SEARCHED_SCHEDULES

# Ranks that raymm takes by itself where they are CPU processes.
MAX_CPU_RANKS = 8
# Devices and memory of each beyond these are mistakes.
MOST_RANKS = 2**16
MOST_GIB = 2**20
@dataclass(frozen=True)
class PlanRequest:
    """What to plan for and how; fields as of :func:`raymm.plan`. None: as the cluster is.

    Attributes:
        style: ``"pipelined"``, ``"multiplexed"``, or ``"auto"``: whichever is predicted to be
            faster (:mod:`raymm.planning.styles`).
    """

    ranks: int | None = None
    device: str | None = None
    profile: str | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    memory_gib: float | None = None
    ranks_per_node: int = 8
    strategy: str = "joint"
    schedules: Sequence[str] = SEARCHED_SCHEDULES
    layouts: Sequence[str] = LAYOUTS
    recompute: bool | str | None = None
    radius: int = OMNIBAL_RADIUS
    degrees: str | Sequence[str] = "auto"
    style: str = "pipelined"

    @classmethod
    def of_config(cls, config: TrainConfig) -> PlanRequest:
        """What the sections ``planning`` and ``parallel`` ask for."""
        only = config.parallel.schedule
        return cls(
            **config.planning.model_dump(), recompute=config.parallel.recompute,
            schedules=SEARCHED_SCHEDULES if only is None else (only,),
            style=config.parallel.style or "pipelined",
        )

    def check(self, model: MultimodalModule) -> None:
        """Find what is wrong before anything starts.

        Raises:
            PlanError, DeviceError, ProfileError, LoadError: naming the field, its value and what
                is accepted.
        """
        if self.style not in ("pipelined", "multiplexed", "auto"):
            raise PlanError(
                f"style is {self.style!r}; accepted: pipelined, multiplexed, auto"
            )
        self._search(1)
        check_number("ranks_per_node", self.ranks_per_node)
        if self.ranks is not None and self.ranks > MOST_RANKS:
            raise PlanError(f"ranks is {self.ranks}; accepted: at most {MOST_RANKS}")
        if self.memory_gib is not None and not 0 < self.memory_gib <= MOST_GIB:  # NaN fails too
            raise PlanError(
                f"memory_gib is {self.memory_gib}; accepted: a number above 0, at most {MOST_GIB}"
            )
        DegreeRequest.of(self.degrees).check((*model.encoder_names, LANGUAGE_MODEL))
        if self.device is not None:
            find_device(self.device)
        if self.profile is not None:
            load_table(self.profile).at(extrapolate=True).check(module_graph(model))
        check_tokens(model, self.tokens)

    def _search(self, microbatches: int) -> Search:
        return Search(
            1 if self.ranks is None else self.ranks, microbatches, strategy=self.strategy,
            schedules=self.schedules, layouts=self.layouts, recompute=self.recompute,
            radius=self.radius,
        )

    def costs(self, model: MultimodalModule, data: DataShape, dtype: str) -> Costs:
        """Costs of the model's layers on a microbatch of the data."""
        return model_costs(
            model, device=self.device, profile=self.profile, microbatch=data.microbatch,
            tokens=self.tokens, samples=data.samples, text=data.text, dtype=dtype,
            ranks_per_node=self.ranks_per_node,
        )

    def plan(
        self, model: MultimodalModule, data: DataShape, dtype: str, note: str | None = None
    ) -> Planned:
        """The plan; :attr:`ranks` must be known."""
        search = self._search(data.microbatches)
        costs = self.costs(model, data, dtype)
        if note is not None:
            costs = replace(costs, notes=(*costs.notes, note))
        return plan_model(
            model, costs, replace(search, memory_limit=costs.memory_limit(self.memory_gib)),
            degrees=DegreeRequest.of(self.degrees),
        )


@dataclass(frozen=True)
class DataShape:
    """What planning needs to know of the data.

    Attributes:
        microbatches: per step.
        samples: per microbatch.
        text: the longest text of a sample.
        microbatch: reads a real one; None if there is no data (yet).
    """

    microbatches: int
    samples: int = 1
    text: int | None = None
    microbatch: Callable[[], Mapping[str, Any]] | None = None

    @classmethod
    def of_config(cls, data: DataConfig, modalities: Sequence[str]) -> DataShape:
        """Of a run's data; its file need not be there."""
        there = all(is_there(source.path) for source in data.sources("train"))
        return cls(
            data.microbatches, data.batch_size // data.microbatches, data.max_length,
            (lambda: _full_or_first(data, modalities)) if there else None,
        )

    @classmethod
    def of_batches(
        cls, batches: Sequence[Any], modalities: Sequence[str], ranks: int
    ) -> DataShape:
        """Of batches in memory: as many microbatches as they are split into already, else a
        number that divides the rows and keeps the ranks busy.

        Raises:
            BatchError: the first batch cannot be.
        """
        first = batches[0]
        if not isinstance(first, Mapping):
            largest = max(first, key=lambda one: (len(one), one["input_ids"].numel()))
            return cls(len(first), microbatch=lambda: largest)
        first = complete_microbatch(first, modalities)
        rows = len(first["input_ids"])
        count = max(n for n in range(1, min(rows, 2 * ranks) + 1) if rows % n == 0)
        parts = split_batch(first, count)
        largest = max(parts, key=len)
        return cls(count, rows // count, microbatch=lambda: largest)


def _full_or_first(data: DataConfig, modalities: Sequence[str]) -> Mapping[str, Any]:
    try:
        return full_microbatch(data, modalities)
    except ProfileError:  # data that lack a modality can be trained on too
        return next(iter(local_steps(data, steps=1))).microbatches[0]


def cluster_ranks(resources: RankResources, worker_cpus: float = 0.0) -> int:
    """Ranks that the connected cluster, with all nodes that may come, has room for beside the data
    workers: one per GPU share, or on CPUs at most :data:`MAX_CPU_RANKS`; at least one.

    Raises:
        PlanError: there may come any number of nodes.
    """
    has = reachable_resources()
    limits = [
        (has.get(name, 0.0) - (worker_cpus if name == "CPU" else 0.0)) / amount + 1e-9
        for name, amount in resources.bundle().items() if amount > 0
    ]
    if not resources.gpus:
        limits.append(MAX_CPU_RANKS)
    if math.isinf(most := min(limits)):
        raise PlanError(
            "planning.ranks is not given, and the cluster's autoscaler may bring any number of "
            "nodes; accepted: how many ranks to plan for"
        )
    return max(1, int(most))


def request_for_cluster(
    request: PlanRequest, model: MultimodalModule, data: DataConfig | Sequence[Any], *,
    device: str, resources: RankResources, worker_cpus: float,
) -> tuple[PlanRequest, DataShape, str | None]:
    """A run's request with what it does not say as the connected cluster is; the shape of its
    data; and what to say if the device is not in raymm's table.

    Args:
        request: what is asked for.
        data: the run's, or batches in memory.
        device: ``"cpu"`` or ``"cuda"``.
        resources: of each rank.
        worker_cpus: CPUs of the data workers.

    Raises:
        DataError: data that cannot be read.
    """
    note = None
    ranks = request.ranks
    if ranks is None:
        ranks = cluster_ranks(resources, worker_cpus)
        request = replace(request, ranks=ranks)
    if request.device is None and request.profile is None:
        name, note = cluster_device(device)
        request = replace(request, device=name)
    if isinstance(data, DataConfig):
        shape = DataShape.of_config(data, model.encoder_names)
    else:
        shape = DataShape.of_batches(data, model.encoder_names, ranks)
    return request, shape, note
