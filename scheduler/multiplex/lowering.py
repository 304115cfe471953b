"""From a mapping to a program: who works on which samples, and what goes from whom to whom.

A node's samples are split over its GPUs as consecutive ranges, so that what a GPU needs from
another is an intersection of ranges. A GPU gets the samples of a producer's output that any of
its nodes reads, each once, however many read them; the gradients that its nodes make of them are
summed there before they go back. A contrastive loss reads the samples of the whole batch on
every of its GPUs: the exchange is then an all-gather, and its reverse adds up what every GPU
has of each sample's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping as ByName
from collections.abc import Sequence
from dataclasses import dataclass

from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.graph.sample_ranges import Range, deal, union
from raymm.scheduler.graph.strict_json import MultiplexError, whole
from raymm.scheduler.multiplex.instructions import (
    Barrier,
    Finish,
    Instruction,
    MultiplexProgram,
    Part,
    Reduce,
    Route,
    Run,
    SampleTransfer,
    Slot,
    Update,
)
from raymm.scheduler.multiplex.mapping import Mapping


@dataclass(frozen=True)
class _Share:
    """Samples of a node that a GPU works on in a slot."""

    node: str
    slot: int
    gpu: int
    samples: Range


def slots_of(graph: ModuleGraph, mapping: Mapping) -> tuple[Slot, ...]:
    """The mapping's stages, then slots of the losses that it does not place: those are on the
    GPUs on which their last producer is.

    Raises:
        MultiplexError: the mapping names a node that there is not, or lacks a module.
    """
    names = set(graph.topological)
    slots, last = [], {}
    for s, stage in enumerate(mapping.stages):
        quotas: dict[int, dict[str, int]] = {}
        for p, placement in enumerate(stage.placements):
            if placement.module not in names:
                raise MultiplexError(
                    f"stages[{s}].placements[{p}].module is {placement.module!r}; accepted: "
                    f"{', '.join(sorted(names))}"
                )
            last[placement.module] = (s, placement.gpus)
            for gpu in placement.gpus:
                quotas.setdefault(gpu, {})[placement.module] = placement.quota
        slots.append(Slot(f"stage {s}", quotas))
    for name in graph.topological:
        if name not in last and name not in graph.losses:
            raise MultiplexError(f"stages do not have module {name!r}; every module must run")
    unplaced = [name for name in graph.topological if name not in last]
    for name in unplaced:
        if not graph.producers(name):
            raise MultiplexError(
                f"loss {name!r} reads no module; the mapping must say where it runs"
            )
    for first in range(0, len(unplaced), mapping.steps):
        together = unplaced[first : first + mapping.steps]
        quotas = {}
        for name in together:
            _, gpus = max(last[producer] for producer in graph.producers(name))
            for gpu in gpus:
                quotas.setdefault(gpu, {})[name] = 0
        for of_gpu in quotas.values():
            of_gpu.update(dict.fromkeys(of_gpu, mapping.steps // len(of_gpu)))
        slots.append(Slot(f"losses {first // mapping.steps}", quotas, placed=False))
    return tuple(slots)


def replicas_of(slots: Sequence[Slot]) -> dict[str, tuple[int, ...]]:
    """GPUs on which each node is in any slot, ascending."""
    gpus_of: dict[str, set[int]] = {}
    for slot in slots:
        for gpu, quotas in slot.quotas.items():
            for name in quotas:
                gpus_of.setdefault(name, set()).add(gpu)
    return {name: tuple(sorted(gpus)) for name, gpus in gpus_of.items()}


def lower(
    graph: ModuleGraph,
    mapping: Mapping,
    batch: int,
    *,
    train: bool = True,
    reduce: bool = True,
    update: bool = False,
    lockstep: bool = False,
) -> MultiplexProgram:
    """The program of one iteration.

    Args:
        graph: what is run.
        mapping: where and when; a placement of some slices works on that share of the samples.
        batch: samples; any number from 1, also fewer than GPUs.
        train: with backward.
        reduce: with sums of gradients over copies; only where ``train``. Without, every copy
            keeps its part, to which later iterations add theirs.
        update: with the optimizer's step; only where ``reduce``.
        lockstep: every slot begins on all GPUs at once, as eq. 1 of Mosaic has it. Otherwise a
            GPU goes on as soon as it has what it needs.

    Raises:
        MultiplexError: a mapping that is not of this graph, or in which something runs before
            what it reads; a batch without samples.
    """
    whole(batch, "batch", 1)
    slots = slots_of(graph, mapping)
    shares = _shares(graph, mapping, slots, batch)
    _check_order(graph, shares)
    needs = _needs(graph, shares, batch)
    lists: list[list[Instruction]] = [[] for _ in range(mapping.gpus)]

    def slot(t: int, direction: Direction, transfers: dict[int, tuple[list, list]]) -> None:
        for gpu, listed in enumerate(lists):
            if lockstep:
                listed.append(Barrier(t, direction))
            parts = tuple(
                Part(s.node, s.samples) for s in shares
                if s.slot == t and s.gpu == gpu and s.samples
                and (direction is Direction.FORWARD or s.node in graph.backward)
            )
            if parts:
                listed.append(Run(t, direction, parts))
            sends, receives = transfers.get(gpu, ((), ()))
            if sends or receives:
                listed.append(Route(t, direction, tuple(sends), tuple(receives)))

    outputs = _routes(shares, needs)
    for t in range(len(slots)):
        slot(t, Direction.FORWARD, outputs.get(t, {}))
    if train:
        gradients = _gradient_routes(graph, shares, needs)
        replicas = replicas_of(slots)
        first = {name: min(s.slot for s in shares if s.node == name) for name in replicas}
        for t in reversed(range(len(slots))):
            slot(t, Direction.BACKWARD, gradients.get(t, {}))
            for gpu, listed in enumerate(lists if reduce else ()):
                done = tuple(
                    name for name in graph.topological
                    if first[name] == t and gpu in replicas[name]
                    and any(graph.node(name).trainable)
                )
                if done:
                    listed.append(Reduce(done))
        for listed in lists if reduce else ():
            listed.append(Finish())
            if update:
                listed.append(Update())
    return MultiplexProgram(
        mapping.gpus, batch, slots, replicas_of(slots), needs, tuple(map(tuple, lists))
    )


def _shares(
    graph: ModuleGraph, mapping: Mapping, slots: Sequence[Slot], batch: int
) -> list[_Share]:
    """Who works on what; a node's slices follow each other in its samples."""
    shares: list[_Share] = []
    done: dict[str, int] = {}
    for t, stage in enumerate(mapping.stages):
        for placement in stage.placements:
            before = done.get(placement.module, 0)
            done[placement.module] = before + placement.slices
            if done[placement.module] > mapping.slices:
                raise MultiplexError(
                    f"stages[{t}] has {placement.module!r}, which is already complete; "
                    "a module runs "
                    f"once ({mapping.slices} slices in all)"
                )
            part = Range(
                before * batch // mapping.slices, done[placement.module] * batch // mapping.slices
            )
            for gpu, samples in zip(placement.gpus, deal(part, len(placement.gpus)), strict=True):
                shares.append(_Share(placement.module, t, gpu, samples))
    for name, count in done.items():
        if count < mapping.slices:
            raise MultiplexError(
                f"stages have {count} of {mapping.slices} slices of {name!r}; every module must "
                "run"
            )
    for t, slot in enumerate(slots):
        for name in () if slot.placed else graph.topological:
            gpus = [gpu for gpu in sorted(slot.quotas) if name in slot.quotas[gpu]]
            if gpus:
                for gpu, samples in zip(gpus, deal(Range(0, batch), len(gpus)), strict=True):
                    shares.append(_Share(name, t, gpu, samples))
    return shares


