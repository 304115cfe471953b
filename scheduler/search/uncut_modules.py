"""Planning of models with modules that cannot be split: each becomes one layer, and the resulting
plan is then converted to the model's own layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from raymm.scheduler.costs.layer_costs import (
    CostProfile,
    LayerBytes,
    LayerCost,
    layer_work,
    working_bytes,
)
from raymm.scheduler.costs.recomputation import LayerOption, working_excess
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.process_costs import stage_layers


def with_uncut_modules(
    graph: ModuleGraph, profile: CostProfile, modules: Collection[str]
) -> tuple[ModuleGraph, CostProfile]:
    """Return a graph and profile in which the blocks of the given modules are one layer each, whose
    cost is that of the blocks under the frozen rules. Raise ``PlanError`` if the profile does not
    match the graph."""
    work = layer_work(graph, profile)
    nodes, costs = [], dict(profile.modules)
    for node in graph.nodes:
        blocks = node.num_blocks
        if node.name not in modules or blocks == 1:
            nodes.append(node)
            continue
        own = stage_layers(profile.modules[node.name], 0, blocks)
        done = work[node.name][:blocks]
        trainable = any(node.trainable[:blocks])
        nodes.append(
            ModuleNode(node.name, (trainable, *node.trainable[blocks:]), node.projector)
        )
        backward_input = sum(w.backward_input for w in done)
        backward_weight = sum(w.backward_weight for w in done)
        if not done[0].backward_input:  # no stage waits for its gradient; do not split
            backward_weight += backward_input
            backward_input = 0.0
        parameters = sum(c.parameter_bytes for c in own)
        flagged = [c for c, flag in zip(own, node.trainable, strict=False) if flag]
        trained = sum(c.trained_bytes for c in flagged)
        moments, in_bf16, copied = (
            sum(c.trained_bytes * getattr(c, name) for c in flagged) / max(trained, 1)
            for name in ("moments", "in_bf16", "copied")
        )
        base = parameters - trained if trainable else 0
        quantised = sum(c.base_bytes * c.quantised for c in own) / max(base, 1)
        running = [bool(w.backward) for w in done]
        together, halves = _together(own, running), [c.halved for c in own if c.halved]
        costs[node.name] = (
            LayerCost(
                sum(c.forward for c in own), backward_input, backward_weight,
                together.activation_bytes, parameters, own[-1].output_bytes,
                sum(c.replicated_bytes for c in own),
                sum(c.key_value_bytes for c in own),
                together.working_bytes, together.forward_bytes, sum(c.data_bytes for c in own),
                base, moments, in_bf16, copied, quantised,
                sum(c.expert_bytes for c in own), sum(c.exchange_bytes for c in own),
                few_bytes=sum(c.few_bytes for c in own),
                few_heads=max(c.few_heads for c in own), options=together.options,
                halved=_together(halves, running) if len(halves) == blocks else None,
            ),
            *profile.modules[node.name][blocks:],
        )
    return ModuleGraph(tuple(nodes), graph.edges), replace(profile, modules=costs)


def _together(
    layers: Sequence[LayerCost] | Sequence[LayerBytes], backward: Sequence[bool]
) -> LayerBytes:
    """Return the total memory of layers, with the options that all of them have."""
    running = [c for c, b in zip(layers, backward, strict=True) if b]
    names = [option.name for option in running[0].options] if running else []
    common = []
    for name in names:
        same = [(c, option) for c in running for option in c.options if option.name == name]
        if len(same) == len(running):
            working = working_excess([(o.nbytes, working_bytes(c, o)) for c, o in same])
            seconds, nbytes = sum(o.seconds for _, o in same), sum(o.nbytes for _, o in same)
            common.append(LayerOption(name, seconds, nbytes, working))
    return LayerBytes(
        sum(c.activation_bytes for c in running),
        working_excess([(c.activation_bytes, c.working_bytes) for c in running]),
        max(c.forward_bytes for c in layers), tuple(common),
    )


def in_own_layers(plan: Plan, graph: ModuleGraph, profile: CostProfile) -> Plan:
    """Convert a plan of :func:`with_uncut_modules`'s graph to the model's own graph and profile."""
    stages = []
    for stage in plan.stages:
        hidden = graph.node(stage.module).num_layers - plan.graph.node(stage.module).num_layers
        lo, hi = stage.layers
        options = stage.layer_options
        if lo == 0:
            options = options[:1] * hidden + options
        stages.append(
            replace(
                stage, layers=(lo + hidden if lo else 0, hi + hidden), layer_options=options
            )
        )
    return replace(plan, graph=graph, profile=profile, stages=tuple(stages))
