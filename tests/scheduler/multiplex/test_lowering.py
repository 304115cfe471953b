"""Programs of random graphs and mappings: proven by the checker, and message by message equal to
what going through the samples one by one gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.graph.sample_ranges import Range, deal, share, union
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.check_program import check_every_sample, check_program
from raymm.scheduler.multiplex.instructions import Part, Reduce, Route, Run
from raymm.scheduler.multiplex.lowering import lower
from raymm.scheduler.multiplex.mapping import Mapping, MultiplexStage, Placement

STEPS = 12


class Use(NamedTuple):
    """A producer, and whether all of its samples are read."""

    producer: str
    every: bool = False


class Node(NamedTuple):
    """A module of one layer, with what it reads."""

    name: str
    uses: tuple[Use, ...] = ()
    trainable: bool = True
    loss: bool = False


def graph_of(nodes: Iterable[Node]) -> ModuleGraph:
    """The graph of some."""
    nodes = tuple(nodes)
    uses = [(use.producer, node.name, use.every) for node in nodes for use in node.uses]
    return ModuleGraph(
        tuple(ModuleNode(node.name, (node.trainable,), loss=node.loss) for node in nodes),
        tuple((producer, reader) for producer, reader, _ in uses),
        tuple((producer, reader) for producer, reader, every in uses if every),
    )


def mapping_of(gpus: int, *stages: dict[str, tuple[int, ...]], slices: int = 1) -> Mapping:
    """Stages of modules on GPUs, each with the same small quota."""
    return Mapping(gpus, STEPS, tuple(
        MultiplexStage(tuple(Placement(m, g, 1, slices) for m, g in one.items()), 1.0)
        for one in stages
    ), slices=slices)


@st.composite
def cases(draw):
    """A graph in layers, a mapping of it in stages that keep the order, and a batch."""
    modules = draw(st.integers(1, 6))
    nodes, names = [], []
    for m in range(modules):
        before = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
        uses = tuple(Use(p, draw(st.booleans())) for p in before)
        names.append(f"m{m}")
        nodes.append(Node(f"m{m}", uses, draw(st.booleans())))
    read = {use.producer for node in nodes for use in node.uses}
    sinks = [name for name in names if name not in read]
    losses = draw(st.integers(1, 3))
    for i in range(losses):
        extra = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
        chosen = dict.fromkeys([*(sinks if i == 0 else ()), *extra] or [names[0]])
        uses = tuple(Use(p, draw(st.booleans())) for p in chosen)
        nodes.append(Node(f"loss{i}", uses, draw(st.booleans()), loss=True))
    graph = graph_of(draw(st.permutations(nodes)))
    gpus, slices = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2, 3]))
    stages: list[dict[str, tuple[tuple[int, ...], int]]] = []
    stage_of: dict[str, int] = {}
    placed = [n for n in graph.topological if n not in graph.losses or draw(st.booleans())]
    for name in placed:
        earliest = max(
            (stage_of[producer] for producer in graph.producers(name)), default=-1
        ) + 1
        left = slices
        at = earliest
        while left:
            at += draw(st.integers(0, 1))
            count = draw(st.integers(1, left))
            degree = 1 << draw(st.integers(0, gpus.bit_length() - 1))
            chosen = draw(st.permutations(range(gpus)))[:degree]
            while len(stages) <= at:
                stages.append({})
            stages[at][name] = (tuple(sorted(chosen)), count)
            left -= count
            stage_of[name] = at
            at += 1
    mapping = Mapping(gpus, STEPS, tuple(
        MultiplexStage(tuple(Placement(m, g, 1, k) for m, (g, k) in one.items()), 1.0)
        for one in stages if one
    ), slices=slices)
    return graph, mapping, draw(st.integers(1, 9))


def runs(program, direction):
    """(node, sample) -> (gpu, slot), of all runs."""
    found = {}
    for gpu, listed in enumerate(program.instructions):
        for one in listed:
            if isinstance(one, Run) and one.direction is direction:
                for part in one.parts:
                    for sample in range(*part.samples):
                        assert (part.node, sample) not in found
                        found[part.node, sample] = gpu, one.slot
    return found


def messages(program, direction):
    """(slot, sender, receiver, node, sample), as sent and as received."""
    sent, received = [], []
    for gpu, listed in enumerate(program.instructions):
        for one in listed:
            if isinstance(one, Route) and one.direction is direction:
                sent += [(one.slot, gpu, p.peer, p.node, s)
                         for p in one.sends for s in range(*p.samples)]
                received += [(one.slot, p.peer, gpu, p.node, s)
                             for p in one.receives for s in range(*p.samples)]
    return sorted(sent), sorted(received)


@given(cases(), st.booleans())
def test_programs_are_what_going_through_the_samples_one_by_one_gives(case, lockstep):
    graph, mapping, batch = case
    program = lower(graph, mapping, batch, lockstep=lockstep, update=True)
    check_program(graph, program)
    forward = runs(program, Direction.FORWARD)
    assert set(forward) == {(n.name, s) for n in graph.nodes for s in range(batch)}
    assert set(runs(program, Direction.BACKWARD)) == {
        (name, s) for name in graph.backward for s in range(batch)
    }
    outputs, gradients, last = set(), set(), {}
    for node in graph.nodes:
        for sample in range(batch):
            gpu, slot = forward[node.name, sample]
            for producer in graph.producers(node.name):
                every = (producer, node.name) in graph.every
                for read in range(batch) if every else [sample]:
                    maker, made = forward[producer, read]
                    outputs.add((made, maker, gpu, producer, read))
                    key = producer, gpu
                    last[key] = min(last.get(key, slot), slot)
    for _, maker, gpu, producer, sample in outputs:
        if producer in graph.backward:
            gradients.add((last[producer, gpu], gpu, maker, producer, sample))
    for direction, expected in (
        (Direction.FORWARD, outputs), (Direction.BACKWARD, gradients),
    ):
        sent, received = messages(program, direction)
        assert received == sorted(expected)
        assert sent == sorted(one for one in expected if one[1] != one[2])


@given(cases())
def test_evaluation_has_no_backward(case):
    graph, mapping, batch = case
    program = lower(graph, mapping, batch, train=False)
    check_program(graph, program)
    assert not runs(program, Direction.BACKWARD) and not messages(program, Direction.BACKWARD)[1]
    assert not any(isinstance(i, Reduce) for listed in program.instructions for i in listed)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_dealt_ranges_are_even_and_in_order(lo, size, count):
    shares = deal(Range(lo, lo + size), count)
    assert [s for share in shares for s in range(*share)] == list(range(lo, lo + size))
    sizes = [share.size for share in shares]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_shares_of_counts_that_divide_each_other_nest(size, count, times):
    finer = [share(size, i, count * times) for i in range(count * times)]
    for i in range(count):
        own = [s for part in finer[i * times : (i + 1) * times] for s in range(*part)]
        assert own == list(range(*share(size, i, count)))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda t: Range(*t))))
def test_unions_have_the_same_samples(ranges):
    found = union(ranges)
    assert [s for r in found for s in range(*r)] == sorted({s for r in ranges for s in range(*r)})
    assert all(a.hi < b.lo for a, b in zip(found, found[1:], strict=False))


@st.composite
def damaged(draw):
    """A program with an instruction, or some samples of one, gone, moved or there twice."""
    graph, mapping, batch = draw(cases())
    program = lower(graph, mapping, batch, update=True)
    lists = [list(listed) for listed in program.instructions]
    chosen = draw(st.sampled_from([listed for listed in lists if listed]))
    at = draw(st.integers(0, len(chosen) - 1))
    other = draw(st.integers(0, len(chosen) - 1))
    how = draw(st.sampled_from(["nothing", "gone", "twice", "swapped", "cut"]))
    one = chosen[at]
    if how == "gone":
        del chosen[at]
    elif how == "twice":
        chosen.insert(other, one)
    elif how == "swapped":
        chosen[at], chosen[other] = chosen[other], chosen[at]
    elif how == "cut" and isinstance(one, Run):
        part = draw(st.sampled_from(one.parts))
        lo, hi = sorted(draw(st.tuples(*[st.integers(0, batch)] * 2)))
        cut = Part(part.node, Range(lo, hi))
        chosen[at] = replace(one, parts=tuple(cut if p == part else p for p in one.parts))
    return graph, replace(program, instructions=tuple(map(tuple, lists)))


def verdict(check, graph, program):
    try:
        check(graph, program)
    except MultiplexError as error:
        return str(error)
    return None


@given(damaged())
def test_one_sample_of_each_range_tells_what_all_samples_tell(case):
    assert verdict(check_program, *case) == verdict(check_every_sample, *case)


def test_checking_does_not_look_at_every_sample_of_a_large_batch():
    program = lower(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}), 10**12)
    check_program(clip(), program)


def clip() -> ModuleGraph:
    return graph_of((
        Node("image"), Node("text"),
        Node("loss", (Use("image", True), Use("text", True)), loss=True),
    ))


def test_a_loss_that_is_not_placed_is_where_its_last_producer_is():
    mapping = mapping_of(4, {"image": (0, 1, 2, 3)}, {"text": (1, 2)})
    program = lower(clip(), mapping, 6)
    assert program.replicas["loss"] == (1, 2)
    assert [slot.placed for slot in program.slots] == [True, True, False]
    assert program.slots[-1].quotas == {1: {"loss": STEPS}, 2: {"loss": STEPS}}


def test_frozen_modules_have_neither_backward_nor_gradient_routes():
    graph = graph_of((
        Node("image", trainable=False), Node("text"),
        Node("loss", (Use("image", True), Use("text", True)), trainable=False, loss=True),
    ))
    program = lower(graph, mapping_of(2, {"image": (0,), "text": (1,)}), 4)
    check_program(graph, program)
    assert {node for node, _ in runs(program, Direction.BACKWARD)} == {"text", "loss"}
    assert {m[3] for m in messages(program, Direction.BACKWARD)[1]} == {"text"}


def test_a_gpu_gets_what_several_of_its_nodes_read_once():
    graph = graph_of((
        Node("image"), *(Node(f"other{i}") for i in range(3)),
        *(Node(f"loss{i}", (Use("image", True), Use(f"other{i}", True)), loss=True)
          for i in range(3)),
    ))
    stages = {"image": (0,), **{f"other{i}": (1,) for i in range(3)}}
    program = lower(graph, mapping_of(2, stages), 4)
    sent, _ = messages(program, Direction.FORWARD)
    assert sent == [(0, 0, 1, "image", s) for s in range(4)]
    assert messages(program, Direction.BACKWARD)[0] == [(1, 1, 0, "image", s) for s in range(4)]


def broken(program, gpu, change):
    lists = list(program.instructions)
    lists[gpu] = tuple(change(list(lists[gpu])))
    return replace(program, instructions=tuple(lists))


def test_the_checker_finds_what_is_wrong():
    graph = clip()
    mapping = mapping_of(2, {"image": (0,), "text": (0, 1)})
    program = lower(graph, mapping, 4)
    check_program(graph, program)
    routes = [i for i, one in enumerate(program.instructions[1]) if isinstance(one, Route)]

    def without(i):
        return lambda listed: [one for j, one in enumerate(listed) if j != i]

    with pytest.raises(MultiplexError, match="lacks sample 0 of 'image'"):
        check_program(graph, broken(program, 1, without(routes[0])))

    def swapped(listed):
        first, last = routes[0], routes[-1]
        listed[first], listed[last] = listed[last], listed[first]
        return listed

    with pytest.raises(MultiplexError, match="wait for each other: GPU 0 at Route"):
        check_program(graph, broken(program, 1, swapped))

    def shorter(listed):
        route = listed[routes[0]]
        transfer = next(p for p in route.receives if p.peer == 0)
        cut = transfer._replace(samples=Range(transfer.samples.lo, transfer.samples.hi - 1))
        receives = tuple(cut if p is transfer else p for p in route.receives)
        listed[routes[0]] = replace(route, receives=receives)
        return listed

    with pytest.raises(MultiplexError, match="is expected"):
        check_program(graph, broken(program, 1, shorter))

    def twice(listed):
        run = listed[0]
        return [run, run, *listed[1:]]

    with pytest.raises(MultiplexError, match="runs 2 times"):
        check_program(graph, broken(program, 0, twice))

    def early(listed):
        run = next(o for o in listed if isinstance(o, Run) and o.slot == 1)
        listed.remove(run)
        return [Run(1, Direction.FORWARD, (Part("loss", run.parts[0].samples),)), *listed]

    with pytest.raises(MultiplexError, match="lacks sample"):
        check_program(graph, broken(program, 0, early))


def test_sums_of_gradients_in_two_orders_wait_for_each_other():
    """A sum may hold up what its process issues after it."""
    graph = clip()
    program = lower(graph, mapping_of(2, {"image": (0, 1), "text": (0, 1)}), 4)
    check_program(graph, program)

    def reversed_sums(listed):
        return [
            Reduce(step.nodes[::-1]) if isinstance(step, Reduce) else step for step in listed
        ]

    assert any(isinstance(step, Reduce) and len(step.nodes) > 1 for step in program.instructions[1])
    with pytest.raises(MultiplexError, match="wait for each other: GPU 0 at Reduce"):
        check_program(graph, broken(program, 1, reversed_sums))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (({"image": (0,)},), "do not have module 'text'"),
        (({"image": (0,), "text": (0,), "audio": (1,)},), "'audio'; accepted"),
        (({"image": (0,), "text": (0,)}, {"text": (1,)}), "already complete"),
        (({"image": (0,), "loss": (1,)}, {"text": (1,)}), "'loss', which reads"),
    ],
)
def test_mappings_of_another_graph_are_refused(stages, message):
    with pytest.raises(MultiplexError, match=message):
        lower(clip(), mapping_of(2, *stages), 4)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node("a"), Node("a")], "must be unique"),
        ([Node("a", (Use("b"),))], r"names module 'b'; modules are \['a'\]"),
        ([Node("a"), Node("b")], "one module must compute the loss"),
        ([Node("a"), Node("l", loss=True)], "nothing reads module 'a'"),
        ([Node("l", loss=True), Node("a", (Use("l"),))], "nothing reads module 'a'"),
        ([Node("a", (Use("b"),)), Node("b", (Use("a"),)), Node("l", (Use("a"),), loss=True)],
         "cycle"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(nodes, message):
    with pytest.raises(MultiplexError, match=message):
        graph_of(nodes)


def test_programs_are_readable():
    text = lower(clip(), mapping_of(2, {"image": (0,), "text": (0, 1)}), 4, update=True).describe()
    assert "gpu 0: RUN forward slot 0: image[0:4], text[0:2]" in text
    assert "gpu 1: ROUTE forward slot 0: " in text and "image[0:4] from 0" in text
    assert text.endswith("gpu 1: UPDATE")
