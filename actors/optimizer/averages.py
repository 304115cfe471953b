"""Exponential moving averages of trained weights, which often generalise better than the weights of
a single step. They are stored and sharded like optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from raymm.actors.optimizer.bf16_parameters import Bf16Parameter
from raymm.actors.optimizer.optimizer_config import EmaConfig
from raymm.actors.sharding.fully_sharded import local_part
from raymm.scheduler.plan.stage import StageId

Key = tuple[StageId, str]
AVERAGE_NAME = "ema"


class ParameterAverages:
    """Moving averages of the parameters that a process updates.

    ``average = decay * average + (1 - decay) * weight`` after every ``every``-th step, starting
    from the weights before a parameter's first update. Skipped steps change nothing. Averages are
    fp32, or wider like the parameter. The average of a parameter that was trained and then frozen
    continues to follow its weight; it comes from a checkpoint or snapshot. Without ``config`` none
    are kept.
    """

    def __init__(
        self, updated: Mapping[Key, nn.Parameter], frozen: Mapping[Key, nn.Parameter],
        in_bf16: Mapping[int, Bf16Parameter], config: EmaConfig | None,
    ) -> None:
        self._updated, self._frozen = updated, frozen
        self._in_bf16, self._config = in_bf16, config
        self._values: dict[Key, torch.Tensor] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def begin(self) -> None:
        if self._config is not None:
            for key in self._updated.keys() - self._values.keys():
                self._values[key] = self._weight(key).clone()

    @torch.no_grad()
    def follow(self, refused: torch.Tensor, step: int) -> None:
        """Update the averages after a step; ``refused`` is a scalar, 1 if the step was skipped,
        else 0."""
        if self._config is None or (step + 1) % self._config.every:
            return
        share = (1 - self._config.decay) * (1 - refused)
        for key, value in self._values.items():
            value.lerp_(self._weight(key), share.to(value.dtype))

    def state(self, key: Key) -> dict[str, torch.Tensor]:
        return {AVERAGE_NAME: self._values[key]} if key in self._values else {}

    def load_state(self, key: Key, state: Mapping[str, torch.Tensor]) -> None:
        """Invert :meth:`state`. Stored averages are dropped if the run keeps none."""
        if self._config is not None and AVERAGE_NAME in state:
            self._values[key] = state[AVERAGE_NAME].to(self._parameter(key).device)

    def forget(self) -> None:
        """Drop all averages and stop showing them."""
        self._values.clear()
        self._hidden.clear()

    @torch.no_grad()
    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace parameters by their averages until :meth:`hide`. The values of ``parameters``,
        which may change until then, are copied to host memory."""
        if self._hidden or self._config is None:
            return
        averaged = (self._frozen[key] for key in self._values if key in self._frozen)
        for parameter in (*parameters, *averaged):
            tensor = local_part(parameter.detach())
            self._hidden.append((tensor, torch.empty_like(tensor, device="cpu").copy_(tensor)))
        for key, value in self._values.items():
            self._parameter(key).copy_(value)

    @torch.no_grad()
    def hide(self) -> None:
        """Restore the parameters; does nothing if no averages are shown."""
        for tensor, saved in self._hidden:
            tensor.copy_(saved)
        self._hidden.clear()

    def _parameter(self, key: Key) -> torch.Tensor:
        """Return the elements of a parameter that this process holds."""
        if key in self._updated:
            return self._updated[key]
        return local_part(self._frozen[key].detach())

    def _weight(self, key: Key) -> torch.Tensor:
        """Return a parameter as its updates see it: in fp32, or wider."""
        parameter = self._parameter(key)
        bf16_parameter = self._in_bf16.get(id(parameter))
        if bf16_parameter is None:
            return parameter.detach()
        return bf16_parameter.wide.detach() if bf16_parameter.master else parameter.detach().float()
