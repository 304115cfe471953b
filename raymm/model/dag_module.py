"""Nodes of a graph of modules: a module or a loss, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.blocks import num_blocks
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.modules.node import OWN, Input, NodeSpec
from raymm.actors.modules.noise import Noise
from raymm.actors.stages.encoder import EncoderStage
from raymm.actors.stages.node import NodeStageSpec
from raymm.actors.weights.source import LiveSource, on_meta
from raymm.errors import ModelError
from raymm.model.encoder_trial import skeleton_chain
from raymm.model.modality_module import ModalityModule, check_weights
from raymm.model.multimodal import light_encoder_spec
from raymm.model.trainable_layers import any_trainable, trainable_blocks


class Every(NamedTuple):
    """An input with all samples of the batch; see :func:`every`."""

    producer: str


def every(producer: str) -> Every:
    """Return an input that has a module's output for all samples of the batch.

    The reader also receives ``own``, the slice of the samples that it works on. Gradients of all
    samples count; those of several processes are summed.
    """
    return Every(producer)


class DagModule:
    """A module of a graph. It must not change its inputs in place, since other modules may read the
    same memory at the same time.

    Args:
        module: anything that :class:`raymm.ModalityModule` accepts, or a ``ModalityModule`` with a
            live projector or none, whose output are its features (samples, tokens, width).
        reads: entries of the batch that are keyword arguments of the same names, or a mapping of
            keywords to entries.
        inputs: keyword arguments that other modules compute: a module's name, ``"name.output"`` for
            one of its outputs, or :func:`every` of either.
        outputs: named outputs that readers receive, as a tensor if there is one, else as a
            dictionary. By default all outputs, or those that readers name if all of them name one.
        noise: keyword arguments with random values, each :func:`raymm.normal_noise` or
            :func:`raymm.uniform_noise`. The noise of a sample depends only on the run's seed, the
            step and its number in the step, not on the layout.
        frozen: see :class:`raymm.ModalityModule`.
        postprocess: ``f(arguments, output) -> output`` after the module.
        draws: True if the module draws random numbers; such modules are launched one after another.
            By default True if the module is trainable and hence in training mode. Set it for
            modules that also draw in evaluation (such as a variational encoder).
        model_class, seed: see :class:`raymm.ModalityModule`.
        example_inputs: keyword arguments of the forward, for the probe of cuts; guessed if None.

    Raises:
        ModelError: names the argument and what is accepted.
    """

    loss = False

    def __init__(
        self,
        module: Any,
        *,
        reads: str | Sequence[str] | Mapping[str, str] = (),
        inputs: Mapping[str, str | Every] | None = None,
        outputs: str | Sequence[str] = (),
        noise: Mapping[str, Noise] | None = None,
        frozen: bool | None = None,
        postprocess: Callable[[dict[str, Any], Any], Any] | None = None,
        draws: bool | None = None,
        model_class: Any = None,
        seed: int = 0,
        example_inputs: dict[str, torch.Tensor] | None = None,
    ) -> None:
        if isinstance(reads, str):
            reads = (reads,)
        _check_names(reads, inputs)
        self.reads = dict(reads) if isinstance(reads, Mapping) else {name: name for name in reads}
        self.inputs = dict(inputs or {})
        self.outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self.postprocess = postprocess
        self.draws = draws
        if duplicates := self.reads.keys() & self.inputs.keys():
            raise ModelError(f"keywords {sorted(duplicates)} are in both reads and inputs")
        self.noise = dict(noise or {})
        _check_noise(self.noise, self.reads.keys() | self.inputs.keys())
        reads_every = any(isinstance(value, Every) for value in self.inputs.values())
        if reads_every and OWN in self.reads.keys() | self.inputs.keys():
            raise ModelError(
                f"keyword {OWN!r} is in reads or inputs of a module that reads every(), which "
                "receives the slice of its samples under it; accepted: other keywords"
            )
        self.chain = isinstance(module, ModalityModule)
        if self.chain:
            if frozen is not None:
                raise ModelError("frozen is given twice; give it to the ModalityModule")
            if module._projector_kind is not None and module.projector is None:
                raise ModelError(
                    f"projector is {module._projector_kind!r}, whose output width is unknown in a "
                    "graph; accepted: an nn.Module, None"
                )
            self.modality = module
        else:
            self.modality = ModalityModule(
                module, frozen=frozen, model_class=model_class, seed=seed,
                example_inputs=example_inputs,
            )
        check_weights("a module of the graph", self.modality.source())

    def parsed_inputs(self) -> tuple[Input, ...]:
        """Return the inputs with producer and output separated."""
        parsed = []
        for keyword, value in self.inputs.items():
            is_every = isinstance(value, Every)
            producer, _, output = (value.producer if is_every else value).partition(".")
            parsed.append(Input(keyword, producer, output or None, is_every))
        return tuple(parsed)

    def stage_spec(self, name: str, node: NodeSpec | None = None) -> NodeStageSpec:
        """Return the spec that stages of the module are built from."""
        modality, source = self.modality, self.modality.source()
        blocks = num_blocks(source.skeleton())
        if not self.chain:
            return NodeStageSpec(
                name, source, blocks, postprocess_module=self.postprocess, node=node
            )
        projector = None if modality.projector is None else LiveSource.of(modality.projector)
        return NodeStageSpec(
            name, source, blocks, projector, modality.preprocess_callback,
            modality.postprocess_module_callback, modality.postprocess_projector_callback,
            node=node, chain=True,
        )

    def parameter_name(self, name: str) -> str:
        """Return the name in :class:`raymm.ModuleDag` of a parameter that stages call ``name``."""
        return f"chain.{name}" if self.chain else name.removeprefix("module.")

    def skeleton(self, name: str) -> nn.Module:
        """Return the module on the meta device, with projector and callbacks."""
        if not self.chain:
            return on_meta(self.modality.source().skeleton()).to("meta")
        return _Chain(skeleton_chain(self.stage_spec(name)))

    def layers(self) -> tuple[bool, ...]:
        """Return for every layer whether it has a trainable parameter: blocks (or the whole module,
        if there are none), then the projector."""
        skeleton, projector = self.modality.source().skeleton(), self.modality.projector
        flags = trainable_blocks(skeleton, num_blocks(skeleton))
        return flags if projector is None else (*flags, any_trainable(projector))

    def materialize(self, name: str) -> nn.Module:
        """Return the module with its weights in this process."""
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


def _check_noise(noise: Mapping[str, Any], arguments: Collection[str]) -> None:
    for keyword, value in noise.items():
        if not isinstance(keyword, str) or not isinstance(value, Noise):
            raise ModelError(
                f"noise has {value!r} for keyword {keyword!r}; accepted: normal_noise() or "
                "uniform_noise()"
            )
        if keyword in arguments:
            raise ModelError(f"keyword {keyword!r} is in noise and in reads or inputs")
        if value.like is not None and value.like not in arguments:
            raise ModelError(
                f"noise {keyword!r} is like {value.like!r}; accepted: "
                f"{', '.join(sorted(arguments))}"
            )


class DagLoss(DagModule):
    """A loss, or a decoder that computes a loss. It returns (b,), the losses of its samples, or, if
    other modules read named outputs of it, a dictionary of these and ``"loss"``.

    The model's loss is the sum over all losses of ``weight`` times the mean over the batch.

    Args:
        module, **options: see :class:`DagModule`.
        divide_by: entry of the batch whose sum divides the samples' losses, such as their numbers
            of label tokens; by default the number of samples.
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


class _Chain(nn.Module):
    """An encoder with its projector and callbacks, from keyword arguments to features."""

    def __init__(self, chain: EncoderStage) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.chain.run(inputs, {}, MicrobatchContext(0)).tensors[0]
