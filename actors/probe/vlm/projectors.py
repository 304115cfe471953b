"""Detection of a Hugging Face VLM's projectors: parameters between tower blocks and text
embeddings.

They follow from the computation, not from names. A call for features usually runs an encoder and
then a separate projector. Some encoders include the projector after their blocks; some models apply
it in their own forward, after the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.probe.small_model import trial_copy
from raymm.actors.probe.vlm.calls import Called, Inputs, run_model
from raymm.actors.stages.features import Form
from raymm.actors.weights.model_part import is_within
from raymm.errors import USER_CODE_RAISES, NotRunError


@dataclass(frozen=True)
class Inflow:
    """Tensors that a submodule reads in a call for features.

    ``items`` is True if they depend on the call's arguments; ``parameters`` are other modules'
    parameters that they depend on.
    """

    items: bool = False
    parameters: frozenset[str] = frozenset()


def encoder_of(model: nn.Module, called: Called, modules: Collection[str]) -> str:
    """Return the name of a tower's encoder, one of ``modules``, the outermost ones that the call
    runs.

    The encoder is the largest module that reads the call's arguments and no other such module's
    result. A module with blocks may read the result of a module without (embedded patches).
    """
    inflow = inflows(model, called, modules)
    blocks = {name for name in modules if _block_lists(model.get_submodule(name))}
    sizes = {
        name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in modules
    }

    def first(names: Collection[str]) -> list[str]:
        """Return names that follow none of the others."""
        return [
            name for name in names if not any(
                is_within(parameter, names) for parameter in inflow[name].parameters
            )
        ]

    items = [name for name in modules if inflow[name].items]
    chosen = [*first([name for name in items if name in blocks]), *first(items)]
    return max(chosen or modules, key=lambda name: (sizes[name], name))


def inflows(model: nn.Module, called: Called, modules: Collection[str]) -> dict[str, Inflow]:
    """Return the inflow of submodules in a call; empty ones if the call fails on its own."""
    model = trial_copy(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    arguments = tree_map(_as_leaf, called.arguments)
    sums: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            with torch.enable_grad():  # some calls run their encoder under no_grad
                sums[name] += [t.sum() for t in _with_gradient((args, kwargs))]
        return hook

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
    try:
        called.call.of(model)(**arguments)
    except USER_CODE_RAISES:  # the call alone may raise anything: it may depend on the forward
        return dict.fromkeys(modules, Inflow())
    named, leaves = dict(model.named_parameters()), _with_gradient(arguments)
    flows: dict[str, Inflow] = {}
    for name, terms in sums.items():
        reached = [False] * (len(leaves) + len(named))
        for term in terms:
            gradients = torch.autograd.grad(
                term, [*leaves, *named.values()], allow_unused=True, retain_graph=True
            )
            reached = [
                was_reached or gradient is not None
                for was_reached, gradient in zip(reached, gradients, strict=True)
            ]
        parameters = [
            parameter for parameter, is_read in zip(named, reached[len(leaves) :], strict=True)
            if is_read
        ]
        flows[name] = Inflow(
            any(reached[: len(leaves)]),
            frozenset(n for n in parameters if not is_within(n, (name,))),
        )
    return flows


def _as_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _with_gradient(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]


def projector_within(
    model: nn.Module, called: Called, places: Collection[str], root: str, form: Form
) -> tuple[str, ...]:
    """Return the names of a tower's submodules and parameters that are its projector.

    These are the modules next to encoder ``root`` that follow it, or else the code after its
    blocks. ``form`` describes the features that are read.
    """
    adjacent = _following(model, called, places, root)
    if any(is_within(name, adjacent) for name, _ in model.named_parameters()):
        return adjacent
    model = trial_copy(model)
    try:
        blocks = _first_blocks(model, called, model.get_submodule(root))
        for block in blocks:
            block.register_forward_hook(_cut_off)
        output = called.call.of(model)(**called.arguments)
        outputs = [t for t in form.like(output).packed(output)[0] if t.requires_grad]
    except USER_CODE_RAISES:  # the call alone may raise anything: it may depend on the forward
        return ()
    if not blocks or not outputs:
        return ()
    named = {
        n: p for n, p in model.named_parameters() if is_within(n, (root,)) and p.requires_grad
    }
    gradients = torch.autograd.grad(
        torch.stack([t.double().abs().sum() for t in outputs]).sum(), list(named.values()),
        allow_unused=True,
    )
    behind = {n for n, g in zip(named, gradients, strict=True) if g is not None}
    return _largest(behind, named)


def _following(
    model: nn.Module, called: Called, places: Collection[str], root: str
) -> tuple[str, ...]:
    """Return modules next to an encoder that are neither encoders nor read by encoders."""
    siblings = [child for child in places if not is_within(child, (root,))]
    modules = dict(model.named_modules())
    inflow = inflows(model, called, [child for child in (root, *siblings) if child in modules])
    encoders = [root] + [
        child for child in siblings if child in inflow and inflow[child].items
        and not any(is_within(parameter, places) for parameter in inflow[child].parameters)
    ]
    read = {parameter for name in encoders for parameter in inflow[name].parameters}
    return tuple(
        child for child in siblings if child not in encoders
        and not any(is_within(parameter, (child,)) for parameter in read)
    )


def _first_blocks(model: nn.Module, called: Called, encoder: nn.Module) -> Sequence[nn.Module]:
    """Return the encoder's first list of equal layers that have several linear layers each."""
    lists = _block_lists(encoder)
    first: list[Sequence[nn.Module]] = []
    hooks = [
        entries[0].register_forward_pre_hook(lambda *_, entries=entries: first.append(entries))
        for entries in lists
    ]
    try:
        called.call.of(model)(**called.arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return first[0] if first else ()


def _block_lists(encoder: nn.Module) -> list[list[nn.Module]]:
    return [
        list(child) for child in encoder.modules()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) and _are_alike(child)
    ]


