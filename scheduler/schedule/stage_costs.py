"""Costs of a plan's stages: seconds per op and bytes, summed over layers.

Costs of a rank of several processes are those of each process, including waits for the others
(:mod:`raymm.scheduler.schedule.process_costs`). If replicas split every microbatch by samples, they
are those of a replica's share, whose speedup is given by surfaces
(:class:`raymm.scheduler.costs.sharing.DeviceSharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raymm.scheduler.costs.device_memory import (
    compute_copy_share,
    message_bytes,
    update_bytes,
)
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import (
    CostProfile,
    LayerCost,
    trainable_before,
    working_bytes,
)
from raymm.scheduler.costs.recomputation import KEEP, REMADE, LayerOption, working_excess
from raymm.scheduler.costs.sharing import DeviceSharing
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.port_routes import message_bytes as sent_bytes
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.plan.stage_edges import SAMPLES
from raymm.scheduler.program.program import Instruction, Op
from raymm.scheduler.schedule.process_costs import (
    all_reduce_seconds,
    exchange_seconds,
    exposed_seconds,
    gather_seconds,
    layer_of_samples,
    process_layers,
    stage_layers,
)

_FP32_BYTES = 4


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage for one microbatch, per process of its rank.

    Attributes:
        forward: seconds of F (and of a recomputation).
        backward_input: seconds of B_d, over layers with a trainable layer before them.
        backward_weight: seconds of B_w, over trainable layers, and a microbatch's share of the part
            of the gradient sum that follows the last backward.
        input_bytes: received inputs, which a checkpointed forward keeps.
        activation_bytes: memory that autograd keeps of the layers with a backward, and the output,
            at which the backward begins.
        state_bytes: weights, and gradients and AdamW moments of trainable ones.
        remade_bytes: peak of temporary memory of a backward, including recomputed or fetched
            activations of a layer.
        forward_bytes: memory of a forward of a stage without backward.
        message_bytes: messages in flight to and from other ranks, and the step's data.
        update_bytes: temporary memory of gradient sums or the optimizer.
    """

    forward: float
    backward_input: float
    backward_weight: float
    input_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    state_bytes: int = 0
    remade_bytes: int = 0
    forward_bytes: int = 0
    message_bytes: int = 0
    update_bytes: int = 0

    def joined(self, count: int) -> StageCost:
        """Return the cost with the activations, temporary memory and joined inputs and outputs of
        ``count`` microbatches that share a forward and a backward."""
        if count == 1:
            return self
        return replace(
            self, activation_bytes=count * self.activation_bytes,
            remade_bytes=count * self.remade_bytes, forward_bytes=count * self.forward_bytes,
            message_bytes=self.message_bytes + count * (self.input_bytes + self.output_bytes),
        )

    def seconds(self) -> dict[Op, float]:
        """Return the seconds per compute op, including ops that the stage does not need."""
        return {
            Op.FORWARD: self.forward,
            Op.FORWARD_NO_GRAD: self.forward,
            Op.FORWARD_CHECKPOINTED: self.forward,
            Op.RECOMPUTE: self.forward,
            Op.BACKWARD: self.backward_input + self.backward_weight,
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
        }


def stage_costs(plan: Plan, profile: CostProfile | None = None) -> Mapping[StageId, StageCost]:
    """Return the cost of each stage of a plan, by the frozen rules (see
    :mod:`raymm.scheduler.costs.layer_costs`), with the plan's profile by default. Raise
    ``ValueError`` if there is no profile."""
    if profile is not None:
        return _stage_costs(plan, profile)
    if plan.profile is None:
        raise ValueError("the plan has no cost profile")
    if StageCost not in plan.derived:
        plan.derived[StageCost] = _stage_costs(plan, plan.profile)
    return plan.derived[StageCost]


def edge_bytes(plan: Plan, sizes: Mapping[StageId, StageCost]) -> dict[Edge, int]:
    """Return the bytes of a message of each data edge, summed over processes; a gradient has the
    same size."""
    def outputs(stage: StageId) -> int:  # of all replicas that split a microbatch
        return sizes[stage].output_bytes * _sample_shares(plan, plan.by_id[stage])

    return {
        edge: int(
            sent_bytes(plan.graph, edge, ports, outputs(edge[0]), plan.profile)
            * _carried_share(plan, edge)
        )
        for edge, ports in plan.edge_ports.items()
    }


