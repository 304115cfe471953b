"""Trainable layers of a module, and counts of trained parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks


def any_trainable(module: nn.Module) -> bool:
    """Return True if a parameter of the module is trainable."""
    return any(p.requires_grad for p in module.parameters())


def trainable_blocks(module: nn.Module, count: int) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether a parameter is trainable.

    Parameters outside the blocks count with the first and the last block, since either may own
    them, and both do if they are tied.
    """
    path = find_blocks(module)
    if path is None or count == 1:
        return (any_trainable(module),)
    flags = [any_trainable(block) for block in block_list(module, path)]
    if any(p.requires_grad for n, p in module.named_parameters() if not n.startswith(path + ".")):
        flags[0] = flags[-1] = True
    return tuple(flags)


def counted(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return (trained elements, all elements); a tied parameter counts once."""
    sizes = {id(p): (p.numel() * p.requires_grad, p.numel()) for p in parameters}
    return sum(trained for trained, _ in sizes.values()), sum(all for _, all in sizes.values())


def counts_text(counts: dict[str, tuple[int, int]]) -> str:
    """Return a line such as ``"parameters: vision 86.0M frozen, llm 1.2M of 1.24B trained"`` from
    the results of :func:`counted` by name."""
    phrases = []
    for name, (trained, size) in counts.items():
        state = "trained" if trained else "frozen"
        trained_text = f"{_short(trained)} of " if 0 < trained < size else ""
        phrases.append(f"{name} {trained_text}{_short(size)} {state}")
    return f"parameters: {', '.join(phrases)}"


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
