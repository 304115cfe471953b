"""What a GPU is told about an iteration, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.multiplexed.clock import TimedRun
from raymm.actors.optimizer.finite import Place
from raymm.scheduler.graph.sample_ranges import Range, rows_of
from raymm.scheduler.multiplex.instructions import Instruction, Slot


@dataclass(frozen=True)
class GpuProgram:
    """What one GPU gets of a program.

    Attributes:
        gpu: its number.
        batch: samples of the whole batch.
        instructions: its list.
        slots: of all GPUs.
        needs: per producer, the samples that it reads here.
    """

    gpu: int
    batch: int
    instructions: tuple[Instruction, ...]
    slots: tuple[Slot, ...]
    needs: Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class IterationMeta:
    """What all GPUs are told about an iteration.

    Attributes:
        step: its number, for seeds.
        seed: the run's seed.
        layout: key of the tensors' shapes; of a new one layouts travel before the tensors.
        new_layout: whether none of the GPUs has seen it.
        scales: by loss, what the sum over samples is multiplied with.
        training: with backward; modules in training mode.
        keep_gradients: add to those of earlier iterations; otherwise they are forgotten.
        offsets: by node that has not a row per sample, its samples' first rows, as of
            :func:`raymm.scheduler.graph.sample_ranges.rows_of`.
        label_tokens, microbatch, sample_ids: as of
            :class:`raymm.actors.modules.message.MicrobatchContext`.
        batch: how many batches' gradients the step has accumulated before, for seeds.
    """

    step: int
    seed: int
    layout: str
    new_layout: bool
    scales: Mapping[str, float]
    training: bool = True
    keep_gradients: bool = False
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    label_tokens: int = 1
    microbatch: int = 0
    sample_ids: tuple[str, ...] = ()
    batch: int = 0

    def rows(self, node: str, samples: Range) -> Range:
        """Where samples' rows are in a node's output of the whole batch."""
        return rows_of(samples, self.offsets.get(node))

    def context(self, samples: Range) -> MicrobatchContext:
        """What is known of these samples."""
        ids = self.sample_ids[samples.lo : samples.hi]
        return MicrobatchContext(self.label_tokens, self.microbatch, ids)


@dataclass
class IterationResult:
    """What a GPU reports.

    Attributes:
        losses: by loss, the scaled sum over the samples here.
        runs: when its nodes ran.
        start, end: of the whole list, on the same clock.
        sent_bytes: to other GPUs.
        grad_norm, learning_rate: of the optimizer's step, if there was one that was applied.
        not_finite: of one that was not, what was not finite here.
    """

    losses: dict[str, float] = field(default_factory=dict)
    runs: list[TimedRun] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    sent_bytes: int = 0
    grad_norm: float | None = None
    learning_rate: float | None = None
    not_finite: list[Place] | None = None


@dataclass
class GpuStepResult:
    """What a GPU reports of a step.

    Attributes:
        iterations: of each of its iterations.
        peak_bytes: the most memory that the process held meanwhile
            (:class:`raymm.actors.memory.peak_memory.PeakMemory`).
    """

    iterations: list[IterationResult]
    peak_bytes: int = 0