def _sample_shares(plan: Plan, stage: Stage) -> int:
    """Return the number of replicas that split every microbatch of the stage's module by
    samples."""
    return len(plan.replicas(stage.module)) if stage.split == SAMPLES else 1


def _carried_share(plan: Plan, edge: Edge) -> float:
    """Return the fraction of a microbatch's samples that an edge carries."""
    producer, consumer = plan.by_id[edge[0]], plan.by_id[edge[1]]
    makes = _share_of(plan, producer)
    if (producer.module, consumer.module) in plan.graph.every:
        return makes[1] - makes[0]
    reads = _share_of(plan, consumer)
    return max(0.0, min(makes[1], reads[1]) - max(makes[0], reads[0]))


def _share_of(plan: Plan, stage: Stage) -> tuple[float, float]:
    count = _sample_shares(plan, stage)
    return (stage.replica / count, (stage.replica + 1) / count) if count > 1 else (0.0, 1.0)


def _stage_costs(plan: Plan, profile: CostProfile) -> dict[StageId, StageCost]:
    profile.check(plan.graph)
    trained_earlier = trainable_before(plan.graph)
    costs, by_kind = {}, {}
    for stage in plan.stages:
        links = _process_links(plan, stage, profile)
        # Replicas cost the same if their links are the same.
        kind = (
            stage.module, stage.index, stage.layers, stage.recompute, stage.layer_options, links,
            _remote(plan, stage), stage.microbatch_factor,
        )
        if kind not in by_kind:
            by_kind[kind] = _stage_cost(plan, stage, profile, trained_earlier[stage.module], links)
        costs[stage.id] = by_kind[kind]
    return costs


