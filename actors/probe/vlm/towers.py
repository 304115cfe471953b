"""Detection of a Hugging Face VLM's towers, by the functions that its forward calls.

Nothing here knows a model by name. transformers models have functions ``get_image_features``,
``get_audio_features`` and so on, or run the result of ``get_encoder(modality)``. The forward runs
once on an example, and its outermost calls are recorded. Gradients of their results show the
tower's parameters; gradients from the model's output show which part of the results is read.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from raymm.actors.probe.small_model import small_ids, trial_copy
from raymm.actors.probe.vlm.calls import (
    Called,
    arguments_of,
    has_towers,
    run_model,
    tower_calls,
)
from raymm.actors.probe.vlm.projectors import (
    encoder_of,
    projector_behind,
    projector_within,
)
from raymm.actors.stages.features import Form, beside_fields
from raymm.actors.weights.model_part import Call, UpToCall, is_within
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

_NAMES = {"image": "vision", "img": "vision", "video": "vision"}
_PLAIN = (bool, int, float, str, type(None))
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Tower:
    """Part of a model that its forward calls for features.

    Attributes:
        name: ``vision``, ``audio``, or the modality in the function's name.
        arguments: pairs of an argument of the call and an entry of the model's inputs.
        constants: arguments that are the same for all inputs.
        places: names of the submodules and parameters that the features come from.
        root: name of the encoder among them, which has the blocks.
        projector: names of those among them that map tokens to text embeddings.
        behind: names of modules outside the call that do so in the model's own forward.
        form: structure of the call's output.
        whole_forward: True if the call's arguments are computed by the model's forward, which its
            ranks therefore run up to the call; ``arguments`` are then the model's own.
    """

    name: str
    call: Call
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    places: tuple[str, ...]
    root: str
    form: Form
    whole_forward: bool = False
    projector: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    def output(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Return the output of the call in a complete model, for the tower's inputs."""
        call = UpToCall(model, self.call) if self.whole_forward else self.call.of(model)
        return call(**inputs, **dict(self.constants))

    def inputs(self, batch: Inputs) -> dict[str, Any] | None:
        """Select the tower's inputs from those of the model; None if the batch has none."""
        selected = {name: batch[entry] for name, entry in self.arguments if entry in batch}
        return selected if any(isinstance(v, torch.Tensor) for v in selected.values()) else None


def find_towers(model: PreTrainedModel, inputs: Inputs) -> tuple[Tower, ...]:
    """Return the towers that a model's forward calls on these inputs.

    Args:
        model: in evaluation mode; not modified.
        inputs: inputs of its forward, with items of all modalities.

    Raises:
        ProbeError: a tower's inputs cannot be sent to its ranks, or a tower is not separate from
            the language model.
        NotRunError: the model does not run on the inputs.
    """
    check_kind(model)
    observed_model = trial_copy(model)
    seen = tower_calls(observed_model, inputs)
    if not seen and (has_towers(model) or not _is_text(inputs)):
        raise ProbeError(
            f"the forward of {type(model).__name__} calls no function for features "
            "(get_image_features and the like) and no encoder from get_encoder on the example: its "
            "towers cannot be found"
        )
    towers: dict[str, Tower] = {}
    calls: dict[str, Called] = {}
    for called in seen:
        name = _NAMES.get(called.modality, called.modality)
        if name in towers:
            raise ProbeError(
                f"the forward of {type(model).__name__} calls both {called.call} and "
                f"{towers[name].call} for one microbatch; a tower is called once: give images and "
                "videos in separate batches"
            )
        towers[name], calls[name] = _tower(observed_model, name, called, inputs), called
    apart = _apart(model, inputs, tuple(towers.values()))
    return tuple(_with_projector(model, tower, calls[tower.name]) for tower in apart)


def _with_projector(model: nn.Module, tower: Tower, called: Called) -> Tower:
    projector = projector_within(model, called, tower.places, tower.root, tower.form)
    # Code after an encoder's blocks belongs to the encoder if a separate projector follows.
    return replace(tower, projector=tuple(
        name for name in projector if not (tower.behind and is_within(name, (tower.root,)))
    ))


