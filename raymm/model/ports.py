"""Ports of a model's graph: inputs from other modules that layers read in addition to their hidden
state. They are found by running the module on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name, input_embeddings
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.node import ONLY
from raymm.actors.probe.callbacks import chain_example
from raymm.actors.probe.cut import of_one_that_runs
from raymm.actors.stages.language import LanguageSpec
from raymm.actors.stages.node import NodeStageSpec
from raymm.actors.weights.source import on_meta
from raymm.errors import USER_CODE_RAISES, ProbeError
from raymm.kernels.hf.text_masks import no_packed_rows
from raymm.scheduler.graph.module_graph import Port


def reading_layers(
    module: nn.Module, run: Callable[[nn.Module], Any], ports: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Return the blocks that read each port; empty if none does.

    Code before the blocks counts as the first block, code after a block as that block.

    ``module`` is on the meta device and restored afterwards. ``run`` passes ``ports``, leaves that
    require gradients, to it.

    Raises:
        ProbeError: the module does not run on the meta device.
    """
    blocks = find_blocks(module)
    listed = [] if blocks is None else list(block_list(module, blocks))
    results_of: dict[int, list[torch.Tensor]] = {}
    current = 0

    def enter(number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal current
        name = hidden_name(block)
        hidden = args[0] if args else kwargs[name]
        results_of.setdefault(current, []).append(hidden)
        current = number
        fresh = hidden.detach().requires_grad_()
        return ((fresh, *args[1:]), kwargs) if args else (args, {**kwargs, name: fresh})

    hooks = [
        block.register_forward_pre_hook(
            lambda block, args, kwargs, number=number: enter(number, block, args, kwargs),
            with_kwargs=True,
        )
        for number, block in enumerate(listed)
    ]
    try:
        with torch.enable_grad(), no_packed_rows(True):  # packing detection reads values
            output = run(module)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        raise ProbeError(
            f"{type(module).__name__} does not run with {', '.join(ports)} as input to its "
            f"layers{because(error)}; accepted: features of the shape that its layers take"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    results_of.setdefault(current, []).extend(
        leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)
    )
    read: dict[str, list[int]] = {name: [] for name in ports}
    for number, tensors in sorted(results_of.items()):
        sums = [tensor.sum() for tensor in tensors if tensor.requires_grad]
        if not sums:
            continue
        gradients = torch.autograd.grad(
            sums, list(ports.values()), retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(ports, gradients, strict=True):
            if gradient is not None:
                read[name].append(number)
    return {name: tuple(numbers) for name, numbers in read.items()}


_ROWS, _TOKENS, _ITEM_TOKENS = 2, 8, 3
_NOT_FOR_MODEL = ("labels", "input_ids", "sample_index", "encoder_kinds", "token_layout")


def language_ports(spec: LanguageSpec) -> tuple[Port, ...]:
    """Return the ports of what a merge policy passes to layers. Raises ProbeError if the policy or
    the model fails on a small example, or no layer reads the input."""
    names: tuple[str, ...] = getattr(spec.merge, "ports", ())
    if not names or not spec.encoders:
        return ()
    model = on_meta(spec.source.skeleton()).to("meta").eval()
    arguments = merged_arguments(spec, model)
    ports = {
        name: arguments.pop(name).detach().to("meta").requires_grad_()
        for name in names if name in arguments
    }
    read = reading_layers(model, partial(_run, {**_on(arguments, "meta"), **ports}), ports)
    if unread := [name for name, layers in read.items() if not layers]:
        raise ProbeError(f"no layer of {type(model).__name__} reads {', '.join(unread)}")
    return tuple(
        Port(spec.name, name, layers, spec.encoders) for name, layers in read.items()
    )


def _run(arguments: Mapping[str, Any], model: nn.Module) -> Any:
    return model(**arguments, use_cache=False).logits


def _on(arguments: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def merged_arguments(spec: LanguageSpec, model: nn.Module) -> dict[str, Any]:
    """Return a model's arguments for a small batch in which every row has an item of each encoder.
    Raises ProbeError if the merge policy fails on the batch."""
    width = input_embeddings(model).weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(_ROWS)
    inputs = {
        "inputs_embeds": torch.randn(_ROWS, _TOKENS, width, generator=generator),
        "input_ids": torch.ones(_ROWS, _TOKENS, dtype=torch.int64),
        "labels": torch.full((_ROWS, _TOKENS), -100),
        "attention_mask": torch.ones(_ROWS, _TOKENS, dtype=torch.int64),
        "sample_index": {name: rows for name in spec.encoders},
    }
    features = {
        name: torch.randn(_ROWS, _ITEM_TOKENS, width, generator=generator)
        for name in spec.encoders
    }
    try:
        merged = dict(getattr(spec.merge, "tried", spec.merge)(features, inputs))
    except USER_CODE_RAISES as error:  # a policy may raise anything
        raise ProbeError(
            f"the merge policy fails on {_ROWS} rows of {_TOKENS} tokens, with one item of "
            f"{_ITEM_TOKENS} tokens each{because(error)}"
        ) from error
    arguments = {k: v for k, v in merged.items() if k not in _NOT_FOR_MODEL and v is not None}
    arguments.pop("attention_mask", None)  # all tokens are real
    model_arguments = getattr(spec.merge, "model_arguments", None)
    return arguments if model_arguments is None else model_arguments(arguments)


def node_ports(
    spec: NodeStageSpec, outputs: Mapping[str, tuple[str, ...]], with_gradient: Collection[str],
    example: Mapping[str, Any] | None,
) -> tuple[Port, ...]:
    """Return the ports of a graph's module: inputs from other modules that later layers read.

    Args:
        outputs: names of the outputs by module; empty if a module's whole output is read.
        with_gradient: modules whose outputs have a gradient.

    Raises:
        ProbeError: the module does not run on the example inputs.
    """
    node = spec.node
    uses = [
        use for use in (() if node is None else node.inputs)
        if use.producer in with_gradient and not use.every
    ]
    if not uses or spec.preprocess is not None:
        return ()
    arguments = of_one_that_runs(spec.source, lambda model: chain_example(spec, model, example))
    arguments = _on(arguments, "meta")
    ports = {
        use.keyword: value.detach().requires_grad_() for use in uses
        if isinstance(value := arguments.get(use.keyword), torch.Tensor)
        and value.is_floating_point()
    }
    model = on_meta(spec.source.skeleton()).to("meta").eval()
    read = reading_layers(model, lambda module: module(**{**arguments, **ports}), ports)
    ports_read = []
    for use in uses:
        layers = read.get(use.keyword, ())
        handed = outputs[use.producer]
        name = use.output or (handed[0] if len(handed) == 1 else ONLY)
        if layers and layers != (0,):
            ports_read.append(Port(spec.name, use.keyword, layers, (use.producer,), name))
    return tuple(ports_read)
