"""Recording of router decisions during the forward of a part of a model.

Routers are found like transformers finds them to return their logits: by the modules that a class
lists in ``_can_record_outputs``. Experts are modules with the attributes that
``use_experts_implementation`` of transformers sets. No model is known by name.

Legend: ``E`` experts, ``R`` rows (tokens of all samples), ``k`` experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from raymm.actors.experts.router_loss import Mixture, RouterSums
from raymm.actors.modules.message import Message, MicrobatchContext, Routed
from raymm.actors.modules.token_layout import PADDING
from raymm.kernels.host_copies import on_host, to_device

_LOGITS = "router_logits"
SWITCH = "output_router_logits"
"""Config field: the model returns its routers' logits, and adds their loss to its own."""
_MARK = "_is_expert_parallel"  # set by transformers on expert modules


class Router(NamedTuple):
    """Module that sends tokens to experts; ``index`` is the position of its logits in its output.
    """

    name: str
    module: nn.Module
    index: int


def routers(model: nn.Module) -> list[Router]:
    """Return the routers of a model, or of a part, whose logits transformers can record."""
    return list(_routers(model, "", []))


def _routers(module: nn.Module, name: str, recorders: list[OutputRecorder]) -> Iterator[Router]:
    if isinstance(module, PreTrainedModel):  # its recorders apply to all its submodules
        recorders = _recorders(module)
    for recorder in recorders:
        where = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
        matches = recorder.target_class is not None and isinstance(module, recorder.target_class)
        named = recorder.class_name is not None and name.endswith(recorder.class_name)
        if (matches or named) and where in f".{name}.":
            yield Router(name, module, recorder.index)
    for child_name, child in module.named_children():
        yield from _routers(child, f"{name}.{child_name}" if name else child_name, recorders)


def _recorders(model: PreTrainedModel) -> list[OutputRecorder]:
    declared = (getattr(model, "_can_record_outputs", None) or {}).get(_LOGITS, [])
    declared = declared if isinstance(declared, list | tuple) else [declared]
    return [recorder for recorder in declared if isinstance(recorder, OutputRecorder)]


def experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules that have all experts of a layer, by dotted name.

    They are called with tokens (R, H), experts per token (R, k) int64, and weights (R, k).
    """
    return {name: module for name, module in model.named_modules() if hasattr(module, _MARK)}


def expert_count(module: nn.Module) -> int:
    """Return the number of experts of one of :func:`experts`: the length of its parameters."""
    return next(module.parameters()).shape[0]


class Routing:
    """Recorder of a part's router decisions, which also computes its part of the routers' loss.

    Args:
        module: the part; gets hooks.
        mixture: settings of the complete model; None for a dense model.
        without: names of submodules whose experts see other tokens than those that count.
    """

    def __init__(
        self, module: nn.Module, mixture: Mixture | None, without: Collection[str] = ()
    ) -> None:
        self._loss = None if mixture is None else mixture.loss
        self._module = module
        self._configs = switched_on(module)
        self._active = False
        self._real: torch.Tensor | None = None
        self._logits: list[torch.Tensor] = []
        self._loads: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        if mixture is None:
            return
        prefixes = tuple(f"{prefix}." for prefix in without)
        for name, layer in experts(module).items():
            if f"{name}.".startswith(prefixes):
                continue
            self._hooks.append(layer.register_forward_pre_hook(
                self._counting(name, expert_count(layer)), with_kwargs=True
            ))  # fmt: skip
        if self._loss is not None:
            for router in routers(module):
                if not f"{router.name}.".startswith(prefixes):
                    self._hooks.append(
                        router.module.register_forward_hook(self._noting(router.index))
                    )

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def noted(self, real: torch.Tensor | None) -> Iterator[None]:
        """Context manager that records one microbatch's forward, but no recomputation in the
        backward.

        Args:
            real: (B, T) bool, the tokens that count; None for all.
        """
        self._logits, self._loads = [], {}
        self._real = None
        if real is not None and self._hooks:
            device = next(self._module.parameters()).device
            self._real = to_device(on_host(real).flatten(), device)
        self._active = True
        for config in self._configs:  # stops the model from computing its own loss, which is unused
            setattr(config, SWITCH, False)
        try:
            yield
        finally:
            self._active = False
            for config in self._configs:
                setattr(config, SWITCH, True)

    def _counting(self, name: str, count: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._active:
                return
            chosen = args[1] if len(args) > 1 else list(kwargs.values())[1 - len(args)]
            counts = _counts(chosen.detach(), count, self._real)
            self._loads[name] = self._loads[name] + counts if name in self._loads else counts

        return hook

    def _noting(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._active:
                self._logits.append(output[index] if isinstance(output, tuple) else output)

        return hook

    def real(
        self, attention_mask: torch.Tensor | None, shape: tuple[int, int],
        layout: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the tokens that count, (B, T) bool.

        Args:
            attention_mask: 0 for padding, (B, T); None if there is none.
            shape: (B, T).
            layout: (3, B, T), the token layout that replaces the mask in some models.

        Raises:
            ValueError: see :func:`real_tokens`; only for a model with a router loss.
        """
        if layout is not None:
            return layout[2] != PADDING
        is_said = attention_mask is None or attention_mask.dim() == 2 or self._loss is not None
        return real_tokens(attention_mask if is_said else None, shape)

    def into(self, message: Message, context: MicrobatchContext) -> Message:
        """Return a stage's message with the recorded decisions, and with the routers' loss added.
        """
        routed, loss = self.outcome(context.router_counts, context.router_loss)
        if loss is not None and message.loss is not None:
            loss = message.loss + loss
        return message._replace(loss=message.loss if loss is None else loss, routed=routed)

    def outcome(
        self, step: tuple[float, ...] | None, with_loss: bool
    ) -> tuple[Routed | None, torch.Tensor | None]:
        """Return the last recorded decisions, and this part of the loss if ``with_loss``.

        Args:
            step: (E,) counts of the entire step over all layers; None if this forward is all of it.
        """
        if not self._hooks:
            return None, None
        loads, self._loads = self._loads, {}
        sums = self.sums()
        if self._loss is None or sums is None:
            return Routed(loads), None
        loss = self._loss.part(sums, step) if with_loss else None
        return Routed(loads, sums.counts.detach()), loss

    def sums(self) -> RouterSums | None:
        """Return and clear the sums of the last recorded forward; None if no router with a loss
        ran."""
        logits, real = self._logits, self._real
        self._logits, self._real = [], None
        return None if self._loss is None or not logits else self._loss.of(logits, real)


def _counts(chosen: torch.Tensor, count: int, real: torch.Tensor | None) -> torch.Tensor:
    """Count the tokens of each expert: (R, k) int64 -> (E,) int64; ``real`` masks tokens."""
    chosen = chosen.reshape(-1, chosen.shape[-1]).long()
    ones = torch.ones_like(chosen)
    if real is not None:
        ones = ones * real.to(chosen.device)[:, None]
    # One extra slot for tokens that transformers sends to no expert.
    counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), ones.flatten())[:count]


def switched_on(module: nn.Module) -> list[PretrainedConfig]:
    """Return the configs of a model, or of a part, that enable its routers' loss."""
    return [config for config in configs_of(module) if vars(config).get(SWITCH)]


def configs_of(module: nn.Module) -> list[PretrainedConfig]:
    """Return all configs of a model, or of a part, and nested configs."""
    configs: dict[int, PretrainedConfig] = {}

    def look(config: Any) -> None:
        if isinstance(config, PretrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            for value in vars(config).values():
                look(value)

    for child in module.modules():
        look(getattr(child, "config", None))
    return list(configs.values())


def real_tokens(attention_mask: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor:
    """Return the tokens that count, (B, T) bool: those of a padding mask, or all.

    Raises:
        ValueError: the mask has another form, for which transformers does not know the padding,
            either.
    """
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device="cpu")
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}; accepted for a mixture of "
            "experts: a padding mask (B, T)"
        )
    return attention_mask.bool()
