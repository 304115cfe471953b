"""The Plan: all decisions about a run, as plain serialisable data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.costs.device_memory import receives_ahead
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.recomputation import OPTIONS
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode, Port
from raymm.scheduler.graph.strict_json import json_value
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.plan.port_routes import EdgePorts, edge_ports
from raymm.scheduler.plan.rank_quotas import check_quotas, check_slots, quota_sets
from raymm.scheduler.plan.stage import SHARDINGS, SPLITS, Degrees, Edge, Stage, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.schedules.policy import Policy, check_policy
from raymm.scheduler.schedules.registry import DEFAULT_SCHEDULE, find_schedule, schedule_name

PLAN_FORMAT = 1
MOST_MICROBATCHES = 65_536  # per step; rejects typos with extra zeros before they are lowered


@dataclass(frozen=True)
class Plan:
    """Assignment of stages to ranks, with microbatches and schedule.

    Several stages may share a rank, which takes turns between them; modules with quotas run
    concurrently. A rank is one process on one device (one Ray actor) unless its stages have degrees
    above 1.

    Attributes:
        schedule: ``"1f1b"``, ``"zero_bubble"`` (1F1B's memory, less idle time), ``"gpipe"``, or
            ``"slots"``: stages run in the order of their slots (Mosaic §3: stages in sequence over
            a pool of GPUs, with modules side by side in each). A custom
            :class:`raymm.Schedule`, object or class, is registered and becomes its name.
        profile: costs of the layers, if known, for schedules that depend on costs.
        memory_limit: bytes per rank; None disables the memory check, which needs ``profile``.
        activation_limits: bytes of activations that ``"zero_bubble"`` may hold, per rank; by
            default as much as 1F1B holds.
        policy: task selection of ``"zero_bubble"``; by default every lowering tries several
            policies.
        shared_ranks: ranks that several stages take turns on. Plan files must list them, so that a
            rank written twice by mistake is noticed; in plans made in code they are optional.
        passes: names of the plan passes that have changed the plan, in their order.
        step_schedules: schedules among which training chooses for each step, together with the
            order of its microbatches (``planning.per_batch``); empty if every step has
            ``schedule`` and the order of the data.
    """

    graph: ModuleGraph
    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: str = DEFAULT_SCHEDULE
    profile: CostProfile | None = None
    memory_limit: int | None = None
    activation_limits: tuple[int, ...] | None = None
    policy: Policy | None = None
    shared_ranks: tuple[int, ...] | None = None
    passes: tuple[str, ...] = ()
    step_schedules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_number("num_microbatches", self.num_microbatches, most=MOST_MICROBATCHES)
        object.__setattr__(self, "schedule", schedule_name(self.schedule))
        steps = tuple(map(schedule_name, self.step_schedules))
        object.__setattr__(self, "step_schedules", steps)
        names = {node.name for node in self.graph.nodes}
        for stage in self.stages:
            if stage.module not in names:
                raise PlanError(f"stage {stage.id}: modules are {sorted(names)}")
        for node in self.graph.nodes:
            self._check_replicas(node)
        if self.profile is not None:
            try:
                self.profile.check(self.graph)
            except PlanError as error:
                raise PlanError(f"profile: {error}") from None
        check_policy(self.policy, {n.name: len(self.replicas(n.name)[0]) for n in self.graph.nodes})
        self._check_shared_ranks()
        self._check_processes()
        check_quotas(self.stages, self.schedule)
        check_slots(self.stages, self.schedule, self.stage_edges if self.uses_slots else ())
        ranks = sorted({stage.rank for stage in self.stages})
        if ranks != list(range(len(ranks))):
            raise PlanError(f"ranks are {ranks}; they must be 0..{len(ranks) - 1} without gaps")
        self._check_factors()
        limits = self.activation_limits
        if limits is not None and len(limits) != len(ranks):
            raise PlanError(
                f"activation_limits has {len(limits)} entries; it needs one per rank ({len(ranks)})"
            )

    def _check_shared_ranks(self) -> None:
        stages: dict[int, list[str]] = {}
        for stage in self.stages:
            stages.setdefault(stage.rank, []).append(str(stage.id))
        shared = tuple(sorted(rank for rank, names in stages.items() if len(names) > 1))
        if self.shared_ranks is None:
            object.__setattr__(self, "shared_ranks", shared)
        for rank in shared:
            if rank not in (self.shared_ranks or ()):
                raise PlanError(
                    f"rank {rank} is used by stages {', '.join(stages[rank])}; give each its own "
                    "rank, or add the rank to shared_ranks if they are to take turns on it"
                )

    def _check_processes(self) -> None:
        widths: dict[object, Stage] = {}
        degrees: dict[object, Stage] = {}
        checked: set[Degrees] = set()
        for stage in self.stages:
            if stage.sharding not in SHARDINGS:
                raise PlanError(
                    f"sharding of stage {stage.id} is {stage.sharding!r}; accepted: "
                    f"{', '.join(SHARDINGS)}"
                )
            if stage.degrees not in checked:
                for name, degree in stage.degrees._asdict().items():
                    check_number(f"{name} of stage {stage.id}", degree)
                checked.add(stage.degrees)
            self._check_sharding(stage)
            for firsts, owner in ((widths, f"rank {stage.rank}"), (degrees, stage.module)):
                key = stage.rank if firsts is widths else stage.module
                first = firsts.setdefault(key, stage)
                if stage.degrees == first.degrees:
                    continue
                for name, value, first_value in zip(
                    Degrees._fields, stage.degrees, first.degrees, strict=True
                ):
                    if value != first_value:
                        raise PlanError(
                            f"{name} of stage {stage.id} is {value} and of {first.id} "
                            f"{first_value}; all stages of {owner} must have the same"
                        )

    def _check_sharding(self, stage: Stage) -> None:
        first = self.replicas(stage.module)[0][0]
        choices = {"split": SPLITS, "sharding": SHARDINGS, "ep": sorted({1, stage.shards})}
        for name, accepted in choices.items():
            value, first_value = getattr(stage, name), getattr(first, name)
            if value not in accepted or value != first_value:
                raise PlanError(
                    f"{name} of stage {stage.id} is {value!r} and of {first.id} {first_value!r}; "
                    f"accepted: {', '.join(map(str, accepted))}; all stages of {stage.module} must "
                    "have the same"
                )
        if stage.sharding != "fsdp":
            if stage.fsdp > 1:
                raise PlanError(
                    f"fsdp of stage {stage.id} is {stage.fsdp} and its sharding "
                    f"{stage.sharding!r}; fsdp above 1 needs sharding 'fsdp'"
                )
            return
        if stage.tp > 1:
            raise PlanError(
                f"sharding of stage {stage.id} is 'fsdp' and its tp {stage.tp}; with tp above 1, "
                "sharding may be none or zero1"
            )
        if stage.replica:
            raise PlanError(
                f"sharding of stage {stage.id} is 'fsdp', which does not support replicas; "
                "set its degree fsdp, which splits samples, instead of adding replicas"
            )
        if stage.shards > 1 and find_schedule(self.schedule).splits_backward:
            raise PlanError(
                f"schedule is {self.schedule!r}, which computes weight gradients later, and "
                f"sharding of {stage.module!r} is 'fsdp', which frees the weights before that; "
                "use schedule 1f1b or gpipe, or sharding zero1"
            )

    def _check_replicas(self, node: ModuleNode) -> None:
        replicas = self.replicas(node.name)
        if not replicas:
            raise PlanError(f"module {node.name!r} has no stage; it needs at least one")
        numbers = [replica[0].replica for replica in replicas]
        if numbers != list(range(len(numbers))):
            raise PlanError(f"replicas of {node.name!r} are {numbers}; they must be 0.. in order")
        for stages in replicas:
            self._check_layers(node, stages)

    def _check_layers(self, node: ModuleNode, stages: tuple[Stage, ...]) -> None:
        expected = 0
        for index, stage in enumerate(stages):
            lo, hi = stage.layers
            if stage.index != index:
                raise PlanError(f"stages of {node.name!r} must be numbered 0.. in order")
            if lo != expected or hi <= lo:
                gap = "overlap" if lo < expected else "leave a gap"
                fault = "be empty" if lo == expected else gap
                raise PlanError(
                    f"stage {stage.id}: layers [{lo}, {hi}) would {fault}; "
                    f"it must start at {expected} and hold at least one layer"
                )
            expected = hi
            check_layer_options(stage, min(hi, node.num_blocks) - lo, self.schedule)
        if expected != node.num_layers:
            raise PlanError(
                f"stages of {node.name!r} cover layers [0, {expected}); "
                f"the module has {node.num_layers}"
            )

    def _check_factors(self) -> None:
        """Raise ``PlanError`` for a ``microbatch_factor`` that its module, its layout or the
        schedule does not support."""
        for node in self.graph.nodes:
            stages = self.module_stages(node.name)
            stage, factor = stages[0], stages[0].microbatch_factor
            check_number(f"microbatch_factor of {node.name!r}", factor)
            if any(other.microbatch_factor != factor for other in stages):
                raise PlanError(
                    f"microbatch_factor differs between stages of {node.name!r}; all stages of a "
                    "module must have the same"
                )
            if factor == 1:
                continue
            producers = self.graph.producers(node.name)
            count = len(self.replicas(node.name))
            for refused, reason, accepted in (
                (bool(producers), f"receives from {', '.join(producers)}",
                 "a module without inputs from other modules"),
                (node.loss, "computes a loss", "a module without loss"),
                (len(stages) > count, f"has {len(stages) // count} stages", "one stage (pp 1)"),
                (stage.split != "microbatches", f"splits {stage.split}", "split 'microbatches'"),
                (any(s.quota is not None for s in stages), "has a quota", "no quota"),
                (self.uses_slots, f"runs under schedule {self.schedule!r}",
                 "another schedule"),
                (any(s.recompute for s in stages), "is recomputed as a whole",
                 "recompute false, or recompute_layers"),
                (self.num_microbatches % (factor * count) > 0,
                 f"has {self.num_microbatches} microbatches in {count} replicas",
                 "a number of microbatches that factor * dp divides"),
            ):
                if refused:
                    raise PlanError(
                        f"microbatch_factor of {node.name!r} is {factor}, but the module {reason}; "
                        f"accepted: {accepted}, or microbatch_factor 1"
                    )

    @property
    def uses_slots(self) -> bool:
        """True if ranks run their stages in slots."""
        return find_schedule(self.schedule).uses_slots

    @property
    def posted_receives(self) -> int:
        """Number of receives that ranks post per edge; depends on the device of the profile."""
        return receives_ahead("unknown" if self.profile is None else self.profile.device)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """Cache of values derived from the plan, by key; initially empty."""
        return {}

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(stage.rank for stage in self.stages)

    def module_stages(self, module: str) -> tuple[Stage, ...]:
        return tuple(stage for replica in self.replicas(module) for stage in replica)

    def replicas(self, module: str) -> tuple[tuple[Stage, ...], ...]:
        """Return the stages of a module, per replica."""
        return self._replicas.get(module, ())

    @cached_property
    def _replicas(self) -> Mapping[str, tuple[tuple[Stage, ...], ...]]:
        replicas: dict[str, dict[int, list[Stage]]] = {}
        for stage in self.stages:
            replicas.setdefault(stage.module, {}).setdefault(stage.replica, []).append(stage)
        return {
            module: tuple(tuple(by_number[number]) for number in sorted(by_number))
            for module, by_number in replicas.items()
        }

    def runs(self, stage: Stage, microbatch: int) -> bool:
        """Return True if this stage processes the microbatch, provided that it has the stage's
        module."""
        if stage.split == SAMPLES:
            return True
        return microbatch % len(self.replicas(stage.module)) == stage.replica

    def processes(self, rank: int) -> int:
        return prod(self.degrees(rank))

    def degrees(self, rank: int) -> Degrees:
        return self._rank_degrees[rank]

    def rank_processes(self, rank: int) -> range:
        """Return the numbers of a rank's processes; processes are numbered rank by rank."""
        return range(*self._first_processes[rank : rank + 2])

    @cached_property
    def num_processes(self) -> int:
        """Number of processes of all ranks, one device each."""
        return self._first_processes[-1]

    @cached_property
    def _rank_degrees(self) -> Mapping[int, Degrees]:
        return {stage.rank: stage.degrees for stage in self.stages}

    @cached_property
    def _first_processes(self) -> tuple[int, ...]:
        return tuple(accumulate(map(self.processes, range(self.num_ranks)), initial=0))

    def sharers(self, stage: Stage) -> int:
        """Return the number of processes with the same parameters as one of the stage's, over
        replicas, tokens and samples."""
        return len(self.replicas(stage.module)) * stage.cp * stage.fsdp

    def replica_processes(self, stage: Stage) -> list[int]:
        """Return the processes of all replicas of a stage."""
        stages = (replica[stage.index] for replica in self.replicas(stage.module))
        return [process for stage in stages for process in self.rank_processes(stage.rank)]

    def rank_stages(self, rank: int) -> tuple[Stage, ...]:
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[Stage, ...], ...]:
        ranks: list[list[Stage]] = [[] for _ in range(self.num_ranks)]
        for stage in self.topological_stages:
            ranks[stage.rank].append(stage)
        return tuple(map(tuple, ranks))

    def quota_sets(self, rank: int) -> tuple[dict[str, float], ...]:
        """Return the quotas by module for every set of modules that run concurrently on a rank."""
        return quota_sets(self.rank_stages(rank), rank)

    @cached_property
    def by_id(self) -> Mapping[StageId, Stage]:
        return {stage.id: stage for stage in self.stages}

    @cached_property
    def topological_stages(self) -> tuple[Stage, ...]:
        return tuple(s for m in self.graph.topological for s in self.module_stages(m))

    @cached_property
    def stage_edges(self) -> tuple[Edge, ...]:
        """Directed data edges between stages, within modules and between modules."""
        return tuple(self.edge_ports)

    @cached_property
    def edge_ports(self) -> Mapping[Edge, EdgePorts]:
        """Ports that each edge carries."""
        return edge_ports(self.graph, self._replicas, self.profile, self.rank_processes)

    @cached_property
    def splits_samples(self) -> bool:
        """True if the replicas of any module split microbatches by samples."""
        return any(s.split == SAMPLES and s.replica for s in self.stages)

    @cached_property
    def stage_producers(self) -> Mapping[StageId, tuple[StageId, ...]]:
        """Stages that each stage receives from."""
        return self._joined((dst, src) for src, dst in self.stage_edges)

    @cached_property
    def stage_consumers(self) -> Mapping[StageId, tuple[StageId, ...]]:
        """Stages that each stage sends to."""
        return self._joined(self.stage_edges)

    def _joined(self, edges: Iterable[Edge]) -> Mapping[StageId, tuple[StageId, ...]]:
        ends: dict[StageId, list[StageId]] = {stage.id: [] for stage in self.stages}
        for first, second in edges:
            ends[first].append(second)
        return {stage: tuple(adjacent) for stage, adjacent in ends.items()}

    @cached_property
    def depth(self) -> Mapping[StageId, int]:
        """Number of stages on the longest path from each stage to the loss, including the stage
        itself."""
        depth: dict[StageId, int] = {}
        for stage in reversed(self.topological_stages):
            depths = map(depth.__getitem__, self.stage_consumers[stage.id])
            depth[stage.id] = 1 + max(depths, default=0)
        return depth

    @cached_property
    def warm_up(self) -> Mapping[StageId, int]:
        """Microbatches that each stage may have in flight in 1F1B: its depth, or more if a consumer
        has more replicas, so that all of them are busy."""
        in_flight: dict[StageId, int] = {}
        for stage in reversed(self.topological_stages):
            count = len(self.replicas(stage.module))
            downstream = [
                in_flight[dst] * max(1, len(self.replicas(self.by_id[dst].module)) // count)
                for dst in self.stage_consumers[stage.id]
            ]
            in_flight[stage.id] = 1 + max(downstream, default=0)
        return in_flight

    def trainable(self, stage: Stage) -> bool:
        lo, hi = stage.layers
        return any(self.graph.node(stage.module).trainable[lo:hi])

    def to_dict(self) -> dict[str, Any]:
        data = {"format": PLAN_FORMAT, **asdict(self)}
        data["profile"] = self.profile and self.profile.to_dict()
        for key in ("passes", "step_schedules"):
            if not data[key]:  # earlier versions do not know the key
                del data[key]
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of a dict made by :meth:`to_dict`; raise ``PlanError`` for a missing or
        unknown key, a value of the wrong type, or a plan that cannot run."""
        try:
            if data["format"] != PLAN_FORMAT:
                raise PlanError(f"format is {data['format']!r}; accepted: {PLAN_FORMAT}")
            _check_keys(data, "plan", ("format", *(field.name for field in fields(cls))))
            profile = data.get("profile")
            try:
                profile = None if profile is None else CostProfile.from_dict(profile)
            except PlanError as error:
                raise PlanError(f"profile: {error}") from None
            limits, policy = data.get("activation_limits"), data.get("policy")
            return cls(
                graph=_read_graph(data["graph"]),
                stages=tuple(_read_stage(stage) for stage in data["stages"]),
                num_microbatches=_typed(data, "num_microbatches", int),
                schedule=_typed(data, "schedule", str),
                profile=profile,
                memory_limit=_typed(data, "memory_limit", int)
                if data.get("memory_limit") is not None else None,
                activation_limits=None if limits is None else _integers(data, "activation_limits"),
                policy=None if policy is None else _read_policy(policy),
                shared_ranks=_integers({"shared_ranks": [], **data}, "shared_ranks"),
                passes=_names(data, "passes"), step_schedules=_names(data, "step_schedules"),
            )
        except KeyError as error:
            raise PlanError(f"plan lacks the key {error}") from None
        except (TypeError, IndexError, AttributeError) as error:
            raise PlanError(f"plan has a value of the wrong kind: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json_value(text, "plan")
        if not isinstance(data, dict):
            raise PlanError(f"plan is {data!r:.80}; it must be an object")
        return cls.from_dict(data)


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_typed({key: name}, key, str) for name in data.get(key, ()))


def check_layer_options(stage: Stage, blocks: int, schedule: str) -> None:
    """Raise ``PlanError`` if the layer options of a stage with ``blocks`` blocks (without projector
    and head) are invalid or do not work with the schedule."""
    options = stage.layer_options
    if not options:
        return
    if len(options) != max(blocks, 0) or not set(options) <= set(OPTIONS):
        raise PlanError(
            f"layer_options of stage {stage.id} are {list(options)}; each of its "
            f"{max(blocks, 0)} blocks needs one of {', '.join(OPTIONS)}"
        )
    if set(options) == {OPTIONS[0]}:
        return
    if stage.recompute:
        raise PlanError(
            f"stage {stage.id} has layer_options and recompute, which recomputes the whole stage; "
            "set only one of them"
        )
    if find_schedule(schedule).splits_backward:
        raise PlanError(
            f"stage {stage.id} has layer_options, but schedule is {schedule!r}, whose two "
            "backward passes would each recompute; use '1f1b' or 'gpipe', or set recompute"
        )


def _read_graph(data: Mapping[str, Any]) -> ModuleGraph:
    """Return the module graph of a parsed plan file."""
    _check_keys(data, "graph", ("nodes", "edges", "every", "ports"))
    nodes = tuple(_read_node(node) for node in data["nodes"])
    edges, every = (tuple(map(tuple, pairs)) for pairs in (data["edges"], data.get("every", ())))
    for edge in (*edges, *every):
        if [type(end) for end in edge] != [str, str]:
            raise PlanError(f"edge is {list(edge)}; it must be [producer, consumer]")
    ports = tuple(_read_port(port) for port in data.get("ports", ()))
    try:
        return ModuleGraph(nodes, edges, every, ports)
    except ValueError as error:
        raise PlanError(f"graph: {error}") from None


def _read_port(data: Any) -> Port:
    """Return the port of a parsed list [consumer, name, layers, producers, output]."""
    consumer, name, layers, producers, output = data
    port = Port(consumer, name, tuple(layers), tuple(producers), output)
    texts = (consumer, name, *port.producers, *([] if output is None else [output]))
    if any(type(text) is not str for text in texts) or any(type(n) is not int for n in port.layers):
        raise PlanError(
            f"port is {list(data)}; it must be [consumer, name, layers, producers, output or null]"
        )
    return port


def _read_node(data: Mapping[str, Any]) -> ModuleNode:
    """Return the graph node of a parsed object."""
    _check_keys(data, "node", ("name", "trainable", "projector", "loss"))
    flags = tuple(data["trainable"])
    if any(type(flag) is not bool for flag in flags):
        raise PlanError(f"trainable is {list(flags)}; it must be a list of true and false")
    return ModuleNode(
        _typed(data, "name", str), flags, _typed(data, "projector", bool),
        _typed({"loss": False, **data}, "loss", bool),
    )


def _read_stage(data: Mapping[str, Any]) -> Stage:
    """Return the stage of a parsed object; fields of later versions have defaults."""
    _check_keys(data, "stage", tuple(field.name for field in fields(Stage)))
    layers = tuple(data["layers"])
    if [type(layer) for layer in layers] != [int, int]:
        raise PlanError(f"layers is {list(layers)}; it must be [first, one past the last]")
    return Stage(
        _typed(data, "module", str), _typed(data, "index", int), layers, _typed(data, "rank", int),
        _typed({"replica": 0, **data}, "replica", int),
        _typed({"recompute": False, **data}, "recompute", bool),
        _typed({"cp": 1, **data}, "cp", int),
        _typed({"tp": 1, **data}, "tp", int),
        _typed({"sharding": "none", **data}, "sharding", str),
        _typed({"fsdp": 1, **data}, "fsdp", int),
        tuple(data.get("layer_options", ())),
        data.get("quota"),  # the plan checks it
        _typed({"split": "microbatches", **data}, "split", str),
        data.get("slot"),  # the plan checks it
        _typed({"ep": 1, **data}, "ep", int),
        _typed({"microbatch_factor": 1, **data}, "microbatch_factor", int),
    )


def _read_policy(data: Mapping[str, Any]) -> Policy:
    """Return the schedule policy of a parsed object."""
    _check_keys(data, "policy", tuple(field.name for field in fields(Policy)))
    try:
        ahead = tuple(tuple(module) for module in data.get("ahead", ()))
        return Policy(**{**data, "priority": tuple(data["priority"]), "ahead": ahead})
    except ValueError as error:
        raise PlanError(f"policy: {error}") from None


def _check_keys(data: Mapping[str, Any], where: str, accepted: tuple[str, ...]) -> None:
    """Raise ``PlanError`` if ``data`` has keys that are not in ``accepted``. ``where`` names the
    value in the error."""
    if unknown := set(data) - set(accepted):
        raise PlanError(
            f"{where}: unknown keys {sorted(map(str, unknown))}; accepted: {sorted(accepted)}"
        )


def _integers(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    if any(type(value) is not int for value in data[key]):
        raise PlanError(f"{key} is {data[key]!r}; it must be a list of whole numbers")
    return tuple(data[key])


def _typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return the value of ``key`` if its type is exactly ``kind``; else raise ``PlanError``."""
    value = data[key]
    if type(value) is not kind:  # not isinstance: bool is a subclass of int, but True is not a rank
        raise PlanError(f"{key} is {value!r}; it must be of type {kind.__name__}")
    return value
