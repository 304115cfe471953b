"""What the stages of a plan cost: seconds per op and bytes, summed from the layers' costs.

Where a rank is several processes, costs are those of one of them, alike for all, with what it
waits for the others (:mod:`raymm.scheduler.schedule.process_costs`). Where replicas share every
microbatch by samples, they are those of a replica's share, and surfaces say how much less it takes
than all samples (:class:`raymm.scheduler.costs.sharing.DeviceSharing`).
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
    """One stage on one microbatch, as one of its rank's processes has it.

    Attributes:
        forward: seconds of F (and of a recomputation).
        backward_input: seconds of B_d, of the layers that have something trainable before
            them.
        backward_weight: seconds of B_w, of the trainable layers, and a microbatch's share of what
            the step's sum of gradients takes after the last backward.
        input_bytes: what it receives, which is what a checkpointed forward keeps.
        activation_bytes: what autograd keeps of the layers that have a backward, and its output,
            at which the backward begins.
        output_bytes: what its rank hands on, all processes together.
        state_bytes: weights, and gradients and AdamW moments of the trainable ones.
        remade_bytes: the most that it has at one time beyond what it keeps: what a backward makes
            again, or fetches, of a layer that keeps less of its activations, and what the layer
            needs to work.
        forward_bytes: what a forward needs of a stage that has no backward.
        message_bytes: of its messages to and from other ranks that are under way, and of the step's
            data that it reads.
        update_bytes: what sums of its gradients or the optimizer take for themselves.
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

    def seconds(self) -> dict[Op, float]:
        """Per compute op; what a stage does not need is simply not in its program."""
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
    """Per stage of a plan, with the frozen rules (see :mod:`raymm.scheduler.costs.layer_costs`).

    Args:
        plan: the plan.
        profile: layer costs; the plan's own by default.

    Raises:
        ValueError: if neither the plan nor the caller has a profile.
    """
    if profile is not None:
        return _stage_costs(plan, profile)
    if plan.profile is None:
        raise ValueError("the plan has no cost profile")
    if StageCost not in plan.derived:
        plan.derived[StageCost] = _stage_costs(plan, plan.profile)
    return plan.derived[StageCost]


def edge_bytes(plan: Plan, sizes: Mapping[StageId, StageCost]) -> dict[Edge, int]:
    """What a message of each data edge has, all processes together; a gradient has as much.

    Args:
        plan: with the bytes of its ports, if it has any.
        sizes: of every stage.
    """
    def outputs(stage: StageId) -> int:  # of all replicas that share a microbatch
        return sizes[stage].output_bytes * _sample_shares(plan, plan.by_id[stage])

    return {
        edge: int(
            sent_bytes(plan.graph, edge, ports, outputs(edge[0]), plan.profile)
            * _carried_share(plan, edge)
        )
        for edge, ports in plan.edge_ports.items()
    }


def _sample_shares(plan: Plan, stage: Stage) -> int:
    """Replicas that share every microbatch of a stage's module by samples."""
    return len(plan.replicas(stage.module)) if stage.split == SAMPLES else 1


def _carried_share(plan: Plan, edge: Edge) -> float:
    """Of a microbatch's samples, those that an edge carries."""
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
    before = trainable_before(plan.graph)
    costs, of_kind = {}, {}
    for stage in plan.stages:
        links = _process_links(plan, stage, profile)
        # Replicas cost the same where their processes are as near to each other.
        kind = (
            stage.module, stage.index, stage.layers, stage.recompute, stage.layer_options, links,
            _remote(plan, stage),
        )
        if kind not in of_kind:
            of_kind[kind] = _stage_cost(plan, stage, profile, before[stage.module], links)
        costs[stage.id] = of_kind[kind]
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
    trainable = node.trainable[lo:hi]
    earlier = before[lo:hi]
    if lo > 0:
        received = (profile.modules[stage.module][lo - 1].output_bytes + ports_in) // shares
    else:  # whole: a process picks its tokens after the merge
        received = sum(
            profile.modules[producer][-1].output_bytes
            for producer in plan.graph.producers(stage.module)
        ) + ports_in
    forward = sum(c.forward for c in layers)
    kept = _kept(stage, layers, [t or b for t, b in zip(trainable, earlier, strict=True)])
    backward_input = sum(c.backward_input for c, b in zip(layers, earlier, strict=True) if b)
    # Whatever is made again is made before the first gradient of its layer.
    backward_input += sum(option.seconds for _, option in kept)
    trained = [c for c, t in zip(layers, trainable, strict=True) if t]
    backward_weight = sum(c.backward_weight for c in trained)
    sharers = plan.sharers(stage)
    moments = sharers if stage.sharding == "zero1" else 1
    state = sum(profile.state_bytes(c, t, moments) for c, t in zip(layers, trainable, strict=True))
    trained_sizes = [c.trained_bytes for c in trained]
    between = profile.links if sharers > 1 else None
    link = None if between is None else between.between(plan.replica_processes(stage))
    if stage.shards > 1:
        # Of the compute dtype there is only what is whole: each unit's, while it is gathered.
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
            remade = [c for c, option in kept if option.name in REMADE]
            backward_weight += _exchanges(stage, [*remade, *(c for c, _ in kept)], link)
    elif trained:
        reduction = all_reduce_seconds(sum(trained_sizes), sharers, link)
        if replicas > 1 and _sharing(profile, stage.module) is not None:
            reduction = 0.0  # surfaces have it
        steps = _replica_microbatches(plan, stage)
        backward_weight += exposed_seconds(reduction, backward_input + backward_weight) / steps
    remote_producers, remote_consumers = _remote(plan, stage)
    outputs = layers[-1].output_bytes * replicas + ports_out
    handed = outputs // shares if _hands_on(plan, stage) else 0
    saved = handed if kept else 0
    steps = _replica_microbatches(plan, stage)
    return StageCost(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        input_bytes=received,
        activation_bytes=sum(option.nbytes for _, option in kept) + saved,
        output_bytes=layers[-1].output_bytes,
        state_bytes=state,
        remade_bytes=working_excess([(o.nbytes, working_bytes(c, o)) for c, o in kept]),
        forward_bytes=0 if kept else received + max(c.forward_bytes for c in layers),
        message_bytes=steps * sum(c.data_bytes for c in layers) + int(message_bytes(
            profile.device, steps,
            received * remote_producers,
            handed * remote_consumers if stage.recompute or not kept else 0,
            received * remote_producers if earlier[0] else 0,
            handed * remote_consumers if kept else 0,
        )),
        update_bytes=_update_bytes(plan, stage, trained_sizes),
    )


