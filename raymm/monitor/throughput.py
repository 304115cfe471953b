"""Throughput of a run: TFLOP/s and model FLOPs utilization (MFU), in total and per module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raymm.costs.named_devices import CPU, cluster_device
from raymm.costs.step_flops import StepFlops, VlmStepFlops, count_flops
from raymm.data import MicrobatchMeta
from raymm.errors import ModelError, PlanError
from raymm.model.model import Model
from raymm.scheduler.costs.devices import find_device

# Key of the sum over all modules.
TOTAL = "total"


class Throughput:
    """Throughput of a run's steps.

    Args:
        processes: number of processes by module, and of all modules as :data:`TOTAL`.
        flops: counts the FLOPs of the model's steps; by default made for the model.
    """

    def __init__(
        self, model: Model, processes: Mapping[str, int], device: str,
        precision: str, say: Callable[[str], None], flops: StepFlops | VlmStepFlops | None = None,
    ) -> None:
        self._model, self._processes, self._say = model, processes, say
        self._peak = _peak(device, precision)
        self._flops = flops
        self._countable = True

    def count(self) -> None:
        """Count the model's FLOPs if that is not done yet. Takes up to a second, so the training
        loop calls it while ranks run the first step."""
        if self._flops is None and self._countable:
            try:
                self._flops = count_flops(self._model)
            except (ModelError, PlanError) as error:
                self._give_up(error)

    @property
    def flops(self) -> StepFlops | VlmStepFlops | None:
        """The counter of FLOPs; None if the model's cannot be counted."""
        self.count()
        return self._flops

    def _give_up(self, error: Exception) -> None:
        self._say(f"no TFLOP/s: {error}")
        self._flops, self._countable = None, False

    def after_step(self, meta: Sequence[MicrobatchMeta], seconds: float) -> dict[str, Any]:
        """Return a step's entries for ``metrics.jsonl``.

        Returns:
            ``tflops``: 10^12 FLOP/s by module and as ``"total"``; ``mfu``: FLOP/s over the peak of
            the GPUs that compute the module, if raymm knows it. Empty if the model's FLOPs cannot
            be counted.
        """
        self.count()
        if self._flops is None:
            return {}
        try:
            by_module = self._flops.of(meta)
        except (ModelError, PlanError) as error:
            self._give_up(error)
            return {}
        rates = {TOTAL: sum(by_module.values()) / seconds} | {
            name: flops / seconds for name, flops in by_module.items()
        }
        row: dict[str, Any] = {
            "tflops": {name: _rounded(rate / 1e12) for name, rate in rates.items()}
        }
        if self._peak is not None:
            row["mfu"] = {
                name: _rounded(rates[name] / (count * self._peak))
                for name, count in self._processes.items()
            }
        return row


def _peak(device: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one of the cluster's GPUs; None on CPUs and for unknown GPUs."""
    if device == CPU:
        return None
    name, unknown = cluster_device(device)
    try:
        return None if unknown else find_device(name).peak(precision)
    except PlanError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
