"""What the routers of a part of a model decide, noted while its forward runs.

Routers are found as transformers finds them when it is asked for their logits: a class says in
``_can_record_outputs`` which modules they are. Experts are modules with the attributes that
``use_experts_implementation`` of transformers sets. Nothing here knows a model by name.

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
"""Of a config, whether a model returns its routers' logits, and adds their loss to its own."""
_MARK = "_is_expert_parallel"  # that transformers puts on experts


class Router(NamedTuple):
    """A module that sends tokens to experts.

    Attributes:
        name: dotted.
        module: it.
        index: of its logits in what it returns.
    """

    name: str
    module: nn.Module
    index: int


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model, or of a part of one, whose logits transformers can record."""
    return list(_routers(model, "", []))


def _routers(module: nn.Module, name: str, recorders: list[OutputRecorder]) -> Iterator[Router]:
    if isinstance(module, PreTrainedModel):  # what it says holds for all within it
        recorders = _recorders(module)
    for recorder in recorders:
        where = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
        of_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
        named = recorder.class_name is not None and name.endswith(recorder.class_name)
        if (of_class or named) and where in f".{name}.":
            yield Router(name, module, recorder.index)
    for child_name, child in module.named_children():
        yield from _routers(child, f"{name}.{child_name}" if name else child_name, recorders)


def _recorders(model: PreTrainedModel) -> list[OutputRecorder]:
    said = (getattr(model, "_can_record_outputs", None) or {}).get(_LOGITS, [])
    said = said if isinstance(said, list | tuple) else [said]
    return [recorder for recorder in said if isinstance(recorder, OutputRecorder)]


def experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that have all experts of a layer, by dotted name. They are called with tokens
    (R, H), the experts of each (R, k) int64, and weights (R, k)."""
    return {name: module for name, module in model.named_modules() if hasattr(module, _MARK)}


def expert_count(module: nn.Module) -> int:
    """How many experts one of :func:`experts` has: the length of its parameters."""
    return next(module.parameters()).shape[0]


class Routing:
    """Notes what the routers of a part of a model decide, and computes its part of their loss.

    Args:
        module: the part; is given hooks.
        mixture: what the whole model is; None for no mixture of experts.
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
        inside = tuple(f"{place}." for place in without)
        for name, of_layer in experts(module).items():
            if f"{name}.".startswith(inside):
                continue
            self._hooks.append(of_layer.register_forward_pre_hook(
                self._counting(name, expert_count(of_layer)), with_kwargs=True
            ))  # fmt: skip
        if self._loss is not None:
            for router in routers(module):
                if not f"{router.name}.".startswith(inside):
                    self._hooks.append(
                        router.module.register_forward_hook(self._noting(router.index))
                    )

    def detach(self) -> None:
        """Leave the module as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def noted(self, real: torch.Tensor | None) -> Iterator[None]:
        """Within it, a forward of one microbatch is noted; a block that is computed again in the
        backward is not.

        Args:
            real: (B, T) bool, the tokens that count; None for all.
        """
        self._logits, self._loads = [], {}
        self._real = None
        if real is not None and self._hooks:
            device = next(self._module.parameters()).device
            self._real = to_device(on_host(real).flatten(), device)
        self._active = True
        for config in self._configs:  # the model would compute a part of the loss, for nothing
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
            own = _counts(chosen.detach(), count, self._real)
            self._loads[name] = self._loads[name] + own if name in self._loads else own

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
        """The tokens that count, (B, T) bool.

        Args:
            attention_mask: 0 for padding, (B, T); None if there is none.
            shape: (B, T).
            layout: (3, B, T), the tokens' layout, if the model has one instead.

        Raises:
            ValueError: as :func:`real_tokens`, of a model with a loss for its routers.
        """
        if layout is not None:
            return layout[2] != PADDING
        is_said = attention_mask is None or attention_mask.dim() == 2 or self._loss is not None
        return real_tokens(attention_mask if is_said else None, shape)

    def into(self, message: Message, context: MicrobatchContext) -> Message:
        """A stage's message, with what the routers of its layers decided, and their loss.

        Args:
            message: of the forward that was noted last.
            context: of its microbatch.
        """
        routed, loss = self.outcome(context.router_counts, context.router_loss)
        if loss is not None and message.loss is not None:
            loss = message.loss + loss
        return message._replace(loss=message.loss if loss is None else loss, routed=routed)

    def outcome(
        self, step: tuple[float, ...] | None, with_loss: bool
    ) -> tuple[Routed | None, torch.Tensor | None]:
        """Of the forward that was noted last, what was decided, and this part of the loss.

        Args:
            step: per expert, how often it was chosen in the whole step, by all layers; None: this
                forward is the whole step.
            with_loss: whether the loss is asked for.
        """
        if not self._hooks:
            return None, None
        loads, self._loads = self._loads, {}
        own = self.sums()
        if self._loss is None or own is None:
            return Routed(loads), None
        loss = self._loss.part(own, step) if with_loss else None
        return Routed(loads, own.counts.detach()), loss

    def sums(self) -> RouterSums | None:
        """Of the forward that was noted last, what the loss is made of; None if no router with a
        loss ran. It is forgotten here."""
        logits, real = self._logits, self._real
        self._logits, self._real = [], None
        return None if self._loss is None or not logits else self._loss.of(logits, real)


def _counts(chosen: torch.Tensor, count: int, real: torch.Tensor | None) -> torch.Tensor:
    """(R, k) int64 -> (E,) int64: how often each expert was chosen by tokens that count."""
    chosen = chosen.reshape(-1, chosen.shape[-1]).long()
    ones = torch.ones_like(chosen)
    if real is not None:
        ones = ones * real.to(chosen.device)[:, None]
    # One more place, for what transformers sends to no expert.
    counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), ones.flatten())[:count]


def switched_on(module: nn.Module) -> list[PretrainedConfig]:
    """Configs of a model, or of a part of one, that ask for the loss of its routers."""
    return [config for config in configs_of(module) if vars(config).get(SWITCH)]


def configs_of(module: nn.Module) -> list[PretrainedConfig]:
    """All configs of a model, or of a part of one, and those within them."""
    configs: dict[int, PretrainedConfig] = {}

    def look(config: Any) -> None:
        if isinstance(config, PretrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            for value in vars(config).values():
                look(value)

    for part in module.modules():
        look(getattr(part, "config", None))
    return list(configs.values())


def real_tokens(attention_mask: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor:
    """The tokens that count: those of a mask (B, T), or all of (B, T).

    Raises:
        ValueError: a mask of another form, of which transformers, too, does not know which tokens
            it leaves out.
    """
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device="cpu")
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}; accepted for a mixture of "
            "experts: a padding mask (B, T)"
        )
    return attention_mask.bool()
