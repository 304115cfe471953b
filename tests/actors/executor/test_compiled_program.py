"""Programs of random plans, each rank in a thread, have the gradients of plain autograd.

Plans have replicas by microbatches and by samples, slots with quotas, and stages of one rank with
the same inputs.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raymm.actors.executor.colocation import Colocation
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.quota import RecordingBackend
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.graph.sample_ranges import Range, rows_of
from raymm.scheduler.multiplex.mapping import mapped_plan
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, Stage, StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.program.stage_samples import Samples, filled_samples, stage_samples
from raymm.scheduler.schedule.lower import lower
from tests.support.random_mappings import cases

WIDTH = 3
Offsets = Mapping[str, Sequence[int]]
"""Module -> start of each sample's rows, for modules with any number of rows per sample."""


class Channel:
    """Both ends of an edge."""

    in_order = False
    bound = None

    def __init__(self) -> None:
        self._messages: queue.Queue[Message] = queue.Queue()
        self.rows: list[int] = []

    def expect(self, keys, bound=None) -> None: ...

    def end_step(self, timeout) -> None: ...

    def send(self, message: Message) -> None:
        self.rows.append(message.tensors[0].shape[0])
        self._messages.put(message)

    def recv(self) -> Message:
        return self._messages.get(timeout=5)


class Layer(nn.Module):
    """Linear layer over its inputs.

    Depending on the edge it takes the local samples' rows, the sum of each sample's rows, or
    the mean of all samples.
    """

    def __init__(self, stage: StageId, plan: Plan) -> None:
        super().__init__()
        self.plan, self.stage = plan, stage
        layers = plan.by_id[stage].layers
        seed = 100 * plan.graph.topological.index(stage.module)
        self.layers = nn.ModuleList()
        for layer in range(*layers):
            with torch.random.fork_rng():
                torch.manual_seed(seed + layer)
                linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.layers.append(
                linear.requires_grad_(plan.graph.node(stage.module).trainable[layer])
            )

    def run(self, inputs, received, context) -> Message:
        hidden = 0.0 if inputs is None else inputs["x"]
        for name, message in received.items():
            every = (name, self.stage.module) in self.plan.graph.every
            (value,) = message.tensors
            if every:
                value = value.mean(0)
            elif name in context.offsets:
                offsets = context.offsets[name]
                counts = [
                    rows_of(Range(sample, sample + 1), offsets).size
                    for own in context.samples or [Range(0, len(hidden))]
                    for sample in range(*own)
                ]
                rows = value.split([*counts, len(value) - sum(counts)])
                value = torch.stack([of_sample.sum(0) for of_sample in rows[:-1]])
                assert not len(rows[-1])
            hidden = hidden + value
        for linear in self.layers:
            hidden = linear(hidden).tanh()
        loss = self.stage.module in self.plan.graph.losses
        last = self.plan.by_id[self.stage].layers[1]
        if loss and last == self.plan.graph.node(self.stage.module).num_layers:
            return Message((), {}, loss=hidden.square().sum())
        return Message((hidden,), {})


def data(plan: Plan, module: str, microbatch: int, rows: int) -> torch.Tensor:
    seed = 1000 * plan.graph.topological.index(module) + microbatch
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def own_data(
    plan: Plan, stage: Stage, microbatch: int, samples: Samples, offsets: Offsets
) -> torch.Tensor:
    """Return a stage's data for a microbatch."""
    of_module = offsets.get(stage.module)
    whole = rows_of(Range(0, samples.size), of_module).size
    parts = [rows_of(own, of_module) for own in stage_samples(plan, stage, samples)]
    everything = data(plan, stage.module, microbatch, whole)
    return torch.cat([everything[:0], *(everything[slice(*part)] for part in parts)])


def expected(
    plan: Plan, sizes: Sequence[int], offsets: Sequence[Offsets]
) -> dict[tuple[str, str], torch.Tensor | None]:
    """Return gradients of one process by (module, parameter)."""
    whole = Plan(plan.graph, tuple(
        Stage(node.name, 0, (0, node.num_layers), 0) for node in plan.graph.nodes
    ), 1)
    modules = {name: Layer(StageId(name, 0), whole) for name in plan.graph.topological}
    for m, size in enumerate(sizes):
        outputs: dict[str, Message] = {}
        for name, module in modules.items():
            received = {p: outputs[p] for p in plan.graph.producers(name)}
            own = offsets[m].get(name)
            inputs = {"x": data(plan, name, m, size if own is None else own[-1])}
            context = MicrobatchContext(1, m, samples=(Range(0, size),), offsets=offsets[m])
            outputs[name] = module.run(inputs, received, context)
        loss = sum(outputs[name].loss for name in plan.graph.losses)
        if loss.requires_grad:
            loss.backward()
    return {
        (name, key): p.grad for name, module in modules.items()
        for key, p in module.named_parameters() if p.requires_grad
    }


