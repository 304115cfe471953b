"""Claim: planned memory is within 5 % of the peak bytes of real ranks, on devices and hosts.

Run with `python -m benchmarks.memory_model --json`.

A small vision-language model is profiled, a plan with that profile is made for every case
(pipelines, replicas, FSDP, tensor parallelism, recomputation, bf16), and a few steps of it run on
Ray actors. In every actor, each storage that an operator creates is counted during its lifetime
(:class:`raymm.actors.memory.live_bytes.LiveBytes`): parameters, gradients, optimizer state,
activations, messages, inputs and outputs of kernels. A rank's peak in its steps after the first two
is compared with :func:`raymm.scheduler.schedule.memory.rank_memory`.

The copies of an asynchronous checkpoint and a snapshot in each process's host memory, counted in
the actor, are compared with :func:`raymm.layout.host_memory.host_needs`.

The keys ``max_relative_error`` and ``max_host_relative_error`` are the largest errors over all
ranks, and over all processes, of all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from rich.table import Table
from transformers import LlamaConfig, SiglipVisionConfig

from benchmarks.shared import common, image_text
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.host.memory import CopyOptions
from raymm.actors.memory.live_bytes import LiveBytes
from raymm.actors.optimizer.host_staging import copy_of
from raymm.actors.rank.rank_actor import RankActor
from raymm.actors.rank.rank_group import RankGroup
from raymm.layout.host_memory import HostNeed, host_needs
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.profiling.layers import LayerMeasurement
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.layer_costs import CostProfile
from raymm.scheduler.costs.recomputation import ALL, MATMULS
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.memory import RankMemory, rank_memory

VISION: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 128, "patch_size": 8, "vision_use_head": False,
}
LLAMA: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 2048, "tie_word_embeddings": False,
}
ROWS, TOKENS, MICROBATCHES = 2, 384, 8
STEPS, WARM_UP_STEPS = 4, 2


class CountedRank(RankActor):
    """Rank that reports bytes of live tensors instead of resident memory."""

    def run_step(
        self, key: str, meta: StepMeta, layout: Sequence[tuple[StageId, int]] = (),
        *inputs: dict[str, Any],
    ) -> StepResult:
        """Run a step as a rank does, with counted bytes."""
        live = LiveBytes()
        live.note_all()
        with live:
            result = super().run_step(key, meta, layout, *inputs)
        return replace(result, peak_bytes=live.most)

    def copied_bytes(self) -> HostNeed:
        """Return the bytes that a checkpoint and a snapshot copy to host memory."""
        return HostNeed(
            new_bytes(lambda: self.copy_state(frozenset())),
            new_bytes(lambda: copy_of(self._stages, self._optimizer, self._staging)()),
        )


def new_bytes(copy: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that a function creates."""
    live = LiveBytes()
    live.note_all()  # views of tensors that exist are no copies
    existing = live.now
    with live:
        copied = copy()
    del copied
    return live.most - existing


@dataclass(frozen=True)
class Case:
    """Layout of the model."""

    llm: ParallelSpec = ParallelSpec()
    vision: ParallelSpec = ParallelSpec()
    precision: str = "fp32"
    recompute: bool = False

    def plan(self, model: MultimodalModule, profile: CostProfile) -> Plan:
        """Return the plan, with the profile of its precision."""
        spec = MultimodalParallelSpec(
            {"vision": self.vision}, self.llm, MICROBATCHES, recompute=self.recompute
        )
        return replace(spec.plan(model), profile=profile)


CASES = {
    "one stage each": Case(),
    "pp": Case(ParallelSpec(pp=3), ParallelSpec(pp=2)),
    "dp": Case(ParallelSpec(dp=2)),
    "dp, ZeRO-1": Case(ParallelSpec(pp=2, dp=2, sharding="zero1")),
    "fsdp": Case(ParallelSpec(dp=2, sharding="fsdp")),
    "fsdp, pp": Case(ParallelSpec(pp=2, dp=2, sharding="fsdp")),
    "tp": Case(ParallelSpec(tp=2)),
    "tp, pp": Case(ParallelSpec(pp=2, tp=2)),
    "recompute stages": Case(ParallelSpec(pp=3), recompute=True),
    "recompute layers": Case(ParallelSpec(pp=3, recompute_layers=ALL)),
    "keep matmuls": Case(ParallelSpec(pp=3, recompute_layers=MATMULS)),
    "bf16": Case(precision="bf16"),
    "bf16, fsdp": Case(ParallelSpec(dp=2, sharding="fsdp"), precision="bf16"),
    "bf16, fsdp, pp": Case(ParallelSpec(pp=2, dp=2, sharding="fsdp"), precision="bf16"),
    "bf16, pp": Case(ParallelSpec(pp=3), precision="bf16"),
}


