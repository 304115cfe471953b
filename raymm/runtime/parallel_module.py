"""What models that run on Ray actors have in common: steps, and what a user reads back of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from raymm.data import MicrobatchMeta
from raymm.errors import ModelError, RankFailedError
from raymm.runtime.interruption import holds_nothing_when_interrupted
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.skipped_step import MAX_NAMED, SkippedStep, warn_of
from raymm.scheduler.program.timeline import Timeline

# Batches between two updates whose samples are remembered.
MAX_BATCHES = 1024

Itself = TypeVar("Itself", bound="ParallelModule")


@dataclass(frozen=True)
class StepOutput:
    """Outcome of a step.

    Attributes:
        loss: sum of token cross entropies / label tokens, over the whole step.
        label_tokens: label tokens of the step.
        timeline: what every rank did and when.
        grad_norm: global gradient norm before clipping, if the step clipped.
        learning_rate: the rate used, if the step updated parameters.
        peak_bytes: per rank, the most memory that one of its processes held.
        skipped: why the optimizer's step was not applied; None if it was, or there was none.
        losses: by module that computes one, what ``loss`` is the sum of.
        expert_loads: of a mixture of experts, by name of a layer's experts, how many of the step's
            tokens (padding is none) each of them got.
        source_losses: by number of a source, the mean over its label tokens and how many they are;
            of steps whose samples are of several.
        rewards: of pairs of answers, as of
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
        """By name of a layer's experts, what the fullest of them got, over the mean."""
        return {
            name: max(load) * len(load) / max(sum(load), 1)
            for name, load in self.expert_loads.items()
        }

    @property
    def expert_metrics(self) -> dict[str, Any]:
        """Of a mixture of experts, what a step's row of metrics has of their load."""
        if not (imbalance := self.expert_imbalance):
            return {}
        return {
            "expert_loads": {name: list(load) for name, load in self.expert_loads.items()},
            "expert_imbalance": imbalance, "worst_expert_imbalance": max(imbalance.values()),
        }

    def _repr_html_(self) -> str:
        from raymm.draw.notebook import bars_html  # it takes half a second, in notebooks only

        busy, whole = self.timeline.stage_busy(), self.timeline.makespan or 1.0
        facts = [f"loss {self.loss:.4f}", f"{self.label_tokens} label tokens", f"{whole:.3g} s"]
        if self.grad_norm is not None:
            facts.append(f"gradient norm {self.grad_norm:.3g}")
        if self.skipped is not None:
            facts.append(f"not applied: {self.skipped}")
        modules = {str(stage): stage.module for stage in busy}
        shares = {str(stage): seconds / whole for stage, seconds in busy.items()}
        return bars_html("  ·  ".join(facts) + "  ·  busy:", shares, modules)