def run(
    plan: Plan, sizes: Sequence[int], offsets: Sequence[Offsets]
) -> tuple[dict, dict[Edge, Channel]]:
    """Return the gradients of all ranks, summed over replicas, and the channels."""
    present = [
        [node.name for node in plan.graph.nodes if of.get(node.name, (1,))[-1]] for of in offsets
    ]
    samples = [
        filled_samples(plan, size, {name: rows for name, rows in of.items() if rows[-1]})
        for size, of in zip(sizes, offsets, strict=True)
    ]
    program = lower(plan, present, samples=samples)
    bound = check_program(program).bound
    check_samples(plan, program, samples)
    channels: dict[Edge, Channel] = defaultdict(Channel)
    for edge in plan.stage_edges:
        for way in (edge, edge[::-1]):
            channels[way]
    gradients: dict[tuple[str, str], torch.Tensor | None] = {}

    # Not in the threads, which share one generator; for the same reason no stage is random.
    layers = {stage.id: Layer(stage.id, plan).eval() for stage in plan.stages}

    def rank(number: int) -> dict[StageId, nn.Module]:
        stages = {stage.id: layers[stage.id] for stage in plan.rank_stages(number)}
        sets = plan.quota_sets(number)
        colocation = Colocation(sets, RecordingBackend(), 30.0) if sets else None
        executor = Executor(
            stages, plan.stage_edges, channels, channels, {}, colocation=colocation,
            every=plan.graph.every,
        )
        inputs = {
            s.id: [
                {"x": own_data(plan, s, m, of_microbatch, offsets[m])}
                for m, of_microbatch in enumerate(samples)
            ]
            for s in plan.rank_stages(number) if s.index == 0
        }
        prepared = executor.compile(program.ranks[number], (), bound)
        keys = tuple(range(len(sizes)))
        executor.run(prepared, inputs, StepMeta(0, 1, keys, offsets=tuple(offsets)))
        if colocation is not None:
            colocation.close()
        return stages

    with ThreadPoolExecutor(plan.num_ranks) as threads:
        for stages in threads.map(rank, range(plan.num_ranks)):
            for stage, module in stages.items():
                lo = plan.by_id[stage].layers[0]
                for key, p in module.named_parameters():
                    _, layer, kind = key.split(".")
                    name = stage.module, f"layers.{int(layer) + lo}.{kind}"
                    if p.requires_grad:
                        before = gradients.get(name)
                        gradients[name] = p.grad if before is None else (
                            before if p.grad is None else before + p.grad
                        )
    return gradients, channels


def check(
    plan: Plan, sizes: Sequence[int], offsets: Sequence[Offsets] = ()
) -> dict[Edge, Channel]:
    offsets = offsets or [{} for _ in sizes]
    gradients, channels = run(plan, sizes, offsets)
    due = expected(plan, sizes, offsets)
    assert gradients.keys() == due.keys()
    for name, gradient in due.items():
        if gradient is None or not gradient.any():
            assert gradients[name] is None or not gradients[name].any()
        else:
            error = (gradients[name] - gradient).norm() / gradient.norm()
            assert error < 1e-12, (name, error)
    return channels


@given(cases(), st.integers(1, 3))
@settings(max_examples=30)
def test_mappings(case, microbatches):
    graph, mapping, batch = case
    plan = mapped_plan(graph, mapping, microbatches)
    check(plan, [max(1, batch - m) for m in range(microbatches)])


@st.composite
def split_plans(draw: st.DrawFn) -> tuple[Plan, list[int]]:
    """Draw pipelines with replicas by microbatches or samples, on separate or shared ranks."""
    names = [f"m{i}" for i in range(draw(st.integers(1, 3)))]
    edges: list[tuple[str, str]] = []
    for i, name in enumerate(names[1:], start=1):
        before = draw(st.lists(st.sampled_from(names[:i]), unique=True, max_size=2))
        edges += [(p, name) for p in before]
    losses = ["loss0", "loss1"][: draw(st.integers(1, 2))]
    for loss in losses:
        before = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
        edges += [(p, loss) for p in before]
    edges += [(n, losses[0]) for n in names if not any(p == n for p, _ in edges)]
    nodes = [
        ModuleNode(
            name, tuple(draw(st.lists(st.booleans(), min_size=1, max_size=2))),
            loss=name in losses,
        )
        for name in (*names, *losses)
    ]
    every = tuple(edge for edge in edges if draw(st.booleans()))
    graph = ModuleGraph(tuple(nodes), tuple(edges), every)
    stages: list[Stage] = []
    ranks = draw(st.integers(1, 5))
    for node in nodes:
        replicas = draw(st.integers(1, 3))
        split = draw(st.sampled_from(["samples", "microbatches"]))
        recompute = draw(st.booleans())
        cuts = draw(st.sampled_from([[0, node.num_layers], list(range(node.num_layers + 1))]))
        for replica in range(replicas):
            for index, layers in enumerate(zip(cuts, cuts[1:], strict=False)):
                rank = draw(st.integers(0, ranks - 1))
                stages.append(Stage(
                    node.name, index, layers, rank, replica, recompute, split=split
                ))
    numbers = {rank: i for i, rank in enumerate(sorted({s.rank for s in stages}))}
    stages = [replace(s, rank=numbers[s.rank]) for s in stages]
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble"]))
    return Plan(graph, tuple(stages), len(sizes), schedule), sizes


