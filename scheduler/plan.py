"""The Plan: everything there is to decide about a run, as plain serialisable data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from raymm.scheduler.graph import ModuleGraph, ModuleNode

PLAN_FORMAT = 1
SCHEDULES = ("1f1b",)


class PlanError(ValueError):
    """A plan that cannot run. The message names the field, its value and what is accepted."""


@dataclass(frozen=True)
class Stage:
    """Layers ``[layers[0], layers[1])`` of one module, on one rank."""

    module: str
    index: int
    layers: tuple[int, int]
    rank: int

    @property
    def name(self) -> str:
        """Unique name, e.g. ``"llm.2"``."""
        return f"{self.module}.{self.index}"


@dataclass(frozen=True)
class Plan:
    """What runs where: stages over ranks, microbatches, schedule.

    Several stages may share a rank (the rank then takes turns between them); every
    rank is one process on one device, one Ray actor.
    """

    graph: ModuleGraph
    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise PlanError(f"num_microbatches is {self.num_microbatches}; it must be at least 1")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule is {self.schedule!r}; accepted: {', '.join(SCHEDULES)}")
        known = {node.name for node in self.graph.nodes}
        for stage in self.stages:
            if stage.module not in known:
                raise PlanError(f"stage {stage.name}: modules are {sorted(known)}")
        for node in self.graph.nodes:
            self._check_layers(node)
        ranks = sorted({stage.rank for stage in self.stages})
        if ranks != list(range(len(ranks))):
            raise PlanError(f"ranks are {ranks}; they must be 0..{len(ranks) - 1} without gaps")

    def _check_layers(self, node: ModuleNode) -> None:
        stages = self.module_stages(node.name)
        if not stages:
            raise PlanError(f"module {node.name!r} has no stage; it needs at least one")
        expected = 0
        for index, stage in enumerate(stages):
            lo, hi = stage.layers
            if stage.index != index:
                raise PlanError(f"stages of {node.name!r} must be numbered 0.. in order")
            if lo != expected or hi <= lo:
                if lo == expected:
                    what = "be empty"
                else:
                    what = "overlap" if lo < expected else "leave a gap"
                raise PlanError(
                    f"stage {stage.name}: layers [{lo}, {hi}) would {what}; "
                    f"it must start at {expected} and hold at least one layer"
                )
            expected = hi
        if expected != node.num_layers:
            raise PlanError(
                f"stages of {node.name!r} cover layers [0, {expected}); "
                f"the module has {node.num_layers}"
            )

    @property
    def num_ranks(self) -> int:
        return 1 + max(stage.rank for stage in self.stages)

    def module_stages(self, module: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.module == module)

    def rank_stages(self, rank: int) -> tuple[Stage, ...]:
        """Stages of a rank, producers before consumers."""
        return tuple(s for s in self.topological_stages if s.rank == rank)

    @cached_property
    def by_name(self) -> Mapping[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def topological_stages(self) -> tuple[Stage, ...]:
        return tuple(s for m in self.graph.topological for s in self.module_stages(m))

    @cached_property
    def stage_edges(self) -> tuple[tuple[str, str], ...]:
        """Directed data edges between stages, within modules and between them."""
        edges = []
        for node in self.graph.nodes:
            names = [stage.name for stage in self.module_stages(node.name)]
            edges += list(zip(names, names[1:], strict=False))
        for src, dst in self.graph.edges:
            edges.append((self.module_stages(src)[-1].name, self.module_stages(dst)[0].name))
        return tuple(edges)

    @cached_property
    def depth(self) -> Mapping[str, int]:
        """Stages on the longest path from a stage to the loss, itself included."""
        depth: dict[str, int] = {}
        for stage in reversed(self.topological_stages):
            after = [depth[dst] for src, dst in self.stage_edges if src == stage.name]
            depth[stage.name] = 1 + max(after, default=0)
        return depth

    def trainable(self, stage: Stage) -> bool:
        lo, hi = stage.layers
        return any(self.graph.node(stage.module).trainable[lo:hi])

    def to_dict(self) -> dict[str, Any]:
        return {"format": PLAN_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanError: on a missing or unknown key, a value of another type, or a plan
                that cannot run.
        """
        try:
            if data["format"] != PLAN_FORMAT:
                raise PlanError(f"format is {data['format']!r}; accepted: {PLAN_FORMAT}")
            _only(data, "plan", ("format", "graph", "stages", "num_microbatches", "schedule"))
            return cls(
                graph=_graph(data["graph"]),
                stages=tuple(_stage(stage) for stage in data["stages"]),
                num_microbatches=_typed(data, "num_microbatches", int),
                schedule=_typed(data, "schedule", str),
            )
        except KeyError as error:
            raise PlanError(f"plan lacks the key {error}") from None
        except (TypeError, IndexError, AttributeError) as error:
            raise PlanError(f"plan has a value of the wrong kind: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"plan is not JSON: {error}") from None
        return cls.from_dict(data)


def _graph(data: Mapping[str, Any]) -> ModuleGraph:
    _only(data, "graph", ("nodes", "edges"))
    nodes = tuple(_node(node) for node in data["nodes"])
    edges = tuple(tuple(edge) for edge in data["edges"])
    for edge in edges:
        if [type(end) for end in edge] != [str, str]:
            raise PlanError(f"edge is {list(edge)}; it must be [producer, consumer]")
    try:
        return ModuleGraph(nodes, edges)
    except ValueError as error:
        raise PlanError(f"graph: {error}") from None


def _node(data: Mapping[str, Any]) -> ModuleNode:
    _only(data, "node", ("name", "trainable", "projector"))
    flags = tuple(data["trainable"])
    if any(type(flag) is not bool for flag in flags):
        raise PlanError(f"trainable is {list(flags)}; it must be a list of true and false")
    return ModuleNode(_typed(data, "name", str), flags, _typed(data, "projector", bool))


def _stage(data: Mapping[str, Any]) -> Stage:
    _only(data, "stage", ("module", "index", "layers", "rank"))
    layers = tuple(data["layers"])
    if [type(layer) for layer in layers] != [int, int]:
        raise PlanError(f"layers is {list(layers)}; it must be [first, one past the last]")
    return Stage(
        _typed(data, "module", str), _typed(data, "index", int), layers, _typed(data, "rank", int)
    )


def _only(data: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    if unknown := set(data) - set(known):
        raise PlanError(
            f"{where}: unknown keys {sorted(map(str, unknown))}; accepted: {sorted(known)}"
        )


def _typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data[key]
    if type(value) is not kind:  # not isinstance: True is no rank, though bool is an int
        raise PlanError(f"{key} is {value!r}; it must be of type {kind.__name__}")
    return value