class PendingOutput(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for it.

        Raises:
            RankFailedError: a process died or raised.
        """
        ...


class ParallelModule(ABC):
    """A model on Ray actors.

    Args:
        model: the description.
        options: how it runs.

    Attributes:
        options: these.
        plan: what runs where.
        group: its processes; for checkpoints they have ``save`` and ``load``.
        microbatches: that a batch in memory is split into.
        skipped: of the last :meth:`train_step` or ``optimizer.step()``, why it was not applied;
            None if it was.
    """

    plan: Any
    group: Any
    microbatches: int
    skipped: SkippedStep | None = None

    def __init__(self, model: Any, options: RuntimeOptions) -> None:
        self.model, self.options = model, options
        self._step = 0
        self._batches: list[Sequence[MicrobatchMeta]] = []
        self._accumulated = 0  # batches, since the last update

    @property
    def optimizer(self) -> ParallelOptimizer:
        """For step loops: ``optimizer.step()`` and ``optimizer.zero_grad()``."""
        return ParallelOptimizer(self)

    @property
    def steps_taken(self) -> int:
        """Optimizer steps so far."""
        return self._step

    def restore_step(self, step: int) -> None:
        """Say how many optimizer steps the loaded state has taken."""
        self._step = step

    @holds_nothing_when_interrupted
    def execute(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """Forward and backward of one step; gradients accumulate until ``optimizer.step()``.

        Args:
            batch: one batch, which is split into microbatches by rows, or a list of
                microbatches. See :meth:`raymm.MultimodalModule.forward` for the keys.

        Raises:
            DataError: it does not fit the model, or does not divide into microbatches. Nothing
                was sent to a process: the model goes on with the next batch, and gradients that
                have accumulated are as they were.
            RankFailedError: a stage raised (a callback, out of memory). The step has ended, and the
                model has not: gradients that had accumulated are dropped, parameters are as after
                the last update, and the next step goes on with them.
                After the death of a process, all have ended.
        """
        return self.submit(self.prepare(batch)).result()

    @holds_nothing_when_interrupted
    def train_step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """:meth:`execute` and the optimizer's step in one call per process. A step that is not
        finite is not applied: ``skipped`` of the output says why, and a
        :class:`raymm.runtime.skipped_step.SkippedStepWarning`."""
        output = self.submit(self.prepare(batch), update=True).result()
        self._say_skipped(output.skipped)
        return output

    @holds_nothing_when_interrupted
    def evaluate(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> StepOutput:
        """Loss only: no gradients."""
        return self.submit(self.prepare(batch), forward_only=True).result()

    @abstractmethod
    def reloadable(self) -> frozenset[str]:
        """Modules whose frozen weights no checkpoint need hold."""

    @abstractmethod
    def prepare(self, batch: Any) -> Any:
        """A step's microbatches as :meth:`submit` takes them.

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
    ) -> PendingOutput:
        """Start a step and return at once; steps run in the order they were submitted.

        Args:
            prepared: per microbatch, ``{"text": ..., modality: ...}`` where each value is a
                dict of tensors or a Ray reference to one; and its metadata.
            update: clip gradients and step the optimizer afterwards.
            forward_only: compute the loss without gradients.
            keep: held until the step's result was read.

        Raises:
            DataError: inputs of an encoder of other names or dtypes than it was tried with, which
                it cannot take.
        """

    @abstractmethod
    def update(self) -> float | None:
        """Clip, update and zero accumulated gradients; returns the global gradient norm. Where
        it, or a loss, is not finite, nothing is updated, as of :meth:`train_step`."""

    def _note_batch(
        self, meta: Sequence[MicrobatchMeta], update: bool
    ) -> tuple[Sequence[MicrobatchMeta], ...]:
        """A batch that is trained on; returns those since the update before."""
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
        """Forget accumulated gradients."""
        self._take_batches()
        self.group.call("zero_grad")

    def not_finite_tensors(self) -> list[str]:
        """Names, as in checkpoints, of parameters and optimizer state with values that are not
        finite, and how many."""
        named = self.group.call("not_finite_tensors")
        return list(dict.fromkeys(name for names in named for name in names))

    def _check_weights(self) -> None:
        """
        Raises:
            ModelError: weights that the model starts with are not finite, by name.
        """
        if names := self.not_finite_tensors():
            self.shutdown()
            raise not_finite_weights(names)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within a block, parameters are the moving averages of themselves
        (:class:`raymm.actors.optimizer.optimizer_config.EmaConfig`); nothing may be trained or
        saved there. Without averages, or before the first step, they stay what they are."""
        self.group.call("show_averages")
        try:
            yield
        except RankFailedError:
            raise  # who is left puts them back as it leaves the step that failed
        except BaseException:
            self.group.call("hide_averages")
            raise
        else:
            self.group.call("hide_averages")

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """:meth:`averaged`, if that is what evaluations are of (``evaluate`` of the averages)."""
        ema = self.options.optimizer.ema
        return self.averaged() if ema is not None and ema.evaluate else nullcontext()

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Accumulated gradients of all trainable parameters, by the model's names.

        Holders of a shared parameter (tied embeddings, replicas of a module) have each their
        part, until the optimizer's step sums them; here they are summed.
        """

    @abstractmethod
    def parameters(self, trainable_only: bool = True) -> dict[str, torch.Tensor]:
        """Parameters by the model's names."""

    def shutdown(self) -> None:
        """End all processes."""
        self.group.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group.num_ranks} processes, step {self._step})"

    def _repr_html_(self) -> str:
        from raymm.draw.row_table import html_table

        text = f"{self.steps_taken} steps taken"
        if (reason := self.group.ended) is not None:
            text += f"; the processes have ended: {reason}"
            return html_table([{"processes": "none"}], text)
        rows = [
            {"process": str(rank), "runs": at.label, "node": at.host, "pid": str(at.pid)}
            for rank, at in enumerate(self.group.places)
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
        """Clip, update and zero gradients; returns the global gradient norm. A step that is not
        finite is not applied, as of :meth:`ParallelModule.train_step`."""
        return self._parallel.update()

    def zero_grad(self) -> None:
        """Forget accumulated gradients (``step`` does so too)."""
        self._parallel.zero_grad()


def not_finite_weights(names: Sequence[str]) -> ModelError:
    """An error about weights that a model starts with."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ModelError(
        f"weights that are not finite: {', '.join(names[:MAX_NAMED])}{more}; accepted: finite "
        "numbers. Check the file or the module that they come from"
    )
