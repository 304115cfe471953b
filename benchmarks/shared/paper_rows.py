"""Stage times of Cornstarch's frozen-aware and -unaware pipelines, as plans of raymm.

Rows are those of Cornstarch v1's Table 3 (a medium LLM; 24 microbatches) and v2's Table 2 (both
encoders in one module; 12 microbatches: a batch of 48 in microbatches of 4): forward and backward
milliseconds per stage, of the encoder and of the LLM. Encoders and LLM are frozen, so an LLM's
backward is B_d and an encoder's is B_w of the projector at its end. LLM backwards that take two to
ten times their forwards imply recomputation; :func:`table_plan` can separate the two.

Stage counts. v2 gives none. v1's Table 9 does, but stages of its "Colocated" column cannot be the
unaware ones of Table 3: VLM-S's encoder takes 49.06 ms per stage in one and 26.49 in the other,
both with one stage. The times themselves imply the counts: a frozen LLM's backward and an encoder's
forward take the same time over all stages, however they are cut, and "the number of pipeline stages
are the same in both cases" (v1 §6.4). ``PaperRow.aware`` and ``.unaware`` are, of all counts with
the same total of at most :data:`MAX_STAGES`, those with the least :func:`mismatch`; ties are broken
by v1's Table 9, then by other rows of the table with the same LLM. Table 9's own counts are kept in
``.table_9``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.baselines.pipelines import unaware_work
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.module_degrees import make_plan
from raymm.scheduler.search.stage_space import Counts, StageSpace

MAX_STAGES = 8
ENCODER, LLM = "encoder", "llm"
# Activations per second of forward. Any number works, as zero-bubble lowerings only compare them.
BYTES_PER_SECOND = 1e9


class StageTimes(NamedTuple):
    """Milliseconds per stage, as printed."""

    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float

    @property
    def bottleneck(self) -> float:
        """Return 1F + 1B of the slower kind of stage."""
        return max(
            self.encoder_forward + self.encoder_backward, self.llm_forward + self.llm_backward
        )


class StageCounts(NamedTuple):
    """Pipeline stages of the encoder and of the LLM."""

    encoder: int
    llm: int

    @property
    def total(self) -> int:
        return self.encoder + self.llm


@dataclass(frozen=True)
class PaperRow:
    """Model of a table.

    Attributes:
        layers: layers of the encoder and of the LLM.
        times: times with frozen-aware and with frozen-unaware partitions.
        paper_speedup: aware over unaware: throughput per GPU (v1), iteration time (v2).
        table_9: (aware, unaware) stage counts of v1's Table 9.
    """

    name: str
    layers: tuple[int, int]
    times: tuple[StageTimes, StageTimes]
    aware: StageCounts
    unaware: StageCounts
    paper_speedup: float
    microbatches: int
    table_9: tuple[StageCounts, StageCounts] | None = None

    def variant(self, aware: bool) -> tuple[StageTimes, StageCounts]:
        """Return times and counts of one of the two partitions."""
        return (self.times[0], self.aware) if aware else (self.times[1], self.unaware)


def _v1(name, layers, aware, unaware, counts, table_9, throughput) -> PaperRow:
    pairs = [StageCounts(*pair) for pair in (*counts, *table_9)]
    return PaperRow(
        name, (layers, 32), (StageTimes(*aware), StageTimes(*unaware)), pairs[0], pairs[1],
        throughput[0] / throughput[1], 24, (pairs[2], pairs[3]),
    )


def _v2(name, layers, aware, unaware, counts, speedup) -> PaperRow:
    return PaperRow(
        name, layers, (StageTimes(*aware), StageTimes(*unaware)),
        StageCounts(*counts[0]), StageCounts(*counts[1]), speedup, 12,
    )


# Layers are those of v1's Table 1 and v2's Table 1 (for a merged encoder the sum of both).
ROWS = (
    _v1("VLM-S", 40, (49.06, 27.46, 0.12, 43.03), (26.49, 28.13, 0.16, 51.32),
        ((1, 6), (2, 5)), ((1, 6), (1, 3)), (6.47, 5.30)),
    _v1("VLM-M", 32, (75.04, 28.15, 0.27, 51.30), (45.90, 45.26, 0.16, 84.89),
        ((3, 5), (5, 3)), ((2, 5), (3, 4)), (5.15, 3.73)),
    _v1("VLM-L", 48, (101.02, 34.67, 0.20, 63.77), (70.42, 67.03, 0.15, 127.34),
        ((4, 4), (6, 2)), ((4, 5), (5, 3)), (3.17, 2.06)),
    _v1("ALM-S", 32, (57.25, 81.73, 0.38, 157.12), (57.79, 81.94, 0.38, 157.14),
        ((1, 6), (1, 6)), ((1, 6), (1, 5)), (1.94, 1.94)),
    _v1("ALM-M", 40, (176.80, 82.19, 0.64, 157.51), (93.39, 98.25, 0.34, 189.11),
        ((1, 6), (2, 5)), ((1, 6), (4, 4)), (1.96, 1.70)),
    _v1("ALM-L", 48, (308.16, 100.20, 0.73, 188.50), (145.97, 121.21, 0.33, 235.23),
        ((1, 5), (2, 4)), ((2, 4), (5, 5)), (1.98, 1.69)),
    _v2("SSS", (56, 16), (301.61, 149.40, 1.04, 518.43), (207.13, 296.25, 0.86, 1032.63),
        ((2, 2), (3, 1)), 1.18),
    _v2("MMS", (80, 16), (903.86, 102.61, 2.72, 346.54), (635.56, 297.62, 1.19, 1032.12),
        ((5, 3), (7, 1)), 1.02),
    _v2("LLS", (112, 16), (1240.50, 298.37, 1.41, 1029.98), (1259.13, 297.92, 1.15, 1030.14),
        ((7, 1), (7, 1)), 1.00),
    _v2("SSM", (56, 32), (464.98, 331.43, 3.53, 3017.01), (388.33, 388.73, 2.30, 4030.74),
        ((4, 4), (5, 3)), 1.11),
    _v2("MMM", (80, 32), (2330.90, 273.89, 2.09, 2418.27), (712.72, 1159.76, 1.60, 12113.67),
        ((2, 5), (6, 1)), 2.46),
    _v2("LLM", (112, 32), (2199.91, 376.11, 4.15, 4023.22), (1403.97, 1161.76, 1.56, 12109.73),
        ((4, 3), (6, 1)), 2.03),
    _v2("SSL", (56, 64), (773.10, 741.17, 3.55, 6309.11), (774.19, 708.62, 3.84, 6306.18),
        ((1, 7), (1, 7)), 1.00),
    _v2("MML", (80, 64), (2280.58, 705.73, 3.11, 6311.23), (1015.60, 1154.85, 2.78, 10546.34),
        ((2, 5), (4, 3)), 1.30),
    _v2("LLL", (112, 64), (5316.08, 736.05, 4.00, 6315.46), (1597.36, 1686.28, 3.06, 15878.58),
        ((1, 5), (4, 2)), 1.72),
)


def mismatch(row: PaperRow, aware: StageCounts, unaware: StageCounts) -> float:
    """Return the mismatch between stage counts and a row.

    Ratio between the two partitions of the encoder's total forward and of the LLM's total
    backward (sum of absolute logarithms).
    """
    first, second = row.times
    encoder = first.encoder_forward * aware.encoder / (second.encoder_forward * unaware.encoder)
    llm = first.llm_backward * aware.llm / (second.llm_backward * unaware.llm)
    return abs(math.log(encoder)) + abs(math.log(llm))


def same_totals() -> Iterator[tuple[StageCounts, StageCounts]]:
    """Yield all pairs of counts with the same total of at most :data:`MAX_STAGES`."""
    for total in range(2, MAX_STAGES + 1):
        for one, other in itertools.product(range(1, total), repeat=2):
            yield StageCounts(one, total - one), StageCounts(other, total - other)


def scale_of(row: PaperRow, bottleneck_ms: float) -> float:
    """Return seconds per printed millisecond; both partitions of a row have the same scale.

    With it, the slowest stage of the *aware* partition takes ``bottleneck_ms``.
    """
    return bottleneck_ms / 1e3 / row.times[0].bottleneck


def table_plan(
    row: PaperRow,
    scale: float,
    aware: bool,
    schedule: str,
    counts: StageCounts | None = None,
    trainable: bool = False,
    recompute: bool = False,
    microbatches: int | None = None,
) -> Plan:
    """Return the row's pipeline with exactly the table's times per stage.

    Args:
        scale: seconds per printed millisecond.
        aware: True for the frozen-aware partition.
        counts: stage counts; None for the row's.
        trainable: True to train encoder and LLM too: B_w = F everywhere, and B_d = F in the
            encoder.
        recompute: True to split the LLM's backward into a recomputation, F, and the rest.
        microbatches: number per step; None for the row's.
    """
    times, own = row.variant(aware)
    counts = counts or own
    forward, backward = times.llm_forward * scale, times.llm_backward * scale
    encoder = _layer(times.encoder_forward * scale, times.encoder_forward * scale)
    llm = _layer(forward, backward - forward if recompute else backward)
    projector = LayerCost(0.0, 0.0, times.encoder_backward * scale)
    profile = CostProfile(
        {ENCODER: (encoder,) * counts.encoder + (projector,), LLM: (llm,) * counts.llm}
    )
    graph = _graph(counts.encoder, counts.llm, trainable)
    partitions = {
        # The projector sits on the encoder's last stage.
        ENCODER: tuple((i, i + 1 + (i + 1 == counts.encoder)) for i in range(counts.encoder)),
        LLM: tuple((i, i + 1) for i in range(counts.llm)),
    }
    return make_plan(
        graph, partitions, microbatches or row.microbatches, schedule, profile, recompute
    )


def layer_profile(row: PaperRow, scale: float) -> tuple[ModuleGraph, CostProfile]:
    """Return the model layer by layer, as the aware partition's times imply it.

    All layers of a module have the same costs. Costs that are never incurred (B_d and B_w of the
    frozen encoder, B_w of the LLM) are set so that all backwards are the same multiple of their
    forwards: a planner that assumes everything to be trained then balances forward times, as the
    paper's does.
    """
    times = row.times[0]
    encoder = times.encoder_forward * row.aware.encoder / row.layers[0] * scale
    llm = times.llm_forward * row.aware.llm / row.layers[1] * scale
    ratio = times.llm_backward / times.llm_forward
    profile = CostProfile({
        ENCODER: (_layer(encoder, encoder * ratio),) * row.layers[0]
        + (LayerCost(0.0, 0.0, times.encoder_backward * scale),),
        LLM: (_layer(llm, llm * ratio),) * row.layers[1],
    })
    return _graph(*row.layers, trainable=False), profile


def own_plan(row: PaperRow, scale: float, aware: bool, schedule: str = "1f1b") -> Plan:
    """Return raymm's own plan for as many ranks as the row's.

    Of all stage counts, the plan has the smallest bottleneck of 1F + 1B, and among these the least
    sum of squared stage costs, under the costs that the planner assumes.
    """
    graph, profile = layer_profile(row, scale)
    expected = None if aware else unaware_work(graph, profile)
    space = StageSpace(
        graph, profile, row.aware.total, row.microbatches, schedule, expected=expected
    )

    def badness(counts: Counts) -> tuple[float, float]:
        worst = [space.bottleneck(module, counts[module]) for module in (ENCODER, LLM)]
        squares = sum(b * b * counts[m] for b, m in zip(worst, (ENCODER, LLM), strict=True))
        return max(worst), squares

    full = [c for c in space.combinations() if sum(c.values()) == row.aware.total]
    return space.plan(min(full, key=badness))


def _graph(encoder: int, llm: int, trainable: bool) -> ModuleGraph:
    nodes = (
        ModuleNode(ENCODER, (trainable,) * encoder + (True,), projector=True),
        ModuleNode(LLM, (trainable,) * llm),
    )
    return ModuleGraph(nodes, ((ENCODER, LLM),))


def _layer(forward: float, backward_input: float) -> LayerCost:
    return LayerCost(
        forward, backward_input, forward, activation_bytes=round(forward * BYTES_PER_SECOND),
        output_bytes=1,
    )
