"""Layout of each module, and the Plan that follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import Any

from raymm.errors import PlanError
from raymm.model.model import Model
from raymm.model.module_dag import ModuleDag
from raymm.model.vlm import PretrainedVlm
from raymm.plural import plural
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.costs.recomputation import OPTIONS
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.rank_quotas import check_quota
from raymm.scheduler.plan.stage import SHARDINGS
from raymm.scheduler.schedules.registry import (
    DEFAULT_SCHEDULE,
    ScheduleChoice,
    pipeline_schedule,
)
from raymm.scheduler.search.module_degrees import make_plan
from raymm.scheduler.search.partition import Ranges, even_layers


@dataclass(frozen=True)
class ParallelSpec:
    """Layout of one module.

    Attributes:
        pp: number of ranks in its pipeline.
        dp: replicas of the module. Microbatches are distributed over them and gradients are summed.
            Modules may have different degrees.
        cp: context parallel degree. Every rank consists of that many processes, over which the
            tokens of each sample (for an encoder: of each item) are split so that work and token
            count balance.
        tp: tensor parallel degree. Every rank consists of that many processes, over which the
            parameters of each layer are split. With both, a rank has ``cp * tp`` processes.
        sharding: ``"none"``: each process keeps all parameters, gradients and optimizer state.
            ``"zero1"``: the optimizer state of a parameter is kept by one of the processes that
            hold it (``dp`` and ``cp``), which updates it for all. ``"fsdp"``: in addition,
            parameters, gradients and optimizer state of blocks are sharded over these processes
            (torch's FSDP2). The samples of each microbatch are then split over ``dp`` processes, so
            there are no replicas. Not with ``tp`` or schedule ``"zero_bubble"``.
        ep: expert parallel degree of a mixture of experts with sharding ``"fsdp"``: 1, or
            ``dp * cp``, the number of processes that share the blocks' parameters. The experts of
            each layer are then sharded over them and not gathered: tokens are sent to them.
        chunks: stages per rank. The module is cut into ``pp * chunks`` stages, and stage i runs on
            the pipeline's rank ``i % pp`` (Megatron's interleaved schedule).
        recompute_layers: activation handling of all blocks, or of each, one of
            :data:`raymm.scheduler.costs.recomputation.OPTIONS`. ``"keep"`` keeps all activations;
            ``"matmuls"`` keeps the outputs of products and attention and recomputes the rest in the
            backward; ``"attention"`` keeps only the outputs of attention; ``"all"`` recomputes
            everything. Results do not change.
        max_dp: maximum of an elastic degree that starts at ``dp`` and divides the microbatches. A
            trainer uses the largest degree that the cluster has room for, and changes it at a
            checkpoint when nodes come or go. None for a fixed ``dp``.
        replicas: former name of ``dp``.
        layers: layers per stage; None to split evenly. The projector is an encoder's last layer, so
            ``layers=(12, 1)`` gives it a separate stage.
        ranks: ranks of the pipeline, replica after replica; None for separate ranks. Modules that
            name the same rank share it.
        quota: share of the multiprocessors for the module's stages where they share a rank with
            stages of another module with a quota, with which they run concurrently. Quotas of such
            modules must not exceed 1 in total. None for taking turns on the whole device.
        microbatch_factor: number of microbatches that share one forward and one backward of the
            module, an encoder of one stage. Divides the step's microbatches of each replica.

    Raises:
        PlanError: a field is invalid. Names the field and accepted values; errors of
            :class:`MultimodalParallelSpec` and of configurations also name the module.
    """

    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    max_dp: int | None = None
    chunks: int = 1
    sharding: str = "none"
    recompute_layers: str | tuple[str, ...] = "keep"
    replicas: int | None = None
    layers: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    quota: float | None = None
    microbatch_factor: int = 1

    def __post_init__(self) -> None:
        check_quota("quota", self.quota)
        if self.replicas is not None:
            warnings.warn("replicas is now called dp", FutureWarning, stacklevel=3)
            if self.dp not in (1, self.replicas):
                raise PlanError(f"dp is {self.dp} and replicas, its former name, {self.replicas}")
            object.__setattr__(self, "dp", self.replicas)
            object.__setattr__(self, "replicas", None)
        if self.sharding not in SHARDINGS:
            raise PlanError(f"sharding is {self.sharding!r}; accepted: {', '.join(SHARDINGS)}")
        if self.pp == 0:
            raise PlanError("pp is 0; a module needs at least one stage")
        for name in ("pp", "chunks", "dp", "cp", "tp", "ep", "microbatch_factor"):
            check_number(name, getattr(self, name))
        if self.max_dp is not None:
            self._check_range(self.max_dp)
        shards = self.dp * self.cp if self.sharding == "fsdp" else 1
        if self.ep not in (1, shards):
            raise PlanError(
                f"ep is {self.ep}, with dp {self.dp}, cp {self.cp} and sharding {self.sharding!r}; "
                "accepted: 1, or dp * cp with sharding 'fsdp'"
            )
        if self.sharding == "fsdp" and self.tp > 1:
            raise PlanError(
                f"sharding is 'fsdp' and tp {self.tp}; with tp above 1, sharding may be none or "
                "zero1"
            )
        for name, expected, unit in (
            ("layers", self.stages, "stage"), ("ranks", self.pp * self.module_replicas, "rank"),
        ):
            value = getattr(self, name)
            for number in value or ():
                check_number(name, number, 1 if name == "layers" else 0)
            if value is not None and len(value) != expected:
                factors = f"pp={self.pp}"
                factor = ("dp", self.module_replicas)
                if name == "layers":
                    factor = ("chunks", self.chunks)
                if factor[1] > 1:
                    factors += f", {factor[0]}={factor[1]}"
                raise PlanError(
                    f"{name} is {tuple(value)}; it needs one entry per {unit} ({factors})"
                )

    def _check_range(self, most: int) -> None:
        check_number("max_dp", most, self.dp)
        if self.ep > 1:
            raise PlanError(
                f"ep is {self.ep}, and dp from {self.dp} to {most}: experts are sharded over a "
                "fixed number of processes; accepted: a single dp, or ep 1"
            )
        if self.ranks is not None:
            raise PlanError(
                f"ranks is {self.ranks}, and dp from {self.dp} to {most}: the number of ranks is "
                "not fixed; leave ranks out to give every replica its own ranks"
            )

    @property
    def of_stages(self) -> dict[str, Any]:
        """Fields of every stage of the module."""
        fsdp = self.dp if self.sharding == "fsdp" else 1
        return {
            "cp": self.cp, "tp": self.tp, "sharding": self.sharding, "fsdp": fsdp, "ep": self.ep,
            "microbatch_factor": self.microbatch_factor,
        }

    @property
    def module_replicas(self) -> int:
        """Replicas of the module, each with a rank per pipeline position."""
        return 1 if self.sharding == "fsdp" else self.dp

    @property
    def stages(self) -> int:
        """Number of stages of one replica."""
        return self.pp * self.chunks


@dataclass(frozen=True)
class MultimodalParallelSpec:
    """Layout of a model (Cornstarch v1, Listing 1).

    Attributes:
        encoder_specs: by encoder name; one stage each by default.
        schedule: ``"1f1b"``, ``"zero_bubble"``, ``"gpipe"`` or a custom :class:`raymm.Schedule`.
        recompute: True to keep only the inputs of stages and repeat their forward for the backward.
            The loss's stage, which needs its activations immediately, and stages that begin with
            layers without backward keep their activations.
    """

    encoder_specs: Mapping[str, ParallelSpec] = field(default_factory=dict)
    language_model_spec: ParallelSpec = field(default_factory=ParallelSpec)
    num_microbatches: int = 1
    schedule: ScheduleChoice = DEFAULT_SCHEDULE
    recompute: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", pipeline_schedule(self.schedule))
        check_number("num_microbatches", self.num_microbatches)

    @property
    def elastic(self) -> bool:
        """True if a module has a range of replicas."""
        return any(spec.max_dp for spec in (*self.encoder_specs.values(), self.language_model_spec))

    def sizes(self) -> Iterator[MultimodalParallelSpec]:
        """Yield the spec with each combination of replicas in their ranges, without ranges."""
        specs = (*self.encoder_specs.values(), self.language_model_spec)
        for degrees in product(*map(self._degrees, specs)):
            *encoders, language_model = (
                replace(spec, dp=dp, max_dp=None) for spec, dp in zip(specs, degrees, strict=True)
            )
            chosen = dict(zip(self.encoder_specs, encoders, strict=True))
            yield replace(self, encoder_specs=chosen, language_model_spec=language_model)

    def _degrees(self, spec: ParallelSpec) -> list[int]:
        return [
            dp for dp in range(spec.dp, (spec.max_dp or spec.dp) + 1)
            if self.num_microbatches
            % (spec.microbatch_factor * replace(spec, dp=dp, max_dp=None).module_replicas) == 0
        ]

    def plan(self, model: Model) -> Plan:
        """Return the plan for a model, with the fewest replicas where they have a range.

        Raises:
            PlanError: the specs do not fit the model.
        """
        if unknown := set(self.encoder_specs) - set(model.encoder_names):
            raise PlanError(
                f"encoder_specs name {sorted(unknown)}; the model's encoders are "
                f"{', '.join(model.encoder_names) or 'none'}"
            )
        specs = {n: self.encoder_specs.get(n, ParallelSpec()) for n in model.encoder_names}
        specs[model.text_module] = self.language_model_spec
        _check_shares(specs, self.num_microbatches)
        return plan_of(model.graph, specs, self.num_microbatches, self.schedule, self.recompute)

    def apply(self, model: Model, **options: Any) -> ParallelModel:
        """Start the model on the connected Ray cluster. Return a
        :class:`raymm.runtime.parallel_model.ParallelModel`, which takes the options."""
        return ParallelModel(model, self.plan(model), **options)


def dag_plan(
    dag: ModuleDag, specs: Mapping[str, ParallelSpec] | None = None, num_microbatches: int = 1,
    schedule: ScheduleChoice = DEFAULT_SCHEDULE, recompute: bool = False,
) -> Plan:
    """Return a plan for a graph of modules.

    Args:
        specs: layouts by module; by default one separate rank per module.

    Raises:
        PlanError: the specs do not fit the graph.
    """
    layouts = dict(specs or {})
    if unknown := sorted(layouts.keys() - dag.nodes.keys()):
        raise PlanError(f"specs name {unknown}; the graph's modules are {', '.join(dag.nodes)}")
    every = {name: layouts.get(name, ParallelSpec()) for name in dag.nodes}
    cut = [name for name, spec in every.items() if spec.stages > 1]
    check_number("num_microbatches", num_microbatches)
    _check_shares(every, num_microbatches)
    plan = plan_of(dag.graph, every, num_microbatches, schedule, recompute)
    return replace(plan, graph=dag.graph_with_ports(cut)) if cut else plan


def vlm_plan(
    model: PretrainedVlm, specs: Mapping[str, ParallelSpec] | None = None,
    num_microbatches: int = 1, schedule: ScheduleChoice = DEFAULT_SCHEDULE, recompute: bool = False,
) -> Plan:  # fmt: skip
    """Return a plan for a Hugging Face VLM.

    Args:
        specs: layouts by tower, and of the language model as ``"llm"``; by default one separate
            rank each.

    Raises:
        PlanError: the specs do not fit the model.
    """
    layouts = dict(specs or {})
    if unknown := sorted(layouts.keys() - set(model.module_names)):
        names = ", ".join(model.module_names)
        raise PlanError(f"specs name {unknown}; the model's modules are {names}")
    every = {name: layouts.get(name, ParallelSpec()) for name in model.module_names}
    return plan_of(model.graph, every, num_microbatches, schedule, recompute)


def _check_shares(specs: Mapping[str, ParallelSpec], num_microbatches: int) -> None:
    for name, spec in specs.items():
        if num_microbatches % spec.module_replicas:
            raise PlanError(
                f"dp of {name!r} is {spec.dp}, which does not divide the step's "
                f"num_microbatches={num_microbatches} into equal shares"
            )


def plan_of(
    graph: ModuleGraph, specs: Mapping[str, ParallelSpec], num_microbatches: int,
    schedule: ScheduleChoice, recompute: bool,
) -> Plan:
    """Return the plan of modules with given layouts.

    Raises:
        PlanError: the specs do not fit the graph.
    """
    cut = make_plan(
        graph, {node.name: split_layers(node, specs[node.name]) for node in graph.nodes},
        num_microbatches, schedule, recompute=recompute,
    )
    used_ranks = {rank for spec in specs.values() for rank in spec.ranks or ()}
    free = iter(rank for rank in range(10**6) if rank not in used_ranks)
    stages: list[Stage] = []
    for name, spec in specs.items():
        options = _layer_options(graph.node(name), spec)
        stages += (
            replace(stage, layer_options=options[slice(*stage.layers)])
            for stage in _placed(cut.module_stages(name), spec, free)
        )
    return replace(cut, stages=_with_quotas(stages, specs), shared_ranks=None)


def _placed(
    stages: tuple[Stage, ...], spec: ParallelSpec, free: Iterator[int]
) -> Iterator[Stage]:
    ranks = spec.ranks or [next(free) for _ in range(spec.pp * spec.module_replicas)]
    for copy in range(spec.module_replicas):
        for stage in stages:
            rank = ranks[copy * spec.pp + stage.index % spec.pp]
            yield replace(stage, rank=rank, replica=copy, **spec.of_stages)


def _with_quotas(
    stages: Sequence[Stage], specs: Mapping[str, ParallelSpec]
) -> tuple[Stage, ...]:
    """Set the quota of each stage whose rank is shared by modules with quotas."""
    on_rank: dict[int, set[str]] = {}
    for stage in stages:
        if specs[stage.module].quota is not None:
            on_rank.setdefault(stage.rank, set()).add(stage.module)
    with_quotas = tuple(
        replace(stage, quota=specs[stage.module].quota)
        if len(on_rank.get(stage.rank, ())) > 1 else stage
        for stage in stages
    )
    for name, spec in specs.items():
        module_stages = [stage for stage in with_quotas if stage.module == name]
        if spec.quota is not None and all(stage.quota is None for stage in module_stages):
            ranks = sorted({stage.rank for stage in module_stages})
            raise PlanError(
                f"quota of {name!r} is {spec.quota}, but no other module with a quota is on its "
                f"ranks {ranks}; accepted: quotas of modules that name the same ranks"
            )
    return with_quotas


def _layer_options(node: ModuleNode, spec: ParallelSpec) -> tuple[str, ...]:
    """Return the recomputation option of each block; empty if all blocks keep their activations."""
    recompute = spec.recompute_layers
    options = (recompute,) * node.num_blocks if isinstance(recompute, str) else tuple(recompute)
    if len(options) != node.num_blocks or not set(options) <= set(OPTIONS):
        raise PlanError(
            f"recompute_layers of {node.name!r} is {recompute!r}; accepted: one of "
            f"{', '.join(OPTIONS)}, or a list of one for each of its "
            f"{plural(node.num_blocks, 'block')}"
        )
    return () if set(options) == {"keep"} else options


def split_layers(node: ModuleNode, spec: ParallelSpec) -> Ranges:
    """Return the layer ranges of a module's stages. Without ``layers``, blocks are split evenly and
    the projector is in the last stage.

    Raises:
        PlanError: there are fewer blocks than stages, or ``layers`` does not add up.
    """
    if spec.layers is not None:
        if any(count < 1 for count in spec.layers) or sum(spec.layers) != node.num_layers:
            raise PlanError(
                f"layers of {node.name!r} is {tuple(spec.layers)}; it must add up to the module's "
                f"{plural(node.num_layers, 'layer')}, each at least 1"
            )
        return tuple(pairwise(accumulate(spec.layers, initial=0)))
    if spec.stages > node.num_blocks:
        option = "pp" if spec.chunks == 1 else "pp * chunks"
        raise PlanError(
            f"{option} of {node.name!r} is {spec.stages}, but it can be cut into at most "
            f"{plural(node.num_blocks, 'stage')}"
        )
    *first, (last, _) = even_layers(node.num_blocks, spec.stages)
    return (*first, (last, node.num_layers))
