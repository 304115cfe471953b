"""Reports about optimizer steps that were not applied because of non-finite values."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raymm.actors.optimizer.finite import Place
from raymm.data import MicrobatchMeta
from raymm.scheduler.plan.stage import Edge, StageId

# Maximum number of origins and sample ids that a report names; all origins are counted.
MAX_NAMED = 8

_WHAT = {
    "output": "the output of {}", "gradient": "the gradient that {} returns",
    "parameters": "the gradients of parameters of {}",
}


class SkippedStepWarning(UserWarning):
    """Optimizer step that was not applied, in a user's own step loop."""


@dataclass(frozen=True)
class Origin:
    """Place where non-finite values first occurred: its inputs were finite.

    Attributes:
        what: ``"output"``, ``"gradient"`` (returned by the stage), or ``"parameters"`` for their
            gradients, which are sums over microbatches and replicas.
        microbatch: number in the batch; None for parameters.
        batch: number of the batch among several with accumulated gradients.
        sample_ids: samples whose rows were not finite; all samples of the microbatch if rows do not
            correspond to samples.
    """

    module: str
    stage: str
    what: str
    microbatch: int | None = None
    batch: int = 0
    sample_ids: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = _WHAT[self.what].format(self.stage)
        if self.parameters:
            text += f" ({', '.join(self.parameters)}), summed over microbatches"
        if self.microbatch is not None:
            text += f", microbatch {self.microbatch}"
        if self.batch:
            text += f" of batch {self.batch}"
        if self.sample_ids:
            ellipsis = ", ..." if len(self.sample_ids) > MAX_NAMED else ""
            text += f", samples {', '.join(map(repr, self.sample_ids[:MAX_NAMED]))}{ellipsis}"
        return text


@dataclass(frozen=True)
class SkippedStep:
    """Report about an optimizer step that was not applied. Parameters, optimizer state and running
    statistics are those before the step.

    Attributes:
        step: number of the step, from 1. It counts for the learning rate schedule.
        loss: loss of the step's last batch; None if it was computed in another call.
        grad_norm: global gradient norm before clipping; NaN if a loss was not finite.
        began: origins in the order of data flow, at most :data:`MAX_NAMED`.
        beginnings: number of all origins.
    """

    step: int
    loss: float | None
    grad_norm: float
    began: tuple[Origin, ...]
    beginnings: int

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:g}, "
        text = f"step {self.step} was not applied: {loss}gradient norm {self.grad_norm:g}"
        if self.began:
            text += f"; it began in {self.began[0]}"
        if self.beginnings > 1:
            text += f", and in {self.beginnings - 1} more"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for ``metrics.jsonl``. ``loss`` and ``grad_norm`` are text, because JSON
        has no non-finite numbers."""
        return {
            "loss": None if self.loss is None else f"{self.loss:g}",
            "grad_norm": f"{self.grad_norm:g}", "beginnings": self.beginnings,
            "began": [asdict(origin) for origin in self.began],
        }


def skipped_step(
    step: int,
    loss: float | None,
    grad_norm: float | None,
    reports: Iterable[Sequence[Place] | None],
    edges: Sequence[Edge],
    batches: Sequence[Sequence[MicrobatchMeta]] = (),
    text_module: str = "",
) -> SkippedStep | None:
    """Return the report about an update from the reports of all processes; None if it was applied.

    Args:
        reports: per process, the places with non-finite values; None if the step was applied.
        edges: edges between stages, as (producer, consumer).
        batches: microbatch metadata of each batch since the last update; empty if samples have no
            ids.
        text_module: name of the language model, whose rows are the samples; empty without one.
    """
    not_finite = [report for report in reports if report is not None]
    if not not_finite:
        return None
    began = _beginnings({origin for report in not_finite for origin in report}, edges)
    merged: dict[Place, set[int]] = {}
    for origin in began:
        merged.setdefault(origin._replace(rows=()), set()).update(origin.rows)
    origins = [
        _origin(origin, sorted(rows), batches, text_module) for origin, rows in merged.items()
    ]
    norm = math.nan if grad_norm is None else grad_norm
    return SkippedStep(step, loss, norm, tuple(origins[:MAX_NAMED]), len(origins))


def _beginnings(places: set[Place], edges: Sequence[Edge]) -> list[Place]:
    """Return, in the order of data flow, outputs that are non-finite though their inputs are
    finite; else such gradients; else parameter gradients."""
    order = {stage: number for number, stage in enumerate(_in_order(edges))}
    for kind, sources in (
        ("output", edges), ("gradient", [(dst, src) for src, dst in edges]), ("parameters", ()),
    ):
        candidates = [place for place in places if place.kind == kind]
        affected = {(place.stage, place.batch, place.microbatch) for place in candidates}
        began = [
            place for place in candidates
            if not any((src, place.batch, place.microbatch) in affected
                       for src, dst in sources if dst == place.stage)
        ]  # fmt: skip
        if began:
            sign = -1 if kind == "gradient" else 1
            return sorted(began, key=lambda place: (
                place.batch, place.microbatch, sign * order.get(place.stage, 0), place
            ))  # fmt: skip
    return []


def _in_order(edges: Sequence[Edge]) -> list[StageId]:
    """Return the stages in topological order."""
    pending = dict.fromkeys(stage for edge in edges for stage in edge)
    ordered: list[StageId] = []
    while pending:
        ready = [node for node in pending if not any(d == node and s in pending for s, d in edges)]
        ordered += ready
        for node in ready:
            del pending[node]
    return ordered


def _origin(
    place: Place, rows: Sequence[int], batches: Sequence[Sequence[MicrobatchMeta]],
    text_module: str,
) -> Origin:
    module = place.stage.module
    if place.microbatch < 0:
        return Origin(module, str(place.stage), place.kind, parameters=place.names)
    ids: Sequence[str] = [str(row) for row in rows]
    if batches:
        is_kept = place.batch < len(batches)
        meta = batches[place.batch][place.microbatch] if is_kept else None
        ids = () if meta is None else _samples(place, rows, meta, text_module)
    return Origin(
        module, str(place.stage), place.kind, place.microbatch, place.batch, tuple(ids)
    )


def _samples(
    place: Place, rows: Sequence[int], meta: MicrobatchMeta, text_module: str
) -> Sequence[str]:
    module = place.of.module
    owners = range(meta.num_samples) if module == text_module else meta.items.get(module, ())
    if not rows or place.count != len(owners):
        return meta.sample_ids
    return [meta.sample_ids[row] for row in sorted({owners[row] for row in rows})]


def warn_of(skipped: SkippedStep) -> None:
    """Issue the warning at the line of the user's program that took the step."""
    package_folder, frame, level = f"{Path(__file__).parents[1]}{os.sep}", inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(package_folder):
        frame, level = frame.f_back, level + 1
    warnings.warn(str(skipped), SkippedStepWarning, stacklevel=level)
