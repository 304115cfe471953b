"""How each module is laid out, and the Plan that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymm.model import LANGUAGE_MODEL, MultimodalModule, module_graph
from raymm.scheduler.graph import ModuleNode
from raymm.scheduler.plan import Plan, PlanError, Stage


@dataclass(frozen=True)
class ParallelSpec:
    """Layout of one module.

    Attributes:
        pp: number of pipeline stages.
        tp, cp, dp: tensor, context and data parallel degree; only 1 is supported yet.
        layers: layers per stage, if they are not to be split evenly. The projector is an
            encoder's last layer, so ``layers=(12, 1)`` gives it a stage of its own.
        ranks: the rank of each stage. By default every stage gets a rank of its own;
            stages that name the same rank share it.

    Raises:
        PlanError: naming the field and what is accepted.
    """

    pp: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    layers: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp"):
            if getattr(self, name) != 1:
                raise PlanError(f"{name} is {getattr(self, name)}; only 1 is supported yet")
        if self.pp < 1:
            raise PlanError(f"pp is {self.pp}; a module needs at least one stage")
        for name in ("layers", "ranks"):
            value = getattr(self, name)
            if value is not None and len(value) != self.pp:
                raise PlanError(
                    f"{name} is {tuple(value)}; it needs one entry per stage (pp={self.pp})"
                )


@dataclass(frozen=True)
class MultimodalParallelSpec:
    """Layout of a whole model (Cornstarch v1, Listing 1).

    Attributes:
        encoder_specs: by encoder name; one stage each where not given.
        language_model_spec: the language model's.
        num_microbatches: microbatches per step.
    """

    encoder_specs: Mapping[str, ParallelSpec] = field(default_factory=dict)
    language_model_spec: ParallelSpec = field(default_factory=ParallelSpec)
    num_microbatches: int = 1

    def plan(self, model: MultimodalModule) -> Plan:
        """The plan for a model.

        Raises:
            PlanError: if the specs do not fit the model.
        """
        graph = module_graph(model)
        if unknown := set(self.encoder_specs) - set(model.encoder_names):
            raise PlanError(
                f"encoder_specs name {sorted(unknown)}; the model's encoders are "
                f"{', '.join(model.encoder_names) or 'none'}"
            )
        specs = {n: self.encoder_specs.get(n, ParallelSpec()) for n in model.encoder_names}
        specs[LANGUAGE_MODEL] = self.language_model_spec
        taken = {rank for spec in specs.values() for rank in spec.ranks or ()}
        free = iter(rank for rank in range(10**6) if rank not in taken)
        stages = []
        for node in graph.nodes:
            spec = specs[node.name]
            bounds = split_layers(node, spec)
            ranks = spec.ranks or [next(free) for _ in range(spec.pp)]
            for index, (layers, rank) in enumerate(zip(bounds, ranks, strict=True)):
                stages.append(Stage(node.name, index, layers, rank))
        return Plan(graph, tuple(stages), self.num_microbatches)

    def apply(self, model: MultimodalModule, **options):
        """Start the model on the connected Ray cluster; returns a
        :class:`raymm.parallel.MultimodalParallelModule`. Options are its keyword arguments."""
        from raymm.parallel import MultimodalParallelModule

        return MultimodalParallelModule(model, self.plan(model), **options)


def split_layers(node: ModuleNode, spec: ParallelSpec) -> list[tuple[int, int]]:
    """Layer ranges of a module's stages; blocks are split evenly where ``layers`` is not
    given, and the projector goes with the last blocks.

    Raises:
        PlanError: if there are fewer blocks than stages, or ``layers`` does not add up.
    """
    if spec.layers is not None:
        if any(count < 1 for count in spec.layers) or sum(spec.layers) != node.num_layers:
            raise PlanError(
                f"layers of {node.name!r} is {tuple(spec.layers)}; it must add up to the module's "
                f"{node.num_layers} layers, each at least 1"
            )
        counts = list(spec.layers)
    else:
        if spec.pp > node.num_blocks:
            raise PlanError(
                f"pp of {node.name!r} is {spec.pp}, but it can be cut into at most "
                f"{node.num_blocks} stages"
            )
        base, extra = divmod(node.num_blocks, spec.pp)
        counts = [base + (index < extra) for index in range(spec.pp)]
        counts[-1] += node.num_layers - node.num_blocks
    bounds, start = [], 0
    for count in counts:
        bounds.append((start, start + count))
        start += count
    return bounds