def _are_alike(entries: nn.ModuleList | nn.Sequential) -> bool:
    linear = [sum(isinstance(m, nn.Linear) for m in entry.modules()) for entry in entries]
    return len({type(entry) for entry in entries}) == 1 and min(linear) > 1


def _cut_off(block: nn.Module, args: Any, output: Any) -> Any:
    """Pass on values without their autograd history."""
    return tree_map(
        lambda t: t.detach().requires_grad_().clone()
        if isinstance(t, torch.Tensor) and t.is_floating_point() else t, output,
    )


def _largest(chosen: Collection[str], every: Iterable[str]) -> tuple[str, ...]:
    """Return the fewest names of submodules and parameters that cover exactly the chosen ones."""
    outsiders = [name for name in every if name not in chosen]
    largest = set()
    for name in chosen:
        ancestor = name
        parent = name.rpartition(".")[0]
        while parent and not any(is_within(outsider, (parent,)) for outsider in outsiders):
            ancestor, parent = parent, parent.rpartition(".")[0]
        largest.add(ancestor)
    return tuple(sorted(largest))


def projector_behind(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return modules of the model's own forward that convert features to text embeddings.

    ``model``, which is modified, must return leaves that require gradients from calls for features.
    """
    path = find_blocks(model)
    if path is None:
        return ()
    text = path.rpartition(".")[0]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    reads: set[str] = set()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(
                isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))
            ):
                reads.add(name)
        return hook

    begun: list[bool] = []

    def stop(*_: Any) -> None:
        begun.append(True)
        raise NotRunError("the text model's blocks are reached")

    block_list(model, path)[0].register_forward_pre_hook(stop)
    for name, module in model.named_modules():
        if module._parameters and not is_within(name, (text,)):
            module.register_forward_pre_hook(note(name), with_kwargs=True)
    try:
        run_model(model, inputs)
    except NotRunError:
        if not begun:
            raise
    every = [name for name, _ in model.named_parameters()]
    return _largest({name for name in every if is_within(name, reads)}, every)