@dataclass(frozen=True)
class HostRow:
    """Host memory of one process of one case.

    Attributes:
        need, measured: planned and counted bytes of its copies.
    """

    case: str
    process: int
    need: HostNeed
    measured: HostNeed

    @property
    def error(self) -> float:
        """Return the relative error of the planned bytes of all copies."""
        return sum(self.need) / max(1, sum(self.measured)) - 1


@dataclass(frozen=True)
class Row:
    """Row of one rank of one case.

    Attributes:
        measured: peak bytes of the rank's process with the highest peak.
    """

    case: str
    rank: str
    need: RankMemory
    measured: int

    @property
    def error(self) -> float:
        """Return the relative error of the planned bytes."""
        return self.need.total / self.measured - 1


def main() -> None:
    parser = common.parser(str(__doc__).split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    hosts: list[HostRow] = []
    with common.local_ray(10):
        model, batch = build_model(), microbatches(MICROBATCHES)
        profiles: dict[str, CostProfile] = {}
        for name in args.cases:
            case = CASES[name]
            if case.precision not in profiles:
                table = LayerMeasurement(model, batch[0], repeats=1, precision=case.precision).run()
                profiles[case.precision] = table.at()
            measured, copied = measure(name, case, model, batch, profiles[case.precision])
            rows += measured
            hosts += copied
    console = common.console()
    console.print(table_of(rows))
    console.print(host_table(hosts))
    worst, worst_host = (max(abs(row.error) for row in each) for each in (rows, hosts))
    common.emit(
        {
            "machine": common.machine(), "max_relative_error": round(worst, 4),
            "max_host_relative_error": round(worst_host, 4),
            "rows": [row_dict(row) for row in rows],
            "host_rows": [
                asdict(row) | {
                    "need": row.need._asdict(), "measured": row.measured._asdict(),
                    "error": round(row.error, 4),
                }
                for row in hosts
            ],
        },
        args.json,
    )


def measure(
    name: str, case: Case, model: MultimodalModule, batch: list[dict], profile: CostProfile
) -> tuple[list[Row], list[HostRow]]:
    """Return one row per rank, and one per process."""
    plan = case.plan(model, profile)
    needs = rank_memory(plan, full_program(plan))
    peaks: list[tuple[int, ...]] = []
    RankGroup.actor_class = CountedRank
    with ParallelModel(model, plan, precision=case.precision) as parallel:
        for _ in range(STEPS):
            peaks.append(parallel.train_step(batch).peak_bytes)
        copied = parallel.group.call("copied_bytes")
        ranks = parallel.check_plan(model, plan, parallel.options)
    host = host_needs(ranks, model, parallel.options.optimizer, CopyOptions(True, True), "cpu")
    hosts = [
        HostRow(name, number, *pair) for number, pair in enumerate(zip(host, copied, strict=True))
    ]
    return [
        Row(
            name, ", ".join(str(stage.id) for stage in plan.rank_stages(rank)), need,
            max(step[rank] for step in peaks[WARM_UP_STEPS:]),
        )
        for rank, need in enumerate(needs)
    ], hosts


def build_model() -> MultimodalModule:
    """Build SigLIP, an MLP and Llama with random weights, all trained."""
    vision = ModalityModule(SiglipVisionConfig(**VISION), "mlp", seed=1)
    return MultimodalModule({"vision": vision}, ModalityModule(LlamaConfig(**LLAMA), seed=2))


def microbatches(count: int) -> list[dict[str, Any]]:
    """Return microbatches of :data:`ROWS` rows with one image each."""
    return image_text.microbatches(count, ROWS, TOKENS, LLAMA["vocab_size"], VISION["image_size"])


def table_of(rows: Sequence[Row]) -> Table:
    """Return a table with one line per rank."""
    parts = [field.name for field in fields(RankMemory)]
    table = Table("case", "rank", *parts, "planned MB", "measured", "error")
    for row in rows:
        table.add_row(
            row.case, row.rank, *(f"{getattr(row.need, part) / 1e6:.1f}" for part in parts),
            f"{row.need.total / 1e6:.1f}", f"{row.measured / 1e6:.1f}", f"{row.error:+.1%}",
        )
    return table


def host_table(rows: Sequence[HostRow]) -> Table:
    """Return a table with one line per process."""
    table = Table(
        "case", "process", "checkpoint MB", "measured", "snapshot MB", "measured", "error"
    )
    for row in rows:
        sizes = (row.need.checkpoint, row.measured.checkpoint, row.need.snapshot,
                 row.measured.snapshot)  # fmt: skip
        texts = (f"{size / 1e6:.2f}" for size in sizes)
        table.add_row(row.case, str(row.process), *texts, f"{row.error:+.2%}")
    return table


def row_dict(row: Row) -> dict[str, Any]:
    """Return the bytes of a row, ready for JSON."""
    return {
        "case": row.case, "rank": row.rank, "planned": row.need.total, "measured": row.measured,
        "error": round(row.error, 4), "parts": asdict(row.need),
    }


if __name__ == "__main__":
    main()