def _stage_cost(
    plan: Plan, stage: Stage, profile: CostProfile, before: tuple[bool, ...],
    links: tuple[Link | None, Link | None],
) -> StageCost:
    lo, hi = stage.layers
    node = plan.graph.node(stage.module)
    replicas = _sample_shares(plan, stage)
    shares = stage.cp * stage.fsdp * replicas
    ports_in, ports_out = _port_bytes(plan, stage, profile)
    layers = stage_layers(process_layers(profile, node, stage.degrees, *links), lo, hi)
    if replicas > 1:
        layers = _layers_of_share(profile, stage.module, layers, replicas)
    # Microbatches that share a forward and a backward share their fixed seconds.
    saved = profile.fixed.get(stage.module, 0.0) * (1 - 1 / stage.microbatch_factor)
    if saved:
        layers = tuple(
            replace(
                cost, forward=cost.forward * (1 - saved),
                backward_input=cost.backward_input * (1 - saved),
                backward_weight=cost.backward_weight * (1 - saved),
            )
            for cost in layers
        )
    trainable = node.trainable[lo:hi]
    earlier = before[lo:hi]
    if lo > 0:
        received = (profile.modules[stage.module][lo - 1].output_bytes + ports_in) // shares
    else:  # inputs from other modules are whole: each process selects its tokens after the merge
        received = sum(
            profile.modules[producer][-1].output_bytes
            for producer in plan.graph.producers(stage.module)
        ) + ports_in
    forward = sum(c.forward for c in layers)
    kept_options = _kept(stage, layers, [t or b for t, b in zip(trainable, earlier, strict=True)])
    backward_input = sum(c.backward_input for c, b in zip(layers, earlier, strict=True) if b)
    # Recomputation comes before the first gradient of its layer.
    backward_input += sum(option.seconds for _, option in kept_options)
    trained = [c for c, t in zip(layers, trainable, strict=True) if t]
    backward_weight = sum(c.backward_weight for c in trained)
    sharers = plan.sharers(stage)
    moments = sharers if stage.sharding == "zero1" else 1
    state = sum(profile.state_bytes(c, t, moments) for c, t in zip(layers, trainable, strict=True))
    trained_sizes = [c.trained_bytes for c in trained]
    between = profile.links if sharers > 1 else None
    link = None if between is None else between.between(plan.replica_processes(stage))
    if stage.shards > 1:
        # In the compute dtype only gathered units exist, one at a time.
        state -= int(sum(trained_sizes) * compute_copy_share(profile.dtype))
        held = [
            size * profile.element_bytes // _FP32_BYTES
            for size in _shared_out(stage, layers)
        ]
        state = -(-state // stage.shards) + max(held)
        gather = gather_seconds(sum(held), stage.shards, link)
        summed = _shared_out(stage, trained, True)
        reduction = gather_seconds(sum(summed), stage.shards, link)
        forward = max(forward, gather) + _exchanges(stage, layers, link)
        if trained or any(earlier):
            backward_weight = max(backward_weight, gather + reduction - backward_input)
            remade = [c for c, option in kept_options if option.name in REMADE]
            backward_weight += _exchanges(stage, [*remade, *(c for c, _ in kept_options)], link)
    elif trained:
        reduction = all_reduce_seconds(sum(trained_sizes), sharers, link)
        if replicas > 1 and _sharing(profile, stage.module) is not None:
            reduction = 0.0  # surfaces include the gradient sum
        steps = _replica_microbatches(plan, stage)
        backward_weight += exposed_seconds(reduction, backward_input + backward_weight) / steps
    remote_producers, remote_consumers = _remote(plan, stage)
    outputs = layers[-1].output_bytes * replicas + ports_out
    handed = outputs // shares if _hands_on(plan, stage) else 0
    saved = handed if kept_options else 0
    steps = _replica_microbatches(plan, stage)
    return StageCost(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        input_bytes=received,
        activation_bytes=sum(option.nbytes for _, option in kept_options) + saved,
        output_bytes=layers[-1].output_bytes,
        state_bytes=state,
        remade_bytes=working_excess([(o.nbytes, working_bytes(c, o)) for c, o in kept_options]),
        forward_bytes=0 if kept_options else received + max(c.forward_bytes for c in layers),
        message_bytes=steps * sum(c.data_bytes for c in layers) + int(message_bytes(
            profile.device, steps,
            received * remote_producers,
            handed * remote_consumers if stage.recompute or not kept_options else 0,
            received * remote_producers if earlier[0] else 0,
            handed * remote_consumers if kept_options else 0,
        )),
        update_bytes=_update_bytes(plan, stage, trained_sizes),
    )


def _shared_out(
    stage: Stage, layers: Sequence[LayerCost], reduced: bool = False
) -> list[int]:
    """Return the bytes per layer that are gathered or reduced. Experts stay in place with
    ``ep``."""
    def apart(cost: LayerCost) -> int:
        return 0 if stage.ep == 1 or (reduced and cost.base_bytes) else cost.expert_bytes

    return [(c.trained_bytes if reduced else c.parameter_bytes) - apart(c) for c in layers]


def _exchanges(stage: Stage, layers: Sequence[LayerCost], link: Link | None) -> float:
    """Return the seconds of exchanging tokens with experts in one pass of these layers."""
    if stage.ep == 1:
        return 0.0
    return sum(exchange_seconds(c.exchange_bytes, stage.ep, link) for c in layers)


def _replica_microbatches(plan: Plan, stage: Stage) -> int:
    """Return the number of microbatches per step that a stage works on."""
    if stage.split == SAMPLES:
        return plan.num_microbatches
    return max(1, plan.num_microbatches // len(plan.replicas(stage.module)))


def _sharing(profile: CostProfile, module: str) -> DeviceSharing | None:
    sharing = profile.sharing
    return sharing if sharing is not None and sharing.has(module) else None


def _layers_of_share(
    profile: CostProfile, module: str, layers: Sequence[LayerCost], replicas: int
) -> tuple[LayerCost, ...]:
    """Return the layers for one of ``replicas`` equal shares of the samples."""
    sharing = _sharing(profile, module) or DeviceSharing(())
    slower = sharing.seconds(module, replicas, {module: 1.0})
    return tuple(
        replace(
            share, forward=cost.forward * slower, backward_input=cost.backward_input * slower,
            backward_weight=cost.backward_weight * slower,
            options=tuple(
                option._replace(seconds=full.seconds * slower)
                for option, full in zip(share.options, cost.options, strict=True)
            ),
        )
        for cost in layers for share in (layer_of_samples(cost, 1 / replicas),)
    )


def _port_bytes(plan: Plan, stage: Stage, profile: CostProfile) -> tuple[int, int]:
    """Return the bytes of ports that a stage receives and sends, besides hidden states and
    outputs."""
    def total(edges: list[Edge]) -> int:
        return sum(sent_bytes(plan.graph, e, plan.edge_ports[e], 0, profile) for e in edges)

    if not plan.graph.ports:
        return 0, 0
    producers, consumers = plan.stage_producers[stage.id], plan.stage_consumers[stage.id]
    return total([(p, stage.id) for p in producers]), total([(stage.id, c) for c in consumers])


def _hands_on(plan: Plan, stage: Stage) -> bool:
    last = stage.index == len(plan.replicas(stage.module)[0]) - 1
    return not last or bool(plan.graph.consumers(stage.module))


def _remote(plan: Plan, stage: Stage) -> tuple[bool, bool]:
    """Return whether a stage receives its input from another rank, and sends its output to one."""
    def elsewhere(others: tuple[StageId, ...]) -> bool:
        return any(plan.by_id[other].rank != stage.rank for other in others)

    return elsewhere(plan.stage_producers[stage.id]), elsewhere(plan.stage_consumers[stage.id])


def _update_bytes(plan: Plan, stage: Stage, trained: list[int]) -> int:
    if not trained:
        return 0
    return int(update_bytes(
        np.array(sum(trained) / stage.shards), np.array(max(trained) / stage.shards),
        plan.sharers(stage), stage.sharding,
    ))


def _kept(
    stage: Stage, layers: tuple[LayerCost, ...], backward: list[bool]
) -> list[tuple[LayerCost, LayerOption]]:
    """Return the options of layers with a backward. Unknown options recompute and keep
    everything."""
    costs = []
    for index, cost in enumerate(layers):
        if not backward[index]:
            continue
        name = stage.layer_options[index] if index < len(stage.layer_options) else KEEP
        unknown = LayerOption(name, cost.forward, cost.activation_bytes)
        costs.append((cost, next((o for o in cost.choices if o.name == name), unknown)))
    return costs


def _process_links(
    plan: Plan, stage: Stage, profile: CostProfile
) -> tuple[Link | None, Link | None]:
    """Return the links between the rank's processes that split tokens, and that split
    parameters."""
    links, tp = profile.links, stage.tp
    numbers = plan.rank_processes(stage.rank)
    if links is None or len(numbers) == 1:
        return None, None
    # All tensor-parallel groups wait for the one with the slowest link.
    by_parameters = [
        links.between(numbers[first : first + tp]) for first in range(0, len(numbers), tp)
    ]
    slowest = max(by_parameters, key=lambda link: link.seconds(1))
    return links.between(numbers), slowest


def op_seconds(plan: Plan, profile: CostProfile | None = None) -> dict[tuple[StageId, Op], float]:
    """Return the seconds per (stage, compute op) for lowerings and the simulator."""
    return {
        (name, op): seconds
        for name, cost in stage_costs(plan, profile).items()
        for op, seconds in cost.seconds().items()
    }


def group_seconds(
    plan: Plan, costs: Mapping[tuple[StageId, Op], float] | None = None
) -> Callable[[Instruction, Mapping[str, float]], float] | None:
    """Return the function that computes the seconds of instructions on quotas from surfaces and
    interference (:data:`raymm.scheduler.schedule.simulate.GroupSeconds`), or None if the plan's
    profile has none. ``costs`` are seconds on a whole device, by default :func:`op_seconds`."""
    if plan.profile is None or plan.profile.sharing is None:
        return None
    sharing, unshared = plan.profile.sharing, op_seconds(plan) if costs is None else costs

    def seconds(instruction: Instruction, quotas: Mapping[str, float]) -> float:
        stage = plan.by_id[instruction.stage]
        module, degree = stage.module, _sample_shares(plan, stage)
        slower = sharing.seconds(module, degree, quotas) / sharing.seconds(
            module, degree, {module: 1.0}
        )
        return unshared.get((stage.id, instruction.op), 0.0) * slower

    return seconds