def as_copied(source: ModuleSource, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Convert inputs to those of a copy of the model, whose vocabulary may be smaller."""
    config, small = source.config, getattr(model, "config", None)
    if config is None or small is None:
        return dict(inputs)
    return {
        name: small_ids(config, small, value) if name.endswith("input_ids") else value
        for name, value in inputs.items()
    }


def check_kind(model: nn.Module) -> None:
    """Raise ProbeError for a kind of model without a next-token loss for one text model."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ProbeError(
            f"{name} is an encoder-decoder: its text passes through two kinds of blocks, but "
            "stages have only one kind; accepted: models whose text passes through one language "
            "model"
        )
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ProbeError(
            f"{name} has no output embeddings (get_output_embeddings) to compute the logits for "
            "the loss"
        )


def _tower(model: nn.Module, name: str, called: Called, inputs: Inputs) -> Tower:
    arguments, constants = [], []
    prefixes, root = _places(model, called)
    form = Form.of(called.output)
    for argument, value in called.arguments.items():
        if isinstance(value, _PLAIN) or not _tensors(value):
            constants.append((argument, value))
            continue
        entries = [entry for entry, stored in inputs.items() if _same(stored, value)]
        if not entries:
            read_entries = _read_before(model, called, prefixes, inputs)
            if read_entries is None:
                raise ProbeError(
                    f"{type(model).__name__} calls {called.call} with {argument!r}, which differs "
                    "from the batch and depends on the text or on parameters outside the tower; it "
                    "cannot be sent to the tower's ranks"
                )
            pairs = tuple((entry, entry) for entry in read_entries)
            return Tower(name, called.call, pairs, (), prefixes, root, form, whole_forward=True)
        arguments.append((argument, entries[0]))
    return Tower(name, called.call, tuple(arguments), tuple(constants), prefixes, root, form)


def _read_before(
    model: nn.Module, called: Called, places: Collection[str], inputs: Inputs
) -> list[str] | None:
    """Return the item entries that determine a call's arguments; None if others do, too."""
    shape = inputs["input_ids"].shape[:2]
    item_entries = {
        name: value for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] != shape
    }  # fmt: skip
    copied = trial_copy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if not is_within(name, places):
                parameter.zero_()

    def is_enough(entries: Inputs) -> bool:
        seen: list[dict[str, Any]] = []
        noted = copy.deepcopy(copied)
        signature = inspect.signature(called.call.of(noted))

        def note(*args: Any, **kwargs: Any) -> Any:
            seen.append(arguments_of(signature, args, kwargs))
            raise NotRunError("the call is reached")

        called.call.replace(noted, note)
        try:
            UpToCall(noted, called.call)(**entries)
        except USER_CODE_RAISES:  # whatever a model may raise
            pass
        due = called.arguments
        return len(seen) == 1 and seen[0].keys() == due.keys() and all(
            _same(seen[0][name], value) for name, value in due.items()
        )

    if not is_enough(item_entries):
        return None
    for name in list(item_entries):
        fewer_entries = {entry: value for entry, value in item_entries.items() if entry != name}
        if fewer_entries and is_enough(fewer_entries):
            item_entries = fewer_entries
    return list(item_entries)


