"""A step under way, as its driver sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from raymm.actors.executor.step_meta import StepResult, measured_timeline
from raymm.actors.rank.step_calls import StepHandle
from raymm.runtime.parallel_module import StepOutput
from raymm.runtime.skipped_step import SkippedStep
from raymm.scheduler.plan.process_grid import Process


class PendingStep:
    """A step under way. :meth:`result` waits for it.

    Args:
        handle: of the ranks' calls.
        label_tokens: of the step, which its loss was divided by.
        keep: owners of the inputs, which must outlive the step.
        processes: of the run, by number.
        skipped: makes the report of a step that was not applied, from the norm and the ranks'
            results.
    """

    def __init__(
        self, handle: StepHandle, label_tokens: int, keep: Any, processes: Sequence[Process],
        skipped: Callable[[float | None, Sequence[StepResult]], SkippedStep | None],
    ) -> None:  # fmt: skip
        self._handle = handle
        self._skipped = skipped
        self._label_tokens = label_tokens
        self._keep = keep  # whoever owns the input references must outlive the step
        self._processes = processes
        self._rewards: Callable[[Mapping[int, list[float]]], dict[str, float]] | None = None

    def compared(self, rewards: Callable[[Mapping[int, list[float]]], dict[str, float]]) -> None:
        """Of pairs of answers.

        Args:
            rewards: what of its output follows from :meth:`scores`.
        """
        self._rewards = rewards

    def forget(self) -> None:
        """Nobody asks for its output any more."""
        self._handle.forget()

    def scores(self) -> dict[int, list[float]]:
        """By microbatch, of pairs of answers its rows' log-probabilities, of texts their next
        tokens. Raises as :meth:`result`."""
        return self._scores(self._handle.result())

    def _scores(self, results: Sequence[StepResult]) -> dict[int, list[float]]:
        """Processes that share a microbatch's rows have theirs each, in order; those that share
        tokens have all the same."""
        scores: dict[int, list[float]] = {}
        pairs = zip(self._processes, results, strict=True)
        firsts = ((p.fsdp, r) for p, r in pairs if p.tp == p.cp == 0)
        for _, result in sorted(firsts, key=itemgetter(0)):
            for (_, microbatch), values in result.scores.items():
                scores.setdefault(microbatch, []).extend(values)
        return scores

    def result(self) -> StepOutput:
        """The step's output.

        Raises:
            RankFailedError: if a rank died or raised.
        """
        results = self._handle.result()
        pairs = list(zip(self._processes, results, strict=True))
        # Processes that share a microbatch have each their part of the loss, those that share
        # every token's work all the same.
        parts = [part for p, result in pairs if p.tp == 0 for part in result.losses.items()]
        losses: dict[str, float] = {}
        for (stage, _), value in sorted(parts, key=lambda part: (part[0][0].module, part[0][1])):
            losses[stage.module] = losses.get(stage.module, 0.0) + value
        rates = [r.learning_rate for r in results if r.learning_rate is not None]
        peaks: dict[int, int] = {}
        for process, result in pairs:
            peaks[process.rank] = max(peaks.get(process.rank, 0), result.peak_bytes)
        loss = sum(losses.values())
        return StepOutput(
            loss=loss,
            label_tokens=self._label_tokens,
            # A rank's first process stands for it.
            timeline=measured_timeline([r for p, r in pairs if p.fsdp == p.cp == p.tp == 0]),
            grad_norm=grad_norm(results),
            learning_rate=rates[0] if rates else None,
            peak_bytes=tuple(peaks[rank] for rank in sorted(peaks)),
            skipped=self._skipped(loss, results),
            losses=losses,
            expert_loads=_expert_loads([result for p, result in pairs if p.tp == 0]),
            source_losses=source_losses(r for p, r in pairs if p.tp == 0),
            rewards={} if self._rewards is None else self._rewards(self._scores(results)),
        )


def source_losses(results: Iterable[StepResult]) -> dict[int, tuple[float, int]]:
    """By number of a source: the mean over its labels of the whole step, and how many they are.

    Args:
        results: of processes that have each a part of their own.
    """
    parts = [part for result in results for part in result.by_source.items()]
    sums: dict[int, tuple[float, int]] = {}
    for _, of_sources in sorted(parts, key=lambda part: part[0][1]):
        for source, (total, count) in of_sources.items():
            before, labels = sums.get(source, (0.0, 0))
            sums[source] = before + total, labels + count
    return {source: (total / count, count) for source, (total, count) in sorted(sums.items())}


def grad_norm(results: Sequence[StepResult]) -> float | None:
    """All processes have the same."""
    return next((r.grad_norm for r in results if r.grad_norm is not None), None)


def _expert_loads(results: Sequence[StepResult]) -> dict[str, tuple[int, ...]]:
    """Of processes that share no token's work, by layer's experts, what they got together."""
    loads: dict[str, tuple[int, ...]] = {}
    for result in results:
        for name, load in result.loads.items():
            before = loads.get(name, (0,) * len(load))
            loads[name] = tuple(map(sum, zip(before, load, strict=True)))
    return loads
