"""The part of the stage graph that each microbatch of a step uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.port_routes import EdgePorts
from raymm.scheduler.plan.stage import Stage, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.program.stage_samples import Samples, carried_samples, stage_samples


@dataclass(frozen=True)
class ActiveStages:
    """What one microbatch runs.

    Attributes:
        stages: the stages it passes through.
        needs_backward: those that have something trainable in them or before them.
        needs_input_grad: those that owe a gradient to a stage before them.
        samples: of the microbatch, if replicas of a module share them.
    """

    stages: frozenset[StageId]
    needs_backward: frozenset[StageId]
    needs_input_grad: frozenset[StageId]
    samples: Samples = Samples(0)

    def carries(self, ports: EdgePorts) -> bool:
        """Whether an edge has a message: one for ports alone has none without what they are of."""
        return not ports.alone or any(stage.module in ports.producers for stage in self.stages)


def active_stages(
    plan: Plan, present: Sequence[Collection[str]], forward_only: bool = False,
    samples: Sequence[Samples] = (), featured: Sequence[Collection[str]] = (),
) -> list[ActiveStages]:
    """Per microbatch, what it uses.

    A stage with nothing trainable in it or before it has no backward and no gradient edge
    (Cornstarch v1 §4.2); whether something trainable lies before a stage is asked per
    microbatch, because a text-only microbatch has no projector before its language model.

    Args:
        plan: the plan.
        present: per microbatch, the modules it has input for besides those that compute a loss
            (which always run). Whatever takes their outputs runs as well.
        forward_only: for evaluation: no stage has a backward.
        samples: of each microbatch, if replicas of a module share them.
        featured: per microbatch, modules of which it has features instead of inputs, which their
            first stages would make: these do not run.

    Raises:
        ValueError: if ``present`` names a module that the plan does not have, or microbatches have
            to be split and their samples are not said.
    """
    if not plan.splits_samples:
        samples = (Samples(0),) * len(present)
    if len(samples) != len(present):
        raise ValueError(f"samples are {list(samples)}; there are {len(present)} microbatches")
    cache: dict[tuple[frozenset[str], frozenset[str], Samples, tuple[int, ...]], ActiveStages] = {}
    counts = [len(plan.replicas(node.name)) for node in plan.graph.nodes]
    result = []
    for microbatch, modules in enumerate(present):
        own = samples[microbatch]
        own_features = frozenset(featured[microbatch]) if featured else frozenset()
        key = (frozenset(modules), own_features, own, tuple(microbatch % count for count in counts))
        if key not in cache:
            cache[key] = _active(plan, key[0], microbatch, own, forward_only, own_features)
        result.append(cache[key])
    return result


def full_step(plan: Plan) -> list[list[str]]:
    """Per microbatch, the modules of a step in which every microbatch has every modality."""
    return [[node.name for node in plan.graph.nodes]] * plan.num_microbatches


def full_samples(plan: Plan) -> tuple[Samples, ...]:
    """Of each microbatch of such a step as many samples as all replicas that share them divide;
    none if no replicas do."""
    if not plan.splits_samples:
        return ()
    counts = (len(plan.replicas(s.module)) for s in plan.stages if s.split == SAMPLES)
    return (Samples(lcm(*counts)),) * plan.num_microbatches


def _active(
    plan: Plan, modules: frozenset[str], microbatch: int, samples: Samples,
    forward_only: bool, featured: frozenset[str],
) -> ActiveStages:  # fmt: skip
    names = {node.name for node in plan.graph.nodes}
    if unknown := modules - names:
        raise ValueError(
            f"a microbatch has input for {sorted(unknown)}; modules are {sorted(names)}"
        )
    running = set(modules)
    for module in plan.graph.topological:
        if module in plan.graph.losses or running.intersection(plan.graph.producers(module)):
            running.add(module)
    stages = [
        stage for module in plan.graph.topological if module in running
        for replica in _replicas(plan, module, microbatch, samples) for stage in replica
        if module not in featured or stage.layers[0] > 0
    ]
    split = plan.splits_samples
    needs: set[StageId] = set()
    owes: set[StageId] = set()
    for stage in stages:
        if forward_only:
            continue
        if any(
            src in needs and (not split or carried_samples(plan, src, [stage.id], samples))
            for src in plan.stage_producers[stage.id]
        ):
            owes.add(stage.id)
        if plan.trainable(stage) or stage.id in owes:
            needs.add(stage.id)
    run = {stage.id for stage in stages}
    return ActiveStages(frozenset(run), frozenset(needs), frozenset(owes), samples)


def _replicas(
    plan: Plan, module: str, microbatch: int, samples: Samples
) -> Sequence[tuple[Stage, ...]]:
    """Those that a microbatch goes through."""
    replicas = plan.replicas(module)
    if len(replicas) == 1 or replicas[0][0].split != SAMPLES:
        return (replicas[microbatch % len(replicas)],)
    return [replica for replica in replicas if stage_samples(plan, replica[0], samples)]
