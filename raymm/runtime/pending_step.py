"""Step in flight, as seen by the driver."""

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
    """Step in flight. :meth:`result` waits for it.

    Args:
        label_tokens: divisor of the step's loss.
        keep: owners of the inputs, which must outlive the step.
        skipped: makes the report of a step that was not applied, from the loss and the ranks'
            results.
        observe: called with the ranks' results.
    """

    def __init__(
        self, handle: StepHandle, label_tokens: int, keep: Any, processes: Sequence[Process],
        skipped: Callable[[float | None, Sequence[StepResult]], SkippedStep | None],
        observe: Callable[[Sequence[StepResult]], None],
    ) -> None:  # fmt: skip
        self._observe = observe
        self._handle = handle
        self._skipped = skipped
        self._label_tokens = label_tokens
        self._keep = keep  # owner of the input references
        self._processes = processes
        self._rewards: Callable[[Mapping[int, list[float]]], dict[str, float]] | None = None

    def compared(self, rewards: Callable[[Mapping[int, list[float]]], dict[str, float]]) -> None:
        """Add rewards of preference pairs to the output."""
        self._rewards = rewards

    def forget(self) -> None:
        """Discard the output."""
        self._handle.forget()

    def scores(self) -> dict[int, list[float]]:
        """Return values by microbatch: for preference pairs, the log-probability of each row; for
        generated texts, the next token of each row. Raises as :meth:`result`."""
        return self._scores(self._handle.result())

    def _scores(self, results: Sequence[StepResult]) -> dict[int, list[float]]:
        """Merge scores: FSDP processes hold parts of the rows, in order; TP and CP processes hold
        all."""
        scores: dict[int, list[float]] = {}
        pairs = zip(self._processes, results, strict=True)
        firsts = ((p.fsdp, r) for p, r in pairs if p.tp == p.cp == 0)
        for _, result in sorted(firsts, key=itemgetter(0)):
            for (_, microbatch), values in result.scores.items():
                scores.setdefault(microbatch, []).extend(values)
        return scores

    def result(self) -> StepOutput:
        """Wait for the step and return its output.

        Raises:
            RankFailedError: a rank died or raised.
        """
        results = self._handle.result()
        self._observe(results)
        pairs = list(zip(self._processes, results, strict=True))
        # FSDP and CP processes hold parts of the loss; TP processes hold the same value.
        partials = [part for p, result in pairs if p.tp == 0 for part in result.losses.items()]
        losses: dict[str, float] = {}
        for (stage, _), value in sorted(partials, key=lambda part: (part[0][0].module, part[0][1])):
            losses[stage.module] = losses.get(stage.module, 0.0) + value
        rates = [r.learning_rate for r in results if r.learning_rate is not None]
        peaks: dict[int, int] = {}
        for process, result in pairs:
            peaks[process.rank] = max(peaks.get(process.rank, 0), result.peak_bytes)
        loss = sum(losses.values())
        return StepOutput(
            loss=loss,
            label_tokens=self._label_tokens,
            # The first process represents the rank.
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
    """Return source number -> (mean loss over its labels in the step, number of labels).

    Args:
        results: results of processes that hold different parts of the loss.
    """
    partial_sums = [part for result in results for part in result.by_source.items()]
    sums: dict[int, tuple[float, int]] = {}
    for _, sums_by_source in sorted(partial_sums, key=lambda part: part[0][1]):
        for source, (total, count) in sums_by_source.items():
            total_before, labels = sums.get(source, (0.0, 0))
            sums[source] = total_before + total, labels + count
    return {source: (total / count, count) for source, (total, count) in sorted(sums.items())}


def grad_norm(results: Sequence[StepResult]) -> float | None:
    """Return the gradient norm, which all processes share; None without one."""
    return next((r.grad_norm for r in results if r.grad_norm is not None), None)


def _expert_loads(results: Sequence[StepResult]) -> dict[str, tuple[int, ...]]:
    """Sum the loads of each layer's experts over processes that compute different tokens."""
    loads: dict[str, tuple[int, ...]] = {}
    for result in results:
        for name, load in result.loads.items():
            summed = loads.get(name, (0,) * len(load))
            loads[name] = tuple(map(sum, zip(summed, load, strict=True)))
    return loads
