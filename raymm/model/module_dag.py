"""A model as a graph of light modules: towers, backbones, decoders, losses.

The graph describes models for :class:`raymm.ParallelModel`, such as CLIP, ImageBind and OFASys.
Samples are in dimension 0 of all tensors that modules pass to each other::

    dag = ModuleDag({
        "image": DagModule(vision, reads="pixel_values", outputs="image_embeds"),
        "text": DagModule(text, reads=("input_ids", "attention_mask"), outputs="text_embeds"),
        "contrastive": DagLoss(
            ContrastiveLoss(), inputs={"first": every("image"), "second": every("text")}
        ),
    })
    dag(batch).loss.backward()      # in this process: the reference
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import cast

import torch
from torch import nn

from raymm.actors.modules.node import ONLY, NodeSpec, call
from raymm.actors.modules.noise import SampleSeeds
from raymm.actors.stages.node import NodeStageSpec
from raymm.errors import ModelError
from raymm.model.dag_module import DagLoss, DagModule
from raymm.model.features import FILES, PIPELINED_PLANS, Kind
from raymm.model.modality_module import ModalityModel, ModalityModule
from raymm.model.module import Module, NodeModule
from raymm.model.ports import node_ports
from raymm.model.trainable_layers import counted
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.graph.sample_ranges import Range


@dataclass(frozen=True)
class DagOutput:
    """Result of a forward: the loss (scalar) and its summands by name."""

    loss: torch.Tensor
    losses: dict[str, torch.Tensor]


class ModuleDag(nn.Module, ModalityModel):
    """A model as a graph of modules and losses. ``forward`` runs the graph in this process.

    Args:
        nodes: by name; names are identifiers.

    Raises:
        ModelError, PlanError: names that are unknown or not identifiers, a cycle, modules that no
            loss depends on, or modules that share parameters.
    """

    kind = Kind.GRAPH

    def __init__(self, nodes: Mapping[str, DagModule]) -> None:
        super().__init__()
        for name, node in nodes.items():
            if not isinstance(node, DagModule):
                raise ModelError(
                    f"node {name!r} is a {type(node).__name__}; accepted: DagModule, DagLoss"
                )
        self.nodes = dict(nodes)
        self.graph = _graph(nodes)
        self._handed_on = {name: self._outputs(name) for name in nodes}
        self.check_unshared()
        for name in nodes:  # last, so that names are compared with all attributes
            if not name.isidentifier() or hasattr(self, name):
                raise ModelError(
                    f"a node is named {name!r}; accepted: an identifier that is not an attribute "
                    "of ModuleDag"
                )

    def _outputs(self, name: str) -> tuple[str, ...]:
        """Return the outputs of a module that others read. Others are not sent: they would cost
        time, and add a backward that one process lacks."""
        read = [
            (reader, entry.output) for reader, reader_node in self.nodes.items()
            for entry in reader_node.parsed_inputs() if entry.producer == name
        ]
        names = self.nodes[name].outputs
        for reader, output in read:
            if output is not None and names and output not in names:
                raise ModelError(
                    f"{reader!r} reads output {output!r} of {name!r}; accepted: {', '.join(names)}"
                )
        if self.nodes[name].loss:
            if readers := [reader for reader, output in read if output is None]:
                raise ModelError(
                    f"node {readers[0]!r} reads {name!r}, which is a loss; accepted: one of its "
                    f"other outputs, '{name}.output'"
                )
        elif not read or None in (output for _, output in read):
            return names
        return tuple(dict.fromkeys(output for _, output in read if output is not None))

    def graph_with_ports(self, cut: Collection[str]) -> ModuleGraph:
        """Return the graph with ports: inputs from other modules that inner layers of the ``cut``
        modules read. Raises ProbeError if a module does not run on its example inputs."""
        ports = [
            port for name in cut
            for port in node_ports(
                self.spec(name), self._handed_on, self.graph.backward,
                self.nodes[name].modality.example_inputs,
            )
        ]
        return replace(self.graph, ports=tuple(ports))

    def materialize(self) -> ModuleDag:
        """Load all weights into this process. ``forward`` does so when needed."""
        for name in self.graph.topological:
            if name not in self._modules:
                self.add_module(name, self.nodes[name].materialize(name))
        return self

    def batch_size(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of samples of a batch. Raises ModelError if an entry is missing, or
        entries have different numbers of samples."""
        readers = {e: n for n, node in self.nodes.items() for e in node.reads.values()}
        for name, node in self.nodes.items():
            if isinstance(node, DagLoss) and node.divide_by is not None:
                readers[node.divide_by] = name
        sizes: dict[str, int] = {}
        for entry, name in readers.items():
            value = batch.get(entry)
            if not isinstance(value, torch.Tensor) or not value.dim():
                raise ModelError(
                    f"{name!r} reads entry {entry!r} of the batch, which is "
                    f"{'missing' if value is None else f'a {type(value).__name__}'}; accepted: a "
                    "tensor with samples in dimension 0"
                )
            sizes[entry] = value.shape[0]
        if len(set(sizes.values())) != 1 or not min(sizes.values()):
            raise ModelError(
                f"entries of the batch have {sizes} samples; accepted: the same number, at least 1"
            )
        return next(iter(sizes.values()))

    def divisors(self, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return what the sum of each loss over a batch's samples counts as: their number, or the
        sum of the entry ``divide_by``. Raises ModelError for a batch that is not accepted."""
        size = self.batch_size(batch)
        return {
            name: float(size if node.divide_by is None else batch[node.divide_by].sum())
            for name, node in self.nodes.items() if isinstance(node, DagLoss)
        }

    def scales(self, *batches: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return :meth:`loss_factors` of the samples of all batches. Raises ModelError for a batch
        that is not accepted."""
        return self.loss_factors(list(map(self.divisors, batches)))

    def loss_factors(self, divisors: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the factor of each loss's sum over the samples of all batches, from their
        :meth:`divisors`. Raises ModelError if these sum to 0 or are not finite."""
        scales = {}
        for name, node in self.nodes.items():
            if isinstance(node, DagLoss):
                total = sum(of_batch[name] for of_batch in divisors)
                if not isfinite(total) or not total:
                    raise ModelError(
                        f"loss {name!r} is divided by entry {node.divide_by!r}, which sums to "
                        f"{total:g}; accepted: a finite sum other than 0"
                    )
                scales[name] = node.weight / total
        return scales

    def forward(
        self, batch: Mapping[str, torch.Tensor], seeds: SampleSeeds | None = None
    ) -> DagOutput:
        """Return the loss of a batch with entries (samples, ...), computed in this process.

        Args:
            seeds: seeds of noise; None for those of evaluation.

        Raises:
            ModelError: the batch or the output of a module is not accepted.
        """
        self.materialize()
        samples = Range(0, self.batch_size(batch))
        scales = self.scales(batch)
        outputs: dict[str, dict[str, torch.Tensor]] = {}
        losses = {}
        for name, spec in self.specs().items():
            outputs[name] = call(
                spec, self.get_submodule(name), batch, outputs, outputs, samples, seeds
            )
            if spec.loss:
                losses[name] = outputs[name][ONLY].sum() * scales[name]
        return DagOutput(cast(torch.Tensor, sum(losses.values())), losses)

    @property
    def modalities(self) -> dict[str, ModalityModule]:
        return {name: node.modality for name, node in self.nodes.items()}

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def set_frozen(self, name: str, frozen: bool) -> None:
        super().set_frozen(name, frozen)
        self.graph = _graph(self.nodes)

    def check_run(self, from_files: bool, planned: bool) -> None:
        if from_files:
            self.require(FILES, "data is a DataConfig")
        if not planned:
            self.require(PIPELINED_PLANS, "parallel is neither a plan nor a mapping")

    def parameter_counts(self) -> dict[str, tuple[int, int]]:
        return {
            name: counted(node.skeleton(name).parameters()) for name, node in self.nodes.items()
        }

    def parameter_name(self, module: str, name: str) -> str:
        return f"{module}.{self.nodes[module].parameter_name(name)}"

    def module(self, name: str) -> Module:
        node = self.nodes[name]
        return NodeModule(
            self.spec(name), node.modality.example_inputs,
            any(read.every for read in node.parsed_inputs()), self.graph.backward,
        )

    def spec(self, name: str) -> NodeStageSpec:
        return self.nodes[name].stage_spec(name, self.specs()[name])

    def specs(self) -> dict[str, NodeSpec]:
        """Return the inputs and outputs of nodes, in the graph's order."""
        return {
            name: NodeSpec(
                name, tuple(node.reads.items()), node.parsed_inputs(), self._handed_on[name],
                node.postprocess, node.loss, node.draws, tuple(node.noise.items()),
            )
            for name, node in ((name, self.nodes[name]) for name in self.graph.topological)
        }


def _graph(nodes: Mapping[str, DagModule]) -> ModuleGraph:
    reads = {
        (entry.producer, name): False
        for name, node in nodes.items() for entry in node.parsed_inputs()
    }
    for name, node in nodes.items():
        for entry in node.parsed_inputs():
            producer = nodes.get(entry.producer)
            if producer is None:
                raise ModelError(
                    f"node {name!r} reads {entry.producer!r}; accepted: {', '.join(nodes)}"
                )
            reads[entry.producer, name] |= entry.every
    if not any(node.loss for node in nodes.values()):
        raise ModelError(f"none of {list(nodes)} is a loss; accepted: at least one")
    return ModuleGraph(
        tuple(
            ModuleNode(name, node.layers(), node.modality.projector is not None, node.loss)
            for name, node in nodes.items()
        ),
        tuple(reads), tuple(edge for edge, reads_every in reads.items() if reads_every),
    )