def _check_order(graph: ModuleGraph, shares: Sequence[_Share]) -> None:
    for producer, reader in graph.edges:
        last = max(s.slot for s in shares if s.node == producer)
        first = min(s.slot for s in shares if s.node == reader)
        if first <= last:
            raise MultiplexError(
                f"stages[{first}] has {reader!r}, which reads {producer!r}; that must be complete "
                "in an earlier stage"
            )


def _needs(
    graph: ModuleGraph, shares: Sequence[_Share], batch: int
) -> dict[tuple[str, int], tuple[Range, ...]]:
    reads: dict[tuple[str, int], list[Range]] = {}
    for share in shares:
        if share.samples:
            for producer in graph.producers(share.node):
                whole_batch = (producer, share.node) in graph.every
                samples = Range(0, batch) if whole_batch else share.samples
                reads.setdefault((producer, share.gpu), []).append(samples)
    return {place: union(ranges) for place, ranges in sorted(reads.items())}


_Transfers = dict[int, dict[int, tuple[list[SampleTransfer], list[SampleTransfer]]]]


def _moves(
    shares: Sequence[_Share], needs: ByName[tuple[str, int], tuple[Range, ...]]
) -> list[tuple[_Share, int, Range]]:
    """(part that is made, GPU that reads it, samples), in an order common to all GPUs."""
    reads = []
    for (name, gpu), ranges in needs.items():
        for share in shares:
            if share.node == name:
                both = [share.samples.meet(needed) for needed in ranges]
                reads += [(share, gpu, samples) for samples in both if samples]
    return reads


def _routes(
    shares: Sequence[_Share], needs: ByName[tuple[str, int], tuple[Range, ...]]
) -> _Transfers:
    """Outputs leave in the slot that makes them."""
    transfers: _Transfers = {}
    for share, gpu, samples in _moves(shares, needs):
        _put(transfers, share.slot, share.node, share.gpu, gpu, samples)
    return transfers


def _gradient_routes(
    graph: ModuleGraph,
    shares: Sequence[_Share],
    needs: ByName[tuple[str, int], tuple[Range, ...]],
) -> _Transfers:
    """Gradients leave a GPU in the slot that adds the last part to them there."""
    transfers: _Transfers = {}
    for share, gpu, samples in _moves(shares, needs):
        if share.node in graph.backward:
            readers = graph.consumers(share.node)
            slot = min(s.slot for s in shares if s.gpu == gpu and s.node in readers and s.samples)
            _put(transfers, slot, share.node, gpu, share.gpu, samples)
    return transfers


def _put(
    transfers: _Transfers, slot: int, node: str, sender: int, receiver: int, samples: Range
) -> None:
    there = transfers.setdefault(slot, {})
    if sender != receiver:
        there.setdefault(sender, ([], []))[0].append(SampleTransfer(node, receiver, samples))
    there.setdefault(receiver, ([], []))[1].append(SampleTransfer(node, sender, samples))
