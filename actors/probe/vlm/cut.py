"""Probe of how the towers and the language model of a Hugging Face VLM can be cut.

A small copy runs complete and in stages, as in :mod:`raymm.actors.probe.stage_comparison`. Block
outputs that code outside their stage reads (features of several layers) are relayed, and so are
tower features that later stages of the language model read (deepstack, cross attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.cut import CutInfo, PassThrough, prune
from raymm.actors.modules.merge import Prepend
from raymm.actors.probe.cut import ghost_inputs, of_one_that_runs
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.stage_comparison import Run, compare_stages, uncut_forward
from raymm.actors.probe.vlm.towers import Tower, as_copied
from raymm.actors.probe.vlm.trials import LanguageTrial, TowerTrial
from raymm.actors.stages.tower import TowerSpec
from raymm.actors.stages.vlm_language import TowerPort, VlmLanguageSpec
from raymm.actors.weights.model_part import PartSource
from raymm.actors.weights.source import ModuleSource, initialize_by_name, set_tensor
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

_ONE_STAGE = "give it one stage (pp 1)"
Inputs = Mapping[str, Any]


def tower_source(
    source: ModuleSource, tower: Tower, frozen: bool = False, projector_frozen: bool = False
) -> PartSource:
    """Return the source of a tower; ``frozen`` does not include its projector."""
    encoder_names = tuple(name for name in tower.places if name not in tower.projector)
    return PartSource(
        source, tower.places, False, tower.call, tower.root,
        encoder_names * frozen + tower.projector * projector_frozen,
        () if projector_frozen else tower.projector, whole_forward=tower.whole_forward,
    )


def language_source(
    source: ModuleSource, towers: tuple[Tower, ...], frozen: bool = False,
    projector_frozen: bool = False,
) -> PartSource:
    """Return the source of a model without its towers; ``frozen`` does not include projectors."""
    behind = tuple(dict.fromkeys(name for tower in towers for name in tower.behind))
    return PartSource(
        source, tuple(name for tower in towers for name in tower.places), True,
        frozen_places=behind * projector_frozen,
        trained_places=() if projector_frozen else behind, frozen=frozen or None,
    )


def tower_spec(source: PartSource, tower: Tower, blocks: int) -> TowerSpec:
    """Return the description of an uncut tower."""
    return TowerSpec(tower.name, source, blocks, constants=tower.constants, form=tower.form)


def language_spec(
    name: str, source: PartSource, towers: tuple[Tower, ...], blocks: int
) -> VlmLanguageSpec:
    """Return the description of an uncut language model that reads these towers."""
    ports = tuple(TowerPort(tower.name, tower.call, tower.form) for tower in towers)
    return VlmLanguageSpec(name, source, blocks, Prepend(), towers=ports)


def cut_tower(spec: TowerSpec, inputs: Inputs) -> TowerSpec:
    """Return the spec of a tower with its cut.

    Raises:
        ProbeError: the tower cannot be cut.
    """
    def run_with(travels: frozenset[str]) -> Run:
        def run(stage: nn.Module, first: bool) -> torch.Tensor:
            trial = TowerTrial(spec, stage, inputs)
            shown = trial.inputs if first else ghost_inputs(trial.inputs, travels)
            return trial.read(stage, shown)

        return run

    floats = frozenset(
        name for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )

    def probe(model: nn.Module) -> tuple[CutInfo, frozenset[str]]:
        try:
            return _compare(model, spec.source, run_with(frozenset())), frozenset()
        except NotRunError:
            raise
        except ProbeError:
            return _compare(model, spec.source, run_with(floats)), floats

    cut, travels = of_one_that_runs(spec.source, probe)
    if cut.relayed:  # with the numbers of the tower's blocks at its own size
        cut = replace(cut, relayed=_read_in_own_size(
            cast(PartSource, spec.source), cut.blocks, cut.tuple_length,
            lambda model: run_with(travels)(model, True),
        ))
    return replace(spec, cut=cut, travels=travels)


def cut_language_model(
    spec: VlmLanguageSpec, towers: tuple[Tower, ...], inputs: Inputs
) -> VlmLanguageSpec:
    """Return the spec of a language model with its cut.

    Raises:
        ProbeError: the language model cannot be cut.
    """
    source = cast(PartSource, spec.source)

    def probe(whole: nn.Module) -> tuple[CutInfo, bool]:
        trial = LanguageTrial(spec, towers, whole, inputs)

        def run_with(relays: bool) -> Run:
            def run(stage: nn.Module, first: bool) -> torch.Tensor:
                features = trial.features
                if not first and not relays:
                    features = {name: torch.zeros_like(tensor) for name, tensor in features.items()}
                return trial.logits(stage, features)

            return run

        try:
            return _compare(trial.model, source, run_with(False)), False
        except NotRunError:
            raise
        except ProbeError:
            if not towers:
                raise
        return _compare(trial.model, source, run_with(True)), True

    cut, relays = of_one_that_runs(source.whole, probe)
    if cut.relayed:
        raise ProbeError(
            "the language model reads outputs of blocks far from those blocks, where stages do not "
            f"send them; {_ONE_STAGE}"
        )
    return replace(spec, cut=cut, relays=relays)


def _read_in_own_size(
    source: PartSource, blocks: str, tuple_length: int, run: Callable[[nn.Module], torch.Tensor]
) -> tuple[int, ...]:
    """Apply :func:`_read_outputs` to a part at its own size.

    Its blocks only run if the part fails without them, because some change the shape (convolutions,
    patch merging).
    """
    try:
        return _read_outputs(of_zeros(source), blocks, tuple_length, run)
    except USER_CODE_RAISES:  # whatever a model may raise
        shapes = _output_shapes(of_zeros(source), blocks, run)
        return _read_outputs(of_zeros(source), blocks, tuple_length, run, shapes)


def in_own_depth(source: ModuleSource, tower: Tower, inputs: Inputs) -> Tower:
    """Return the tower with the form of its features at full depth; copies may have fewer blocks.
    """
    part_source = tower_source(source, tower)
    outputs: list[Any] = []

    def run(model: nn.Module) -> torch.Tensor:
        outputs.append(model(**as_copied(part_source, model, inputs), **dict(tower.constants)))
        form = tower.form.like(outputs[-1])
        return torch.cat([t.flatten() for t in form.packed(outputs[-1])[0]])

    if tower.form.fields is None:
        return tower
    try:
        run_without_values(part_source, run)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise ProbeError(
            f"{tower.call} of {type(part_source.skeleton()).__name__} does not run on shapes "
            f"without values{because(error)}"
        ) from error
    return replace(tower, form=tower.form.like(outputs[-1]))


def run_without_values(source: PartSource, run: Callable[[nn.Module], torch.Tensor]) -> None:
    """Run a part at its own size with zero parameters, and without its blocks if possible.

    ``run`` calls the part, small copies first, and returns all parts of its output that are read.
    """
    def tuple_length(model: nn.Module) -> tuple[str | None, int]:
        blocks = find_blocks(model)
        if blocks is None:
            return None, 0
        return blocks, uncut_forward(model, blocks, lambda part, _: run(part), 0).tuple_length

    blocks, length = of_one_that_runs(source, tuple_length)
    if blocks is None:
        run(of_zeros(source))
    else:
        _read_in_own_size(source, blocks, length, run)


def of_zeros(source: PartSource) -> nn.Module:
    """Return a part at its own size in eval mode; its zero parameters take no memory."""
    model = source.whole.new_skeleton()
    if isinstance(model, PreTrainedModel):
        initialize_by_name(model, [], 0)
    model = source.as_made(model)
    for name, parameter in list(model.named_parameters()):
        zero = torch.zeros((), dtype=parameter.dtype)
        set_tensor(model, name, zero.expand(parameter.shape))
    return model.eval()


def _compare(model: nn.Module, source: ModuleSource, run: Run) -> CutInfo:
    name, blocks = type(model).__name__, find_blocks(model)
    if blocks is None or len(block_list(model, blocks)) < 2:
        raise ProbeError(f"{name} has no list of blocks to cut between; {_ONE_STAGE}")
    trains = source.trains
    try:
        uncut = uncut_forward(model, blocks, run, 0)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise NotRunError(f"{name} does not run on the example{because(error)}") from error
    relayed = _read_outputs(
        trial_copy(model), blocks, uncut.tuple_length, lambda part: run(part, True), uncut.shapes
    )
    return compare_stages(model.eval(), blocks, run, trains, relayed)


class _Outputs:
    """Replacement for a passage: all blocks return leaf tensors, whatever their input."""

    def __init__(self, shapes: Mapping[int, torch.Size]) -> None:
        self._shapes = shapes
        self.leaves: dict[int, torch.Tensor] = {}
        self.arrived: dict[int, torch.Tensor] = {}

    def passed(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        self.arrived[index] = hidden
        value, shape = hidden.detach().clone(), self._shapes.get(index, hidden.shape)
        if shape != value.shape:  # output shape differs from the input
            value = torch.ones(shape, dtype=value.dtype)
        self.leaves[index] = value.requires_grad_()
        return self.leaves[index].clone()  # models may change it in place


def _read_outputs(
    model: nn.Module, blocks: str, tuple_length: int, run: Callable[[nn.Module], torch.Tensor],
    shapes: Mapping[int, torch.Size] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the blocks whose outputs are read by code after the next block.

    Args:
        model: modified; its blocks do not run and may have no values.
        tuple_length: length of a block's output tuple; 0 for a tensor.
        run: calls the model and returns all parts of its output that are read.
        shapes: output shapes of blocks that change the shape.
    """
    total = len(block_list(model, blocks))
    outer = frozenset(n for n, _ in model.named_parameters() if not n.startswith(blocks + "."))
    prune(model, CutInfo(blocks, tuple_length, outer, outer, outer), total, total)
    outputs = _Outputs(shapes or {})
    for block in block_list(model, blocks):
        cast(PassThrough, block).set_passage(cast(Any, outputs))
    final = run(model)
    read: set[int] = set()
    for index, tensor in [*outputs.arrived.items(), (total, final)]:
        if tensor.requires_grad and outputs.leaves:
            gradients = torch.autograd.grad(
                tensor.sum(), list(outputs.leaves.values()), allow_unused=True, retain_graph=True
            )
            pairs = zip(outputs.leaves, gradients, strict=True)
            read |= {n for n, gradient in pairs if gradient is not None} - {index - 1}
    return tuple(sorted(read))


def _output_shapes(
    model: nn.Module, blocks: str, run: Callable[[nn.Module], torch.Tensor]
) -> dict[int, torch.Size]:
    """Return block output shapes for :func:`_read_outputs`, by running the model."""
    shapes: dict[int, torch.Size] = {}

    def note(index: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        if isinstance(hidden, torch.Tensor):
            shapes[index] = hidden.shape

    for index, block in enumerate(block_list(model, blocks)):
        block.register_forward_hook(lambda _, __, output, index=index: note(index, output))
    with torch.no_grad():
        run(model)
    return shapes
