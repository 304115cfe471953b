"""Held-out loss, in total and by source, and rewards of preference pairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymm.data import Skipped
from raymm.data.loading.builder import none_usable
from raymm.data.loading.loader import Step
from raymm.runtime.parallel_module import PendingOutput, StepOutput

HELDOUT = "heldout_"  # prefix of the keys in metrics rows


@dataclass
class HeldoutLoss:
    """Means over the label tokens, or the preference pairs, of all held-out data."""

    names: Sequence[str]
    skipped: list[Skipped] = field(default_factory=list)
    _total: float = 0.0
    _tokens: int = 0
    _sources: dict[str, tuple[float, int]] = field(default_factory=dict)
    _rewards: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, submit: Callable[..., PendingOutput], steps: Iterable[Step], in_flight: int,
        names: Sequence[str],
    ) -> HeldoutLoss:
        """Compute the loss of all steps, with at most ``in_flight`` steps in flight. ``submit`` is
        :meth:`raymm.runtime.parallel_module.ParallelModule.submit`, ``names`` are the sources."""
        sums = cls(names)
        pending: deque[PendingOutput] = deque()
        for step in steps:
            sums.skipped += step.skipped
            if not step.microbatches:
                continue
            pending.append(submit(
                (step.microbatches, step.meta), forward_only=True, keep=step
            ))
            if len(pending) >= in_flight:
                sums._add(pending.popleft().result())
        while pending:
            sums._add(pending.popleft().result())
        return sums

    def _add(self, output: StepOutput) -> None:
        self._total += output.loss * output.label_tokens
        self._tokens += output.label_tokens
        for number, (loss, count) in output.source_losses.items():
            total, labels = self._sources.get(self.names[number], (0.0, 0))
            self._sources[self.names[number]] = total + loss * count, labels + count
        for name, mean in output.rewards.items():
            self._rewards[name] = self._rewards.get(name, 0.0) + mean * output.label_tokens

    def check(self) -> None:
        """Raise a ``DataError`` if no sample was usable, so that the mean is undefined."""
        if self.skipped and not self._tokens:
            raise none_usable(self.skipped, "the held-out")

    @property
    def loss(self) -> float:
        return self._total / max(self._tokens, 1)

    @property
    def rewards(self) -> dict[str, float]:
        return {name: total / max(self._tokens, 1) for name, total in self._rewards.items()}

    @property
    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            f"{HELDOUT}loss": self.loss, f"{HELDOUT}skipped": len(self.skipped),
        }
        row |= {HELDOUT + name: mean for name, mean in self.rewards.items()}
        if self._sources:
            row[f"{HELDOUT}source_losses"] = {
                name: total / count for name, (total, count) in self._sources.items()
            }
            row[f"{HELDOUT}source_label_tokens"] = {
                name: count for name, (_, count) in self._sources.items()
            }
        return row
