"""Metadata that ranks receive for a step, and the results that they return."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from raymm.actors.modules.message import Decode
from raymm.actors.modules.noise import SampleSeeds
from raymm.actors.optimizer.finite import Place
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.timeline import Span, Timeline


class LayoutKey(NamedTuple):
    """Key that determines the layouts of a microbatch's messages.

    Attributes:
        identity: equal for microbatches with the same layouts.
        structure: equal for microbatches whose layouts differ in dimensions only.
        sizes: sizes that dimensions may depend on; equally many within one structure.
    """

    identity: int
    structure: int
    sizes: tuple[int, ...]

    def decoding(self, decode: Decode | None) -> LayoutKey:
        """Return the key for a step that generates text. After the first token, messages hold one
        token per text and no modality inputs."""
        if decode is None or decode.first:
            return self
        return self._replace(identity=hash((self.identity, "token")), structure=hash("token"))


class StepMeta(NamedTuple):
    """Metadata of a step that every rank receives.

    Attributes:
        label_tokens: divisor of the loss: label tokens, or pairs of answers, in the whole step.
        keys: per microbatch, a value that determines every message's layout.
        sample_counts: per microbatch, the number of its samples, if they have no ids.
        training: False for evaluation, which disables dropout everywhere.
        batch: number of batches whose gradients the step has accumulated before, for seeds.
        scales: by module, factor for the sum of its samples' losses: the module's weight divided by
            its count over the whole step.
        offsets: per microbatch, for each module whose outputs do not have one row per sample, the
            first row of each sample, followed by the number of rows.
        decode: texts that the step generates, or None; its scores are then their next tokens.
        first_samples: if samples have noise, per microbatch its first sample's number in the batch.
        reference: True to skip adapters and return the log-probability of each row's labels.
        counting: for mixtures of experts, True for the pass before a training step that counts
            where routers send the step's tokens.
        router_counts: result of the counting pass: how often each expert is chosen in the whole
            step, over all layers. None to treat each microbatch of each stage separately.
        kernels: chosen attention kernels (:mod:`raymm.kernels.choice.choice`).
    """

    step: int
    label_tokens: int
    keys: tuple[object, ...]
    seed: int = 0
    sample_ids: tuple[tuple[str, ...], ...] = ()
    training: bool = True
    batch: int = 0
    scales: Mapping[str, float] = {}
    offsets: tuple[Mapping[str, Sequence[int]], ...] = ()
    decode: Decode | None = None
    first_samples: tuple[int, ...] = ()
    reference: bool = False
    counting: bool = False
    router_counts: tuple[float, ...] | None = None
    sample_counts: tuple[int, ...] = ()
    kernels: Mapping[str, str] = {}

    def samples_in(self, microbatch: int) -> int:
        """Return the number of a microbatch's samples, 0 if unknown."""
        if self.sample_counts:
            return self.sample_counts[microbatch]
        return len(self.sample_ids[microbatch]) if self.sample_ids else 0

    def offsets_of(self, microbatch: int, module: str) -> Sequence[int] | None:
        """Return the row offsets of a module's outputs; None if they have one row per sample."""
        return self.offsets[microbatch].get(module) if self.offsets else None

    def sample_seeds(self, microbatch: int) -> SampleSeeds | None:
        """Return the seeds of a microbatch's noise; None without noise."""
        if not self.first_samples:
            return None
        step, batch = (self.step, self.batch) if self.training else (0, 0)
        return SampleSeeds(self.seed, step, batch, self.first_samples[microbatch])


SpanLabel = tuple[str, StageId, int, StageId, float]
"""Op, stage, microbatch, peer and quota of a task."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step on one rank.

    Attributes:
        losses: share of the loss, by (stage, microbatch), of stages that compute a loss.
        by_source: like ``losses``, (sum of cross entropies, number of labels) by source number, for
            microbatches whose samples name their source.
        scores: like ``losses``, log-probabilities of the rows for pairs of answers, or the next
            tokens for generated texts.
        labels: packed labels of the tasks (:func:`pack_labels`), the same in every step of a
            program.
        times: start times of all tasks, then end times: seconds on this host's wall clock, packed
            float64.
        grad_norm, learning_rate: of the update, if the step ends with one that is applied.
        not_finite: for an update that was not applied, the non-finite values of this process.
        loads: number of the step's tokens for each expert, by name of the layer's experts.
        router_counts: counts of this process, see :class:`StepMeta`; None if it counted none.
        kernel_seconds: new measurements of attention kernels.
    """

    losses: dict[tuple[StageId, int], float] = field(default_factory=dict)
    scores: dict[tuple[StageId, int], list[float]] = field(default_factory=dict)
    by_source: dict[tuple[StageId, int], dict[int, tuple[float, int]]] = field(default_factory=dict)
    labels: bytes = b""
    times: bytes = b""
    grad_norm: float | None = None
    learning_rate: float | None = None
    peak_bytes: int = 0
    not_finite: list[Place] | None = None
    loads: dict[str, list[int]] = field(default_factory=dict)
    router_counts: list[float] | None = None
    kernel_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def spans(self) -> list[tuple[str, StageId, int, float, float, StageId, float]]:
        """Return op, stage, microbatch, start, end, peer and quota of every task."""
        labels, seconds = _labels(self.labels), array("d", self.times)
        return [
            (op, stage, microbatch, start, end, peer, quota)
            for (op, stage, microbatch, peer, quota), start, end in zip(
                labels, seconds[: len(labels)], seconds[len(labels) :], strict=True
            )
        ]


def pack_labels(labels: Sequence[SpanLabel]) -> bytes:
    """Pickle the labels of a program's tasks, in the order in which their times are recorded."""
    return pickle.dumps(list(labels), pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=1024)
def _labels(packed: bytes) -> list[SpanLabel]:
    return pickle.loads(packed) if packed else []


def measured_timeline(results: Sequence[StepResult]) -> Timeline:
    """Return all ranks' spans as one timeline that starts at 0."""
    starts = [span[3] for result in results for span in result.spans]
    origin = min(starts, default=0.0)
    return Timeline(
        tuple(
            Span(rank, op, stage, microbatch, start - origin, end - origin, peer, quota)
            for rank, result in enumerate(results)
            for op, stage, microbatch, start, end, peer, quota in result.spans
        ),
        len(results),
    )
