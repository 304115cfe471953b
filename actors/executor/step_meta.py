"""What ranks get of a step, and what they give back."""

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
    """What decides the layouts of a microbatch's messages.

    Attributes:
        identity: the same for microbatches with the same layouts.
        structure: the same for microbatches whose layouts differ in sizes at most.
        sizes: that layouts may follow from; as many for all of one structure.
    """

    identity: int
    structure: int
    sizes: tuple[int, ...]

    def decoding(self, decode: Decode | None) -> LayoutKey:
        """In a step that writes text: a token that a text goes on with has nothing beside it."""
        if decode is None or decode.first:
            return self
        return self._replace(identity=hash((self.identity, "token")), structure=hash("token"))


class StepMeta(NamedTuple):
    """What every rank is told about a step.

    Attributes:
        step: number of the step, for seeds.
        label_tokens: what the loss is divided by: label tokens, or pairs of answers, in the whole
            step.
        keys: per microbatch, a value that determines every message's layout.
        seed: the run's seed.
        sample_ids: per microbatch, its samples' ids.
        sample_counts: per microbatch, the number of its samples, where they have no ids.
        training: False for evaluation: no dropout anywhere.
        batch: how many batches' gradients the step has accumulated before, for seeds.
        scales: by module, what the sum of its samples' losses is multiplied with: its weight
            divided by the count of its own over the whole step.
        offsets: per microbatch, by module whose outputs have not one row of each sample, each
            sample's first row, and behind the last one the number of rows.
        decode: of a step that writes texts, which; its scores are then their next tokens.
        first_samples: where samples have noise, each microbatch's first one's number in the batch.
        reference: adapters are left out, and what there is of every row is the log-probability of
            its labels.
        counting: of a mixture of experts, it is the pass before a training step that counts where
            routers send its tokens.
        router_counts: what came of that: how often each expert is chosen in the whole step, by all
            layers; None: each microbatch of each stage is a step by itself.
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

    def samples_in(self, microbatch: int) -> int:
        """Return the number of a microbatch's samples, 0 if unknown."""
        if self.sample_counts:
            return self.sample_counts[microbatch]
        return len(self.sample_ids[microbatch]) if self.sample_ids else 0

    def offsets_of(self, microbatch: int, module: str) -> Sequence[int] | None:
        """Of a module's outputs; None if they have one row of each sample."""
        return self.offsets[microbatch].get(module) if self.offsets else None

    def sample_seeds(self, microbatch: int) -> SampleSeeds | None:
        """Of a microbatch's noise; None if there is none."""
        if not self.first_samples:
            return None
        step, batch = (self.step, self.batch) if self.training else (0, 0)
        return SampleSeeds(self.seed, step, batch, self.first_samples[microbatch])


SpanLabel = tuple[str, StageId, int, StageId, float]
"""Op, stage, microbatch, peer and quota of a task."""


@dataclass
class StepResult:
    """One rank's outcome of a step.

    Attributes:
        losses: by stage that computes one, and microbatch, its share of the loss.
        by_source: the same by number of a source: its sum of cross entropies, and over how many
            labels; of microbatches whose samples say which source they are of.
        scores: of pairs of answers, the same of their rows' log-probabilities; of texts, of
            their next tokens.
        labels: of the tasks that ran (:func:`pack_labels`), the same in every step of a program.
        times: when they began, all of them, and when they ended: seconds on this host's wall
            clock, float64.
        peak_bytes: the most memory that the process held meanwhile
            (:class:`raymm.actors.memory.peak_memory.PeakMemory`).
        grad_norm, learning_rate: of the update, if the step ends in one that is applied.
        not_finite: of an update that was not applied, what was not finite here.
        loads: by name of a layer's experts, how many of the step's tokens each of them got.
        router_counts: of what was counted here, as of :class:`StepMeta`; None if nothing was.
    """

    losses: dict[tuple[StageId, int], float] = field(default_factory=dict)
    scores: dict[tuple[StageId, int], list[float]] = field(default_factory=dict)
    by_source: dict[tuple[StageId, int], dict[int, tuple[float, int]]] = field(
        default_factory=dict
    )
    labels: bytes = b""
    times: bytes = b""
    grad_norm: float | None = None
    learning_rate: float | None = None
    peak_bytes: int = 0
    not_finite: list[Place] | None = None
    loads: dict[str, list[int]] = field(default_factory=dict)
    router_counts: list[float] | None = None

    @property
    def spans(self) -> list[tuple[str, StageId, int, float, float, StageId, float]]:
        """Op, stage, microbatch, start, end, peer and quota of every task."""
        labels, seconds = _labels(self.labels), array("d", self.times)
        return [
            (op, stage, microbatch, start, end, peer, quota)
            for (op, stage, microbatch, peer, quota), start, end in zip(
                labels, seconds[: len(labels)], seconds[len(labels) :], strict=True
            )
        ]


def pack_labels(labels: Sequence[SpanLabel]) -> bytes:
    """What of a result's spans does not change from step to step; pickled once.

    Args:
        labels: of the tasks, in the order in which their times are given.
    """
    return pickle.dumps(list(labels), pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=1024)
def _labels(packed: bytes) -> list[SpanLabel]:
    return pickle.loads(packed) if packed else []


def measured_timeline(results: Sequence[StepResult]) -> Timeline:
    """All ranks' spans as one timeline that starts at 0."""
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
