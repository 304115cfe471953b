"""What one GPU sends and receives in an iteration: outputs to their readers, gradients back.

It keeps what the GPU's parts have made and what it has got of others until it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from raymm.actors.modules.node import Tensors
from raymm.actors.multiplexed.device import Device
from raymm.actors.multiplexed.incoming import Incoming, flagged
from raymm.actors.multiplexed.iteration_meta import GpuProgram, IterationMeta
from raymm.actors.multiplexed.messages import Messages
from raymm.actors.multiplexed.samples import LAYOUT_BYTES, KnownLayout, Layout, Samples, empty
from raymm.actors.quota import Output
from raymm.kernels.collectives.waiting import Waitable, wait
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.graph.sample_ranges import Range
from raymm.scheduler.multiplex.instructions import Part, Route, SampleTransfer


class PartOutput(NamedTuple):
    """A part that went forward: what it handed on, its leaves, and the forward itself."""

    values: Tensors
    leaves: dict[tuple[str, bool], Tensors]
    output: Output


class Routes:
    """Carries out an iteration's routes.

    Args:
        device: the GPU, with its modules.
        program: its instructions.
        meta: of the iteration.

    Attributes:
        samples: by node, what was received or kept of its output.
        outputs: of parts that went forward and not yet back.
    """

    def __init__(self, device: Device, program: GpuProgram, meta: IterationMeta) -> None:
        self._device, self._program, self._meta = device, program, meta
        self.samples: dict[str, Samples] = {}
        self.outputs: dict[Part, PartOutput] = {}
        self._incoming: dict[Part, list[tuple[int, Incoming]]] = {}

    def _rows(self, part: Part | SampleTransfer) -> Range:
        return self._meta.rows(part.node, part.samples)

    def run(self, route: Route) -> None:
        """Start all messages of a route. What arrives is waited for where it is used.

        Raises:
            OutputError: GPUs say different things of what a node hands on.
        """
        if route.direction is Direction.FORWARD:
            self._route_outputs(route)
        else:
            self._route_gradients(route)

    def _route_outputs(self, route: Route) -> None:
        layouts = self._layouts(route)
        me, sends = self._program.gpu, []
        for transfer in self._filled(route.sends):
            tensors = self._sent(transfer)
            sends += [(transfer.peer, tensor) for tensor in tensors.values()]
        receives: list[tuple[Samples, int, torch.Tensor]] = []
        for transfer in self._filled(route.receives):
            node = transfer.node
            if node not in self.samples:
                needed = (self._meta.rows(node, part) for part in self._program.needs[node])
                self.samples[node] = Samples(
                    layouts[node], [rows for rows in needed if rows], self._device.device
                )
            held, rows = self.samples[node], self._rows(transfer)
            if transfer.peer == me:
                held.put(rows, self._sent(transfer))
            else:
                receives += [(held, transfer.peer, t) for t in held.values(rows).values()]
        works = self._start(sends, [(peer, tensor) for _, peer, tensor in receives])
        for (held, _, _), writes in zip(receives, works, strict=True):
            held.await_writes(writes)

    def _layouts(self, route: Route) -> dict[str, Layout]:
        """Layouts of what is received. The first time, others tell.

        Raises:
            OutputError: GPUs, or this one at different times, say different things of a node.
        """
        key, cache, me = self._meta.layout, self._device.layouts, self._program.gpu

        def note(node: str, layout: Layout, gpu: int) -> None:
            cache.setdefault((key, node), KnownLayout(layout, gpu)).check(node, layout, gpu)

        for node, samples in {(p.node, p.samples) for p in self._own_transfers(route)}:
            note(node, Layout.of(self._part_with(node, samples)[1].values), me)
        if self._meta.new_layout:
            device = self._device.device
            pairs = dict.fromkeys((p.node, p.peer) for p in self._filled(route.sends))
            sends = [(peer, cache[key, node].layout.encode().to(device)) for node, peer in pairs]
            unknown = dict.fromkeys(
                (p.node, p.peer) for p in self._filled(route.receives) if p.peer != me
            )
            receives = [
                (peer, torch.empty(LAYOUT_BYTES, dtype=torch.uint8, device=device))
                for _, peer in unknown
            ]
            works = self._start(sends, receives)
            for (node, peer), (_, data), waits in zip(unknown, receives, works, strict=True):
                for work in waits:
                    wait(work)
                note(node, Layout.decode(data), peer)
        return {p.node: cache[key, p.node].layout for p in self._filled(route.receives)}

    def _own_transfers(self, route: Route) -> list[SampleTransfer]:
        kept = [transfer for transfer in route.receives if transfer.peer == self._program.gpu]
        return self._filled((*route.sends, *kept))

    def _filled(self, transfers: Sequence[SampleTransfer]) -> list[SampleTransfer]:
        """Those that there is anything of."""
        return [transfer for transfer in transfers if self._rows(transfer)]

    def _part_with(self, node: str, samples: Range) -> tuple[Part, PartOutput]:
        for part, output in self.outputs.items():
            if part.node == node and part.samples.holds(samples):
                return part, output
        raise IndexError(f"samples {samples} of {node!r} were not made here")

    def _sent(self, transfer: SampleTransfer) -> Tensors:
        part, output = self._part_with(transfer.node, transfer.samples)
        rows = self._rows(transfer)
        lo = rows.lo - self._rows(part).lo
        return {name: t[lo : lo + rows.size] for name, t in output.values.items()}

    def _route_gradients(self, route: Route) -> None:
        me = self._program.gpu
        sends: list[tuple[int, torch.Tensor]] = []
        flags: dict[int, list[bool]] = {}
        for transfer in self._filled(route.sends):
            held = self.samples[transfer.node]
            for name, gradient in held.gradient(self._rows(transfer)).items():
                sends.append((transfer.peer, gradient))
                flags.setdefault(transfer.peer, []).append(name in held.present)
        coming: list[tuple[SampleTransfer, Tensors]] = []
        for transfer in self._filled(route.receives):
            if transfer.peer == me:
                held = self.samples[transfer.node]
                gradients, present = held.gradient(self._rows(transfer)), frozenset(held.present)
                self._expect(transfer, gradients, [], lambda present=present: present)
            else:
                layout = Layout.of(self._part_with(transfer.node, transfer.samples)[1].values)
                buffers = empty(layout.gradients, self._rows(transfer).size, self._device.device)
                coming.append((transfer, buffers))
        works = iter(self._start(
            sends, [(transfer.peer, t) for transfer, buffers in coming for t in buffers.values()]
        ))
        counts: Counter[int] = Counter()
        for transfer, buffers in coming:
            counts[transfer.peer] += len(buffers)
        received_flags = self._messages.start_flags(flags, +counts) if flags or +counts else {}
        first: Counter[int] = Counter()
        for transfer, buffers in coming:
            peer = transfer.peer
            present = partial(flagged, received_flags.get(peer), first[peer], tuple(buffers))
            first[peer] += len(buffers)
            self._expect(transfer, buffers, [w for _ in buffers for w in next(works)], present)

    @property
    def _messages(self) -> Messages:
        messages = self._device.messages
        assert messages is not None  # there is another GPU that something is sent to
        return messages

    def _expect(
        self, transfer: SampleTransfer, gradients: Tensors, works: list[Waitable],
        present: Callable[[], frozenset[str]],
    ) -> None:  # fmt: skip
        part, _ = self._part_with(transfer.node, transfer.samples)
        incoming = Incoming(self._rows(transfer), gradients, works, present)
        self._incoming.setdefault(part, []).append((transfer.peer, incoming))

    def _start(
        self, sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[list[Waitable]]:  # fmt: skip
        if not sends and not receives:
            return []
        return self._messages.start(sends, receives)

    def gradient(self, part: Part, values: Tensors) -> Tensors:
        """The sum of what readers have of a part's gradient, in the order of their GPUs.

        Args:
            part: one that went forward here; it is asked for once.
            values: its outputs by name.

        Returns:
            Gradients by name, without the outputs that no reader has a gradient for, as in one
            process: the optimizer leaves what only they depend on alone.
        """
        total: Tensors = {}
        for _, incoming in sorted(self._incoming.pop(part, []), key=lambda pair: pair[0]):
            incoming.add_to(total, values, self._rows(part).lo)
        return {name: total[name] for name in values if name in total}
