"""Common interface of models on Ray actors: steps, results, parameters and gradients."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from operator import itemgetter
from typing import Any, Protocol, TypeVar, cast

import torch

from raymm.actors.executor.step_meta import StepResult, measured_timeline
from raymm.actors.rank.step_calls import StepHandle
from raymm.data import MicrobatchMeta
from raymm.errors import InputError, RankFailedError
from raymm.plural import plural
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.skipped_step import SkippedStep, warn_of
from raymm.scheduler.plan.process_grid import Process
from raymm.scheduler.program.timeline import Timeline

# Maximum number of batches between two updates whose samples are remembered.
MAX_BATCHES = 1024

Itself = TypeVar("Itself", bound="ParallelModule")


@dataclass(frozen=True)
class StepOutput:
    """Outcome of a step.

    Attributes:
        loss: sum of token cross entropies / label tokens, over all microbatches.
        label_tokens: label tokens of the step.
        timeline: measured instructions of all ranks.
        grad_norm: global gradient norm before clipping, if the step clipped.
        learning_rate: rate of the update; None without an update.
        peak_bytes: per rank, the peak memory of one of its processes in bytes.
        skipped: why the optimizer step was not applied; None if it was, or if there was none.
        losses: summands of ``loss``, by the module that computes them.
        expert_loads: for a mixture of experts, tokens per expert by layer; padding does not count.
        source_losses: source number -> (mean loss over its label tokens, label tokens), if the
            samples come from several sources.
        rewards: for preference pairs, as in
            :meth:`raymm.kernels.preference.PreferenceLoss.rewards`.
    """

    loss: float
    label_tokens: int
    timeline: Timeline
    grad_norm: float | None = None
    learning_rate: float | None = None
    peak_bytes: tuple[int, ...] = ()
    skipped: SkippedStep | None = None
    losses: dict[str, float] = field(default_factory=dict)
    expert_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    source_losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def expert_imbalance(self) -> dict[str, float]:
        """Maximum load of an expert over the mean load, by layer."""
        return {
            name: max(load) * len(load) / max(sum(load), 1)
            for name, load in self.expert_loads.items()
        }

    @property
    def expert_metrics(self) -> dict[str, Any]:
        """Metrics row entries about the load of experts; empty without experts."""
        if not (imbalance := self.expert_imbalance):
            return {}
        return {
            "expert_loads": {name: list(load) for name, load in self.expert_loads.items()},
            "expert_imbalance": imbalance, "worst_expert_imbalance": max(imbalance.values()),
        }

    def _repr_html_(self) -> str:
        from raymm.draw.notebook import bars_html  # takes half a second; only notebooks need it

        busy, makespan = self.timeline.stage_busy(), self.timeline.makespan or 1.0
        facts = [f"loss {self.loss:.4f}", f"{self.label_tokens} label tokens", f"{makespan:.3g} s"]
        if self.grad_norm is not None:
            facts.append(f"gradient norm {self.grad_norm:.3g}")
        if self.skipped is not None:
            facts.append(f"not applied: {self.skipped}")
        modules = {str(stage): stage.module for stage in busy}
        shares = {str(stage): seconds / makespan for stage, seconds in busy.items()}
        return bars_html("  ·  ".join(facts) + "  ·  busy:", shares, modules)


Method = TypeVar("Method", bound=Callable[..., Any])


def holds_nothing_when_interrupted(method: Method) -> Method:
    """Wrap a method so that the traceback of an interruption or of a wrong input does not hold its
    object.

    An interactive session keeps the last error with all frames and their arguments. Without this,
    ranks would outlive the variable of their model.
    """

    @wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except (KeyboardInterrupt, InputError) as error:
            traceback.clear_frames(error.__traceback__)
            del args, options
            raise

    return cast(Method, called)


class PendingOutput(Protocol):
    """Step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step.

        Raises:
            RankFailedError: a process died or raised.
        """
        ...


class ParallelModule(ABC):
    """Model on Ray actors.

    Attributes:
        group: processes of the model. They implement ``save`` and ``load`` for checkpoints.
        skipped: why the last :meth:`train_step` or ``optimizer.step()`` was not applied; None if it
            was.
    """

    plan: Any
    group: Any
    microbatches: int
    skipped: SkippedStep | None = None

    def __init__(self, model: Any, options: RuntimeOptions) -> None:
        self.model, self.options = model, options
        self._step = 0
        self._kernels: dict[str, str] = {}
        self._batches: list[Sequence[MicrobatchMeta]] = []
        self._accumulated = 0  # batches since the last update

    @property
    def optimizer(self) -> ParallelOptimizer:
        """Optimizer for step loops: ``optimizer.step()`` and ``optimizer.zero_grad()``."""
        return ParallelOptimizer(self)

    @property
    def steps_taken(self) -> int:
        """Number of optimizer steps so far."""
        return self._step

    def restore_step(self, step: int) -> None:
        """Set the number of optimizer steps that the loaded state has taken."""
        self._step = step

    @property
    def kernels(self) -> Mapping[str, str]:
        """Attention kernels that ranks use, by class of shapes (``kernels="auto"``)."""
        return self._kernels

    def restore_kernels(self, kernels: Mapping[str, str]) -> None:
        """Use attention kernels from the next step on."""
        self._kernels = dict(kernels)

    @holds_nothing_when_interrupted
    def execute(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """Run forward and backward of one step. Gradients accumulate until ``optimizer.step()``.

        Args:
            batch: one batch, which is split into microbatches by rows, or a list of microbatches.
                See :meth:`raymm.MultimodalModule.forward` for the keys.

        Raises:
            DataError: the batch does not fit the model, or does not divide into microbatches.
                Nothing was sent to a process. Accumulated gradients are kept, and the next batch
                can be executed.
            RankFailedError: a stage raised (a callback, out of memory) or a process died. If a
                stage raised, accumulated gradients are dropped, parameters are those after the last
                update, and the next step can run. If a process died, all processes have ended.
        """
        return self.submit(self.prepare(batch)).result()

    @holds_nothing_when_interrupted
    def train_step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """Run :meth:`execute` and the optimizer step in one call per process.

        A step with non-finite values is not applied. ``skipped`` of the output then has the reason,
        and a :class:`raymm.runtime.skipped_step.SkippedStepWarning` is issued.
        """
        output = self.submit(self.prepare(batch), update=True).result()
        self._say_skipped(output.skipped)
        return output

    @holds_nothing_when_interrupted
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """Compute the loss without gradients."""
        return self.submit(self.prepare(batch), forward_only=True).result()

    @abstractmethod
    def reloadable(self) -> frozenset[str]:
        """Return the modules whose frozen weights checkpoints need not contain."""

    @abstractmethod
    def prepare(self, batch: Any) -> Any:
        """Return the microbatches of a step in the form that :meth:`submit` takes.

        Raises:
            DataError: see :meth:`execute`.
        """

    @abstractmethod
    def submit(
        self,
        prepared: Any,
        update: bool = False,
        forward_only: bool = False,
        keep: Any = None,
        *,
        schedule: str | None = None,
    ) -> PendingOutput:
        """Start a step and return immediately. Steps run in the order of submission.

        Args:
            prepared: per microbatch, ``{"text": ..., modality: ...}`` where each value is a dict of
                tensors or a Ray reference to one; and the metadata of the microbatches.
            update: clip gradients and step the optimizer afterwards.
            forward_only: compute the loss without gradients.
            keep: object to hold until the step's result was read.
            schedule: name of the step's schedule; by default the plan's.

        Raises:
            DataError: encoder inputs have other names or dtypes than those of the probe, and the
                encoder cannot take them.
        """

    @abstractmethod
    def update(self) -> float | None:
        """Clip, apply and zero accumulated gradients. Return the global gradient norm.

        Nothing is updated if the norm or a loss is not finite, as in :meth:`train_step`.
        """

    def _note_batch(
        self, meta: Sequence[MicrobatchMeta], update: bool
    ) -> tuple[Sequence[MicrobatchMeta], ...]:
        """Remember a training batch. Return all batches since the last update if it updates."""
        self._accumulated += 1
        if len(self._batches) < MAX_BATCHES:
            self._batches.append(meta)
        return self._take_batches() if update else ()

    def _take_batches(self) -> tuple[Sequence[MicrobatchMeta], ...]:
        batches = tuple(self._batches)
        self._batches.clear()
        self._accumulated = 0
        return batches

    def _say_skipped(self, skipped: SkippedStep | None) -> None:
        self.skipped = skipped
        if skipped is not None:
            warn_of(skipped)

    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._take_batches()
        self.group.call("zero_grad")

    def not_finite_tensors(self) -> list[str]:
        """Return the names, as in checkpoints, of parameters and optimizer state with non-finite
        values, and their numbers of such values."""
        named = self.group.call("not_finite_tensors")
        return list(dict.fromkeys(name for names in named for name in names))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace parameters by their moving averages within the block
        (:class:`raymm.actors.optimizer.optimizer_config.EmaConfig`).

        Nothing may be trained or saved within the block. Parameters stay unchanged if there are no
        averages, or before the first step.
        """
        self.group.call("show_averages")
        try:
            yield
        except RankFailedError:
            raise  # remaining ranks restore the parameters when they leave the failed step
        except BaseException:
            self.group.call("hide_averages")
            raise
        else:
            self.group.call("hide_averages")

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return :meth:`averaged` if evaluations use averages (``evaluate`` of the averages), else
        a context without effect."""
        ema = self.options.optimizer.ema
        return self.averaged() if ema is not None and ema.evaluate else nullcontext()

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return accumulated gradients of all trainable parameters, by the model's names.

        Processes that share a parameter (tied embeddings, replicas of a module) hold partial
        gradients until the optimizer step; the returned gradients are summed.
        """

    @abstractmethod
    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        """Return parameters by the model's names."""

    def shutdown(self) -> None:
        """End all processes."""
        self.group.shutdown()

    close = shutdown

    def __repr__(self) -> str:
        processes = plural(self.group.num_ranks, "process", "es")
        return f"{type(self).__name__}({processes}, step {self._step})"

    def _repr_html_(self) -> str:
        from raymm.draw.row_table import html_table

        text = f"{plural(self.steps_taken, 'step')} taken"
        if (reason := self.group.ended) is not None:
            text += f"; the processes have ended: {reason}"
            return html_table([{"processes": "none"}], text)
        rows = [
            {
                "process": str(rank), "runs": process.label, "node": process.host,
                "pid": str(process.pid),
            }
            for rank, process in enumerate(self.group.places)
        ]
        return html_table(rows, text)

    def __enter__(self: Itself) -> Itself:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class ParallelOptimizer:
    """``step()`` and ``zero_grad()`` of all processes at once, like a torch optimizer."""

    def __init__(self, parallel: ParallelModule) -> None:
        self._parallel = parallel

    @holds_nothing_when_interrupted
    def step(self) -> float | None:
        """Clip, apply and zero gradients. Return the global gradient norm.

        A step with non-finite values is not applied, as in :meth:`ParallelModule.train_step`.
        """
        return self._parallel.update()

    def zero_grad(self) -> None:
        """Drop accumulated gradients, as ``step`` also does."""
        self._parallel.zero_grad()


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