def _shared_out(
    stage: Stage, layers: Sequence[LayerCost], reduced: bool = False
) -> list[int]:
    """Per layer, bytes that are gathered, or reduced: with ``ep``, experts stay where they are,
    which are never trained under adapters."""
    def apart(cost: LayerCost) -> int:
        return 0 if stage.ep == 1 or (reduced and cost.base_bytes) else cost.expert_bytes

    return [(c.trained_bytes if reduced else c.parameter_bytes) - apart(c) for c in layers]


def _exchanges(stage: Stage, layers: Sequence[LayerCost], link: Link | None) -> float:
    """Seconds that tokens are on their way to experts and back, in one pass of these layers."""
    if stage.ep == 1:
        return 0.0
    return sum(exchange_seconds(c.exchange_bytes, stage.ep, link) for c in layers)


def _replica_microbatches(plan: Plan, stage: Stage) -> int:
    """Microbatches of a step that a stage has something of."""
    if stage.split == SAMPLES:
        return plan.num_microbatches
    return max(1, plan.num_microbatches // len(plan.replicas(stage.module)))


def _sharing(profile: CostProfile, module: str) -> DeviceSharing | None:
    sharing = profile.sharing
    return sharing if sharing is not None and sharing.has(module) else None


def _layers_of_share(
    profile: CostProfile, module: str, layers: Sequence[LayerCost], replicas: int
) -> tuple[LayerCost, ...]:
    """Layers on one of so many equal shares of the samples."""
    sharing = _sharing(profile, module) or DeviceSharing(())
    slower = sharing.seconds(module, replicas, {module: 1.0})
    return tuple(
        replace(
            share, forward=cost.forward * slower, backward_input=cost.backward_input * slower,
            backward_weight=cost.backward_weight * slower,
            options=tuple(
                option._replace(seconds=whole.seconds * slower)
                for option, whole in zip(share.options, cost.options, strict=True)
            ),
        )
        for cost in layers for share in (layer_of_samples(cost, 1 / replicas),)
    )


def _port_bytes(plan: Plan, stage: Stage, profile: CostProfile) -> tuple[int, int]:
    """Of a stage, bytes of ports that it gets and hands on, beside a hidden state or a module's
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
    """Whether a stage gets its input from another rank, and hands its output to one."""
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
    """What a stage's layers that have a backward do with their activations. Of an option that the
    profile does not know it is assumed that it makes all again and keeps all."""
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
    """What the processes of a stage's rank talk over: those that share tokens, and those that share
    parameters."""
    links, tp = profile.links, stage.tp
    numbers = plan.rank_processes(stage.rank)
    if links is None or len(numbers) == 1:
        return None, None
    # Of all groups by parameters, the one on the slowest link is waited for.
    by_parameters = [
        links.between(numbers[first : first + tp]) for first in range(0, len(numbers), tp)
    ]
    slowest = max(by_parameters, key=lambda link: link.seconds(1))
    return links.between(numbers), slowest


def op_seconds(plan: Plan, profile: CostProfile | None = None) -> dict[tuple[StageId, Op], float]:
    """Seconds per (stage, compute op), as the lowerings and the simulator take them."""
    return {
        (name, op): seconds
        for name, cost in stage_costs(plan, profile).items()
        for op, seconds in cost.seconds().items()
    }


def group_seconds(
    plan: Plan, costs: Mapping[tuple[StageId, Op], float] | None = None
) -> Callable[[Instruction, Mapping[str, float]], float] | None:
    """What instructions on quotas take beside others, by surfaces and interference, as
    :data:`raymm.scheduler.schedule.simulate.GroupSeconds` says; None if the plan's profile has
    none.

    Args:
        plan: whose stages they are of.
        costs: seconds on a whole device; by default :func:`op_seconds`.
    """
    if plan.profile is None or plan.profile.sharing is None:
        return None
    sharing, whole = plan.profile.sharing, op_seconds(plan) if costs is None else costs

    def seconds(instruction: Instruction, quotas: Mapping[str, float]) -> float:
        stage = plan.by_id[instruction.stage]
        own, degree = stage.module, _sample_shares(plan, stage)
        slower = sharing.seconds(own, degree, quotas) / sharing.seconds(own, degree, {own: 1.0})
        return whole.get((stage.id, instruction.op), 0.0) * slower

    return seconds