@given(split_plans())
@settings(max_examples=20)
def test_pipelines(case):
    check(*case)


@given(split_plans(), st.data())
@settings(max_examples=40)
def test_any_number_of_rows_of_a_sample(case, draws):
    """Use source modules, such as image encoders; no work or message is wasted."""
    plan, sizes = case
    stages = tuple(
        replace(s, split="samples") if s.module in plan.graph.losses else s for s in plan.stages
    )
    graph = replace(plan.graph, every=())
    plan = replace(plan, graph=graph, stages=stages)
    first = [n.name for n in graph.nodes if not n.loss and not graph.producers(n.name)]
    ragged = draws.draw(st.lists(st.sampled_from(first), min_size=1, unique=True))
    offsets = [
        {
            name: (0, *accumulate(draws.draw(st.lists(
                st.sampled_from([0, 0, 1, 3]), min_size=size, max_size=size
            ))))
            for name in ragged
        }
        for size in sizes
    ]
    channels = check(plan, sizes, offsets)
    assert all(all(channel.rows) for channel in channels.values())


def test_messages_stay_in_order_if_fewer_stages_read_a_later_microbatch():
    """For microbatch 1, rank 1 has only one of the two stages that read ``m0``, so that gradient is
    complete first."""
    nodes = (
        ModuleNode("m0", (True,)), ModuleNode("m1", (False,)),
        ModuleNode("loss0", (False,), loss=True), ModuleNode("loss1", (False, False), loss=True),
    )
    edges = (("m0", "m1"), ("m0", "loss0"), ("m0", "loss1"), ("m1", "loss0"))
    places = [
        ("m0", 0, 0, 0), ("m1", 0, 0, 0), ("loss0", 0, 0, 1), ("loss1", 0, 0, 1),
        ("loss1", 1, 0, 0), ("loss1", 0, 1, 0), ("loss1", 1, 1, 0), ("loss1", 0, 2, 0),
        ("loss1", 1, 2, 0),
    ]
    plan = Plan(ModuleGraph(nodes, edges), tuple(
        Stage(module, index, (index, index + 1), rank, replica, split="samples")
        for module, index, replica, rank in places
    ), 2)
    check(plan, [3, 1], [{"m0": (0, 1, 1, 1)}, {"m0": (0, 1)}])


def test_shared_inputs_of_a_rank_are_sent_once():
    nodes = (ModuleNode("a", (True,)), ModuleNode("b", (True,)), ModuleNode("c", (True,)))
    graph = ModuleGraph(nodes, (("a", "b"), ("a", "c"), ("b", "c")))
    plan = Plan(graph, (
        Stage("a", 0, (0, 1), 0), Stage("b", 0, (0, 1), 1), Stage("c", 0, (0, 1), 1),
    ), 2)  # fmt: skip
    channels = check(plan, [4, 4])
    sent = {edge: channel.rows for edge, channel in channels.items() if channel.rows}
    a, b = StageId("a", 0), StageId("b", 0)
    assert sent == {(a, b): [4, 4], (b, a): [4, 4]}


def test_only_samples_that_are_read_are_sent():
    graph = ModuleGraph((ModuleNode("a", (True,)), ModuleNode("b", (True,))), (("a", "b"),))
    plan = Plan(graph, (
        Stage("a", 0, (0, 1), 0), Stage("b", 0, (0, 1), 1, split="samples"),
        Stage("b", 0, (0, 1), 2, 1, split="samples"),
    ), 1)  # fmt: skip
    channels = check(plan, [5])
    a = StageId("a", 0)
    assert [channels[a, StageId("b", 0, r)].rows for r in (0, 1)] == [[2], [3]]
    assert stage_samples(plan, plan.stages[1], Samples(5)) == (Range(0, 2),)
    assert pytest.approx(5) == sum(channels[StageId("b", 0, r), a].rows[0] for r in (0, 1))
