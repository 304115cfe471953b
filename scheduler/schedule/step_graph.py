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
    """Stages that one microbatch uses.

    Attributes:
        needs_backward: stages that are trainable or have a trainable stage before them.
        needs_input_grad: stages that send a gradient to an earlier stage.
        samples: samples of the microbatch, if replicas split them.
    """

    stages: frozenset[StageId]
    needs_backward: frozenset[StageId]
    needs_input_grad: frozenset[StageId]
    samples: Samples = Samples(0)

    def carries(self, ports: EdgePorts) -> bool:
        """Return True if an edge has a message: a message with ports alone needs one of their
        producers."""
        return not ports.alone or any(stage.module in ports.producers for stage in self.stages)


def active_stages(
    plan: Plan, present: Sequence[Collection[str]], forward_only: bool = False,
    samples: Sequence[Samples] = (), featured: Sequence[Collection[str]] = (),
) -> list[ActiveStages]:
    """Return the stages that each microbatch uses.

    A stage without trainable layers in it or before it has no backward and no gradient edge
    (Cornstarch v1 §4.2). This is decided per microbatch, because a text-only microbatch has no
    projector before its language model.

    Args:
        present: per microbatch, names of the modules that it has input for. Their consumers and
            modules that compute a loss always run.
        forward_only: True for evaluation: no stage has a backward.
        samples: samples of each microbatch, if replicas split them.
        featured: per microbatch, modules whose cached features replace their inputs; their first
            stages do not run.

    Raises:
        ValueError: ``present`` names an unknown module, or ``samples`` is missing although replicas
            split microbatches.
    """
    if not plan.splits_samples:
        samples = (Samples(0),) * len(present)
    if len(samples) != len(present):
        raise ValueError(f"samples are {list(samples)}; there are {len(present)} microbatches")
    cache: dict[tuple[frozenset[str], frozenset[str], Samples, tuple[int, ...]], ActiveStages] = {}
    counts = [len(plan.replicas(node.name)) for node in plan.graph.nodes]
    result = []
    for microbatch, modules in enumerate(present):
        microbatch_samples = samples[microbatch]
        features = frozenset(featured[microbatch]) if featured else frozenset()
        key = (
            frozenset(modules), features, microbatch_samples,
            tuple(microbatch % count for count in counts),
        )
        if key not in cache:
            cache[key] = _active(
                plan, key[0], microbatch, microbatch_samples, forward_only, features
            )
        result.append(cache[key])
    return result


def full_step(plan: Plan) -> list[list[str]]:
    """Return the modules of each microbatch of a step with every modality in every microbatch."""
    return [[node.name for node in plan.graph.nodes]] * plan.num_microbatches


def full_samples(plan: Plan) -> tuple[Samples, ...]:
    """Return equal samples for each microbatch of such a step, as few as are divisible by all
    replica counts; empty if no replicas split samples."""
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
    replicas = plan.replicas(module)
    if len(replicas) == 1 or replicas[0][0].split != SAMPLES:
        return (replicas[microbatch % len(replicas)],)
    return [replica for replica in replicas if stage_samples(plan, replica[0], samples)]