def _is_text(inputs: Inputs) -> bool:
    """Return True if all inputs are per token."""
    shape = inputs["input_ids"].shape[:2]
    return all(isinstance(v, torch.Tensor) and v.shape[:2] == shape for v in inputs.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _same(ours: Any, value: Any) -> bool:
    if ours is value:
        return True
    if isinstance(ours, torch.Tensor) and isinstance(value, torch.Tensor):
        return ours.shape == value.shape and torch.equal(ours, value)
    # A tensor would be compared elementwise.
    return isinstance(value, _PLAIN) and not isinstance(ours, torch.Tensor) and bool(ours == value)


def _places(model: nn.Module, called: Called) -> tuple[tuple[str, ...], str]:
    """Return the locations of a call's parameters, and the name of its encoder."""
    reached = _reached(model, _tensors(called.output))
    run = [name for name in called.modules if name]
    outermost = {
        name for name in run
        if not any(name.startswith(ancestor + ".") for ancestor in run)
        # Not modules that merely own the function (a base model with the language model).
        and not called.call.owner.startswith(name)
    } | ({called.call.owner} if called.call.method == "forward" else set())
    parameters = {
        name for name, _ in model.named_parameters()
        if name in reached or is_within(name, outermost)
    }
    prefixes = outermost | {name for name in parameters if not is_within(name, outermost)}
    if not parameters:
        raise ProbeError(
            f"{called.call} of {type(model).__name__} returns features that no parameter "
            "contributes to"
        )
    root = called.call.owner
    if outermost and called.call.method != "forward":
        root = encoder_of(model, called, outermost)
    return tuple(sorted(prefixes)), root


def _reached(model: nn.Module, outputs: Collection[torch.Tensor]) -> set[str]:
    """Return the names of parameters that get a gradient."""
    total = _scalar(outputs)
    if total is None:
        return set()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(
        total, list(named.values()), allow_unused=True, retain_graph=True
    )
    return {n for n, gradient in zip(named, gradients, strict=True) if gradient is not None}


def _scalar(outputs: Collection[torch.Tensor]) -> torch.Tensor | None:
    terms = [
        (t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum()
        for t in outputs if t.requires_grad
    ]  # fmt: skip
    return sum(terms[1:], terms[0]) if terms else None


def _apart(
    model: PreTrainedModel, inputs: Inputs, towers: tuple[Tower, ...]
) -> tuple[Tower, ...]:
    """Return the towers with the parts of their features that are read.

    Raises:
        ProbeError: a parameter belongs to two towers, or to a tower and the language model.
    """
    handed = trial_copy(model)
    outputs = {
        tower.call: tower.output(handed, copy.deepcopy(tower.inputs(inputs) or {}))
        for tower in towers
    }  # fmt: skip
    leaves: dict[str, list[torch.Tensor | None]] = {}
    for tower in towers:
        leaves[tower.name], output = cut_off(tower.form, outputs[tower.call])
        tower.call.replace(handed, lambda *_, output=output, **__: output)
    logits, ids = run_model(handed, inputs).logits, inputs["input_ids"]
    if logits.shape[:2] != ids.shape:
        raise ProbeError(
            f"{type(model).__name__} gives logits of {tuple(logits.shape[:2])} tokens for ids of "
            f"{tuple(ids.shape)}: it is unknown which logits belong to the labels"
        )
    total = _scalar([logits])
    assert total is not None
    total.backward()
    language = {n for n, p in handed.named_parameters() if p.grad is not None}
    behind = projector_behind(handed, inputs)
    for tower in towers:
        owner_of = {prefix: t.name for t in towers if t is not tower for prefix in t.places}
        for name, _ in model.named_parameters():
            if not is_within(name, tower.places):
                continue
            if name in language or is_within(name, owner_of):
                whose = owner_of.get(name, "language model")
                raise ProbeError(
                    f"{name!r} of {type(model).__name__} is used by its {tower.name} tower and by "
                    f"its {whose}, which therefore cannot be separate modules"
                )
    return tuple(
        replace(
            tower, form=_read(tower.form, outputs[tower.call], leaves[tower.name]), behind=behind
        )
        for tower in towers
    )


def _read(form: Form, output: Any, leaves: list[torch.Tensor | None]) -> Form:
    """Return the form of the parts of an output whose leaves got a gradient.

    Fields of a model output are read completely, because they may have more entries in a deeper
    model.
    """
    flags = [
        leaf is not None and (leaf.grad is not None or not leaf.is_floating_point())
        for leaf in leaves
    ]
    if isinstance(output, Mapping):
        names = (*output, *beside_fields(output))
        counts = [len(Form.of(output, (name,)).leaves) for name in names]
        remaining = iter(flags)
        read = [
            name for name, count in zip(names, counts, strict=True)
            if any(list(itertools.islice(remaining, count)))
        ]  # fmt: skip
        return Form.of(output, tuple(read))
    return form.reading(flags)


def cut_off(form: Form, output: Any) -> tuple[list[torch.Tensor | None], Any]:
    """Return per leaf of the form its detached tensor, and the output rebuilt from these leaves."""
    everything = form.reading([leaf.kind != "value" for leaf in form.leaves])
    tensors, side = everything.packed(output)
    detached = iter([t.detach().requires_grad_() for t in tensors])
    floats = []
    ordered: list[torch.Tensor | None] = []
    for tensor in everything.tensors(output):
        if tensor is None or not tensor.is_floating_point():
            ordered.append(tensor)
            continue
        floats.append(next(detached))
        ordered.append(floats[-1])
    return ordered, everything.unpacked(floats, side)
