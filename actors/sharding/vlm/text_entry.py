"""Entry of a Hugging Face VLM's text model, which is called with a process's tokens only.

Before it, all processes run the model's own forward on the entire batch, to place features and
count positions. The text model is the innermost module whose forward runs the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.rotary import RotaryState
from raymm.actors.sharding.vlm.token_share import TokenShare
from raymm.errors import ModelError
from raymm.kernels.hf.document_rows import (
    DOCUMENTS_ARGUMENT,
    Lengths,
    SharedRows,
    mix_by_documents,
)
from raymm.kernels.hf.self_attention import ATTEND_ARGUMENT
from raymm.kernels.hf.text_masks import enter_masks_of, no_packed_rows
from raymm.kernels.shared_draws import Grid, set_grid

_POSITIONS = "position_ids"
Together = Callable[[Lengths, torch.Tensor | None], SharedRows]
"""Maps document lengths and, with padding, (B, T) on the host (0 for padding) to shared rows."""


class Sharing(NamedTuple):
    """Shares of the processes in the text of one forward.

    Attributes:
        tokens: the process's tokens; None for all.
        real: (B, T) on the host, 0 for padding; None without padding.
        attend: attention function, if processes split tokens.
        together: function that gives other mixing layers the tokens of all processes.
        grid: rows and tokens of the process, for slicing random numbers.
    """

    tokens: TokenShare | None = None
    real: torch.Tensor | None = None
    attend: Any = None
    together: Together | None = None
    grid: Grid | None = None


class TextEntry:
    """Hooks on a text model that reduce its arguments to a process's tokens.

    Args:
        mixers: classes of layers in the blocks that need one document per row.
        rotary: state of the rotary embeddings, which depend on all tokens.
    """

    def __init__(
        self, module: nn.Module, blocks: str, mixers: Collection[str] = (),
        rotary: RotaryState | None = None,
    ) -> None:
        self._rotary = rotary
        self._mixes = bool(mixers)
        if mixers:
            mix_by_documents(module.get_submodule(blocks).children(), mixers)
        path = blocks.rpartition(".")[0]
        while isinstance(module.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            path = path.rpartition(".")[0]
        self._text = module.get_submodule(path)
        self._signature = inspect.signature(self._text.forward)
        self._sharing = Sharing()
        self._left: Callable[[], None] | None = None
        self._entered = False
        self._text.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        self._text.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def sharing(self, sharing: Sharing) -> Iterator[None]:
        """Context manager around one forward of the model."""
        self._sharing, self._entered = sharing, False
        try:
            # Masks separate packed rows.
            with no_packed_rows(True) if sharing.tokens is not None else nullcontext():
                yield
        finally:
            self._sharing = Sharing()
            self._leave()

    def _leave(self, *_: Any) -> None:
        set_grid(None)
        if self._rotary:
            self._rotary.set_longest(None)
        if self._left is not None:
            self._left()
            self._left = None

    def _enter(self, text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        share, real, attend, together, grid = self._sharing
        if share is None:
            return None
        if self._entered:
            raise ModelError(f"its {type(text).__name__} is called twice in a forward")
        self._entered = True
        set_grid(grid)
        bound = self._signature.bind(*args, **kwargs)
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            variable = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments |= value if variable else {name: value}
        start = arguments.get("inputs_embeds")
        start = arguments.get("input_ids") if start is None else start
        if not isinstance(start, torch.Tensor) or tuple(start.shape[:2]) != share.shape:
            shape = tuple(start.shape) if isinstance(start, torch.Tensor) else type(start).__name__
            raise ModelError(
                f"its {type(text).__name__} is called with embeddings {shape}, not "
                f"{(*share.shape, 'width')}"
            )
        if share.is_of_tokens and arguments.get(_POSITIONS) is None:
            # The model would otherwise count positions within the share.
            positions = torch.arange(share.shape[1], device=start.device)
            arguments[_POSITIONS] = positions.expand(share.shape)
        if self._rotary:
            positions = arguments.get(_POSITIONS)
            self._rotary.set_longest(
                share.shape[1] if positions is None else int(positions.max()) + 1
            )
        selected = share.of_arguments(arguments)
        if share.is_of_tokens:
            self._left = enter_masks_of(share.all_tokens(real))
        if attend is not None:
            selected[ATTEND_ARGUMENT] = attend
        if self._mixes:
            documents = share.lengths()
            rows = share.rows or range(share.shape[0])
            lengths = ((share.shape[1],),) * len(rows) if documents is None else (documents,)
            if together is not None:
                padded = None
                if documents is None and real is not None and not bool(real.all()):
                    padded = real[rows.start : rows.stop].long()
                selected[DOCUMENTS_ARGUMENT] = together(lengths, padded)
            elif documents is not None:
                selected[DOCUMENTS_ARGUMENT] = lengths
        return (), selected
