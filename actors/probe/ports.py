"""Probe of ports: which layers read module inputs other than the hidden state.

The complete module runs on the meta device. Every block gets an independent hidden state, so
gradients of its result only reach the ports that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from raymm.actors.modules.blocks import block_list, find_blocks, hidden_name
from raymm.actors.modules.brief_error import because
from raymm.errors import USER_CODE_RAISES, ProbeError
from raymm.kernels.hf.text_masks import no_packed_rows


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
