"""Describing a model of several light modules as a graph: towers, backbones, decoders, losses.

For models that run multiplexed (:mod:`raymm.runtime.multiplexed_dag`): CLIP, ImageBind, OFASys and
the like. Samples are in dimension 0 of everything that modules hand to each other::

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from raymm.actors.modules.blocks import num_blocks
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.multiplexed.node import ONLY, OWN, Input, NodeSpec, call
from raymm.actors.quota import check_no_shared_parameters
from raymm.actors.stages.encoder import EncoderSpec, EncoderStage
from raymm.actors.weights.source import LiveSource, on_meta, set_mode
from raymm.model.encoder_trial import skeleton_chain
from raymm.model.modality_module import ModalityModule, ModelError, check_weights
from raymm.model.multimodal import light_encoder_spec
from raymm.scheduler.graph.node_graph import Node, NodeGraph, Use
from raymm.scheduler.graph.sample_ranges import Range


class Every(NamedTuple):
    """An input of all samples of the batch; see :func:`every`."""

    producer: str


def every(producer: str) -> Every:
    """As an input: what a module hands on for all samples of the batch, not only for those that
    the reader works on. Its module is also called with ``own``, the slice of those that are.
    Gradients of all samples count: those that several processes have are summed."""
    return Every(producer)


class DagModule:
    """A module of the graph. It must leave what it reads of others as it is: not change it in
    place, as others may read the same memory at the same time.

    Args:
        module: whatever :class:`raymm.ModalityModule` accepts, or one of those (with a live
            projector or none): it then hands on its features (samples, tokens, width).
        reads: entries of the batch that are its keyword arguments of the same names, or a
            mapping of keywords to entries.
        inputs: its keyword arguments that other modules make: a module's name, the name and one
            of its outputs as ``"name.output"``, or :func:`every` of either.
        outputs: what it hands on of the named values that it returns; by default all of them, or
            those that readers name if they all do. One output is handed on as a tensor, several
            as a dictionary.
        frozen: as of :class:`raymm.ModalityModule`.
        postprocess: ``f(arguments, output) -> output`` after the module.
        draws: whether it draws random numbers; by default if it has something trainable, and
            so is in training mode. Modules that do are issued one after another, not at the
            same time. One that draws in evaluation too (as of a variational encoder) must say so.
        model_class, seed: as of :class:`raymm.ModalityModule`.

    Raises:
        ModelError: naming the argument and what is accepted.
    """

    loss = False

    def __init__(
        self,
        module: Any,
        *,
        reads: str | Sequence[str] | Mapping[str, str] = (),
        inputs: Mapping[str, str | Every] | None = None,
        outputs: str | Sequence[str] = (),
        frozen: bool | None = None,
        postprocess: Callable[[dict[str, Any], Any], Any] | None = None,
        draws: bool | None = None,
        model_class: Any = None,
        seed: int = 0,
    ) -> None:
        if isinstance(reads, str):
            reads = (reads,)
        _check_names(reads, inputs)
        self.reads = dict(reads) if isinstance(reads, Mapping) else {name: name for name in reads}
        self.inputs = dict(inputs or {})
        self.outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self.postprocess = postprocess
        self.draws = draws
        if both := self.reads.keys() & self.inputs.keys():
            raise ModelError(f"keywords {sorted(both)} are in both reads and inputs")
        whole = any(isinstance(value, Every) for value in self.inputs.values())
        if whole and OWN in self.reads.keys() | self.inputs.keys():
            raise ModelError(
                f"keyword {OWN!r} is in reads or inputs of a module that reads every(), which is "
                "told its own samples by it; accepted: other keywords"
            )
        self.chain = isinstance(module, ModalityModule)
        if self.chain:
            if frozen is not None:
                raise ModelError("frozen is given twice; give it to the ModalityModule")
            if module._projector_kind is not None and module.projector is None:
                raise ModelError(
                    f"projector is {module._projector_kind!r}, whose width nothing here says; "
                    "accepted: an nn.Module, None"
                )
            self.modality = module
        else:
            self.modality = ModalityModule(
                module, frozen=frozen, model_class=model_class, seed=seed
            )
        check_weights("a module of the graph", self.modality.source())

    def parsed_inputs(self) -> tuple[Input, ...]:
        """Inputs with producer and output apart."""
        parsed = []
        for keyword, value in self.inputs.items():
            whole = isinstance(value, Every)
            producer, _, output = (value.producer if whole else value).partition(".")
            parsed.append(Input(keyword, producer, output or None, whole))
        return tuple(parsed)

    def builder(self, name: str) -> Callable[[], nn.Module]:
        """A picklable function that makes the module with its weights."""
        source = self.modality.source()
        if not self.chain:
            return source.build
        modality = self.modality
        projector = None if modality.projector is None else LiveSource.of(modality.projector)
        return partial(_build_chain, EncoderSpec(
            name, source, num_blocks(source.skeleton()), projector, modality.preprocess_callback,
            modality.postprocess_module_callback, modality.postprocess_projector_callback,
        ))

    def skeleton(self, name: str) -> nn.Module:
        """The module on the meta device, with projector and callbacks."""
        if not self.chain:
            return on_meta(self.modality.source().skeleton()).to("meta")
        (spec,) = self.builder(name).args
        return _Chain(skeleton_chain(spec))

    def trainable(self) -> bool:
        """Whether anything in it is."""
        parts = [self.modality.source().skeleton(), self.modality.projector]
        return any(p.requires_grad for part in parts if part for p in part.parameters())

    def materialize(self, name: str) -> nn.Module:
        """The module in this process."""
        modality = self.modality
        module = modality.materialize()
        if not self.chain:
            return module
        spec, projector = light_encoder_spec(name, modality), modality.projector
        return _Chain(EncoderStage(spec, 0, 2, module, projector))


def _check_names(reads: Any, inputs: Any) -> None:
    listed = reads.items() if isinstance(reads, Mapping) else reads
    pairs = isinstance(reads, Mapping)
    if not isinstance(reads, Mapping | Sequence) or not all(
        isinstance(name, str) for value in listed for name in (value if pairs else (value,))
    ):
        raise ModelError(
            f"reads is {reads!r}; accepted: names of entries of the batch, or a mapping of "
            "keywords to them"
        )
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ModelError(f"inputs is {inputs!r}; accepted: a mapping of keywords to modules")
    for keyword, value in (inputs or {}).items():
        name = value.producer if isinstance(value, Every) else value
        if not isinstance(keyword, str) or not isinstance(name, str):
            raise ModelError(
                f"inputs have {value!r} for keyword {keyword!r}; accepted: a module's name, "
                "'name.output', every() of either"
            )


class DagLoss(DagModule):
    """A loss, or a decoder with a loss of its own: it returns (b,), the losses of its samples.

    The model's loss is the sum over all of them of ``weight`` times the mean over the batch.

    Args:
        module: as of :class:`DagModule`, like all other arguments.
        weight: of this loss.
        divide_by: entry of the batch whose sum the samples' losses are divided by (such as
            their numbers of label tokens); by default the number of samples.
        **options: as of :class:`DagModule`.
    """

    loss = True

    def __init__(
        self, module: Any, *, weight: float = 1.0, divide_by: str | None = None, **options: Any
    ) -> None:
        super().__init__(module, **options)
        if not isinstance(weight, Real) or isinstance(weight, bool) or not isfinite(weight):
            raise ModelError(f"weight is {weight!r}; accepted: a finite number")
        if divide_by is not None and not isinstance(divide_by, str):
            raise ModelError(f"divide_by is {divide_by!r}; accepted: an entry of the batch, None")
        self.weight = weight
        self.divide_by = divide_by


@dataclass(frozen=True)
class DagOutput:
    """What a forward gives: the loss (scalar) and what it is the sum of."""

    loss: torch.Tensor
    losses: dict[str, torch.Tensor]


class ModuleDag(nn.Module):
    """A model as a graph of modules and losses. ``forward`` runs it in this process.

    Args:
        nodes: by name; names are identifiers.

    Raises:
        ModelError, MultiplexError: names that are not known or no identifiers, a cycle, modules
            that no loss depends on, modules that share parameters.
    """

    def __init__(self, nodes: Mapping[str, DagModule]) -> None:
        super().__init__()
        for name, node in nodes.items():
            if not isinstance(node, DagModule):
                raise ModelError(
                    f"node {name!r} is a {type(node).__name__}; accepted: DagModule, DagLoss"
                )
        self.nodes = dict(nodes)
        self.graph = NodeGraph(tuple(
            Node(
                name, tuple(Use(entry.producer, entry.every) for entry in node.parsed_inputs()),
                node.trainable(), node.loss,
            )
            for name, node in nodes.items()
        ))
        self._handed_on = {name: self._outputs(name) for name in nodes}
        live = {n: node.modality.module for n, node in nodes.items()}
        live |= {f"{n} projector": node.modality.projector for n, node in nodes.items()}
        try:
            check_no_shared_parameters({n: entry for n, entry in live.items() if entry is not None})
        except ValueError as error:
            raise ModelError(str(error)) from error
        for name in nodes:  # last: they must not be among the attributes that are set here
            if not name.isidentifier() or hasattr(self, name):
                raise ModelError(
                    f"a node is named {name!r}; it must be an identifier, and no attribute of "
                    "ModuleDag"
                )

    def _outputs(self, name: str) -> tuple[str, ...]:
        """What a module hands on. What nobody reads stays where it is: it would be sent for
        nothing, and be in a backward that one process does not have."""
        read = [
            (reader, entry.output) for reader, other in self.nodes.items()
            for entry in other.parsed_inputs() if entry.producer == name
        ]
        names = self.nodes[name].outputs
        for reader, output in read:
            if output is not None and names and output not in names:
                raise ModelError(
                    f"{reader!r} reads output {output!r} of {name!r}; accepted: {', '.join(names)}"
                )
        if not read or None in (output for _, output in read):
            return names
        return tuple(dict.fromkeys(output for _, output in read if output is not None))

    def specs(self) -> dict[str, NodeSpec]:
        """Nodes as data for processes, in the graph's order."""
        return {
            name: NodeSpec(
                name, self.nodes[name].builder(name), tuple(self.nodes[name].reads.items()),
                self.nodes[name].parsed_inputs(), self._handed_on[name],
                self.nodes[name].postprocess, self.nodes[name].loss, self.nodes[name].draws,
            )
            for name in self.graph.order
        }

    def materialize(self) -> ModuleDag:
        """Load all weights into this process (``forward`` does it when needed)."""
        for name in self.graph.order:
            if name not in self._modules:
                self.add_module(name, self.nodes[name].materialize(name))
        return self

    def batch_size(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Samples of a batch.

        Raises:
            ModelError: an entry that a module reads is missing, or entries differ in samples.
        """
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

    def scales(self, *batches: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """What the sum of each loss over the samples of all batches is multiplied with.

        Raises:
            ModelError: a batch that does not fit, or whose ``divide_by`` sums to 0.
        """
        size = sum(self.batch_size(batch) for batch in batches)
        scales = {}
        for name, node in self.nodes.items():
            if isinstance(node, DagLoss):
                total = float(size)
                if node.divide_by is not None:
                    total = sum(float(batch[node.divide_by].sum()) for batch in batches)
                if not isfinite(total) or not total:
                    raise ModelError(
                        f"loss {name!r} is divided by entry {node.divide_by!r}, which sums to "
                        f"{total:g}; accepted: any other number than 0"
                    )
                scales[name] = node.weight / total
        return scales

    def forward(self, batch: Mapping[str, torch.Tensor]) -> DagOutput:
        """The loss of a batch, in this process.

        Args:
            batch: entries (samples, ...).

        Raises:
            ModelError: a batch that does not fit.
            OutputError: what modules return does not.
        """
        self.materialize()
        samples = Range(0, self.batch_size(batch))
        scales = self.scales(batch)
        outputs: dict[str, dict[str, torch.Tensor]] = {}
        losses = {}
        for name, spec in self.reference_specs().items():
            outputs[name] = call(spec, self.get_submodule(name), batch, outputs, outputs, samples)
            if spec.loss:
                losses[name] = outputs[name][ONLY].sum() * scales[name]
        return DagOutput(cast(torch.Tensor, sum(losses.values())), losses)

    def reference_specs(self) -> dict[str, NodeSpec]:
        """:meth:`specs` without the weights."""
        return {
            name: NodeSpec(
                name, nn.Identity, tuple(node.reads.items()), node.parsed_inputs(),
                self._handed_on[name],
                node.postprocess, node.loss, node.draws,
            )
            for name, node in ((name, self.nodes[name]) for name in self.graph.order)
        }


class _Chain(nn.Module):
    """An encoder with its projector and callbacks: keyword arguments to features."""

    def __init__(self, chain: EncoderStage) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.chain.run(inputs, {}, MicrobatchContext(0)).tensors[0]


def _build_chain(spec: EncoderSpec) -> nn.Module:
    return _set_mode_of_parts(_Chain(EncoderStage.build(spec, 0, spec.num_layers)))


def _set_mode_of_parts(chain: _Chain) -> nn.Module:
    """Encoder and projector each in training mode if anything in it is trainable."""
    for part in (chain.chain.module, chain.chain.projector):
        if part is not None:
            set_mode(part)
    return chain
