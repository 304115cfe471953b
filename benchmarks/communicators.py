"""Communicators that every process of a large run has, and what the proof of their order takes.

A vision and an audio encoder of one stage each and a language model of seven, tensor parallelism 4,
tied embeddings, ZeRO-1: 36 processes, times data parallelism. Nothing runs; what is counted is what
a process's plan says.

- `per_process_<n>`: the most that any of n processes is a member of: links for messages, groups
  within a rank, groups that sum gradients, and the one of all processes;
- `links_<n>`: of these, links for messages: one per ordered pair of processes with messages;
- `edge_links_<n>`: what there would be with one per directed edge of stages;
- `edge_per_process_<n>`: `per_process` with `edge_links`;
- `groups_<n>`: groups of all processes together, each of which is made by its members only;
- `message_ctas_<n>`: multiprocessors that a message may occupy on a GPU;
- the same with two chunks of every rank's layers (`interleaved_...`), where two ranks have several
  edges with one another;
- `proof_over_lowering_<schedule>`: CPU time of `check_program`, with the order it makes, over that
  of lowering, for 24 stages and microbatches; `lowering_ms_<schedule>`: that of lowering. Least
  of 9 turns.

    python -m benchmarks.communicators --json
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from benchmarks import _common
from raymm.actors.rank.connections import link_ctas
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.actors.sharding.tensor_plan import ParameterShard, TensorPlan
from raymm.layout.parameter_owners import parameter_ownership, reduction_groups
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes, connected_pairs
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import full_program

REPLICAS = (1, 4, 16)
TP, LLM_RANKS = 4, 7
CHAIN, TURNS = 24, 9
ENCODERS = ("vision", "audio")


def plan(replicas: int, chunks: int = 1) -> Plan:
    """Encoders and a language model, each with as many replicas, on ranks of 4 processes."""
    layers = LLM_RANKS * chunks
    graph = ModuleGraph(
        (*(ModuleNode(name, (True,)) for name in ENCODERS), ModuleNode("llm", (True,) * layers)),
        tuple((name, "llm") for name in ENCODERS),
    )
    places = [(name, 0, rank) for rank, name in enumerate(ENCODERS)]
    places += [("llm", i, len(ENCODERS) + i % LLM_RANKS) for i in range(layers)]
    ranks = len(ENCODERS) + LLM_RANKS
    stages = tuple(
        Stage(name, i, (i, i + 1), copy * ranks + rank, copy, tp=TP, sharding="zero1")
        for copy in range(replicas) for name, i, rank in places
    )
    return Plan(graph, stages, 8 * replicas)


def sums(processes: Processes) -> list[tuple[int, ...]]:
    """Processes of every group that sums gradients: what tensor parallelism shards, what it does
    not, and the embedding of the first and the last stage."""
    shard = tuple(ParameterShard(0, ((i, i + 1),)) for i in range(TP))
    stages = processes.plan.stages
    shards = {f"{stage.index}.weight": shard for stage in stages} | {"embedding": shard}
    last = max(stage.index for stage in stages if stage.module == "llm")
    owned = {}
    for stage in stages:
        sizes = {f"module.{stage.index}.weight": 4, f"module.{stage.index}.norm": 1}
        if stage.module == "llm" and stage.index in (0, last):
            sizes["module.embedding"] = 4
        owned[stage.id] = sizes
    spec = ShardSpec({"module": TensorPlan(TP, shards=shards)})
    specs = dict.fromkeys((*ENCODERS, "llm"), spec)
    return [
        group.processes
        for group in reduction_groups(parameter_ownership(processes, owned, specs))
    ]


def most(groups: Iterable[Iterable[int]]) -> int:
    """The most groups that a process is in."""
    return max(Counter(process for group in groups for process in group).values())


def count(replicas: int, chunks: int) -> dict[str, int]:
    processes = Processes(plan(replicas, chunks))
    p2p_groups = [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]
    pairs = connected_pairs(p2p_groups)
    edges = [
        (p2p_group.senders[sender], p2p_group.receivers[receiver])
        for _, of_edge in p2p_groups for p2p_group in of_edge
        for sender, receiver in p2p_group.resharding.links()
    ]
    others = [*processes.groups, *sums(processes), tuple(range(len(processes.all)))]
    return {
        "per_process": most([*pairs, *others]),
        "edge_per_process": most([*edges, *others]),
        "links": most(pairs),
        "edge_links": most(edges),
        "groups": len(pairs) + len(others),
        "message_ctas": link_ctas(pairs),
    }


def proof_over_lowering(schedule: str) -> tuple[float, float]:
    """CPU seconds of proof over those of lowering, and these."""
    stages = tuple(Stage("llm", i, (i, i + 1), i) for i in range(CHAIN))
    graph = ModuleGraph((ModuleNode("llm", (True,) * CHAIN),), ())
    chain = Plan(graph, stages, CHAIN, schedule=schedule)
    program = full_program(chain)
    lowering, proof = (
        min(cpu_seconds(work) for _ in range(TURNS))
        for work in (lambda: full_program(chain), lambda: check_program(program))
    )
    return proof / lowering, lowering


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    args = _common.parser(__doc__.splitlines()[0]).parse_args()
    result: dict[str, Any] = {"machine": _common.machine()}
    table = Table("processes", "layout", "communicators", "one per edge", "links", "groups")
    for replicas in REPLICAS:
        for chunks, name in ((1, ""), (2, "interleaved_")):
            counted = count(replicas, chunks)
            processes = replicas * (len(ENCODERS) + LLM_RANKS) * TP
            result |= {f"{name}{key}_{processes}": value for key, value in counted.items()}
            table.add_row(
                str(processes), name.strip("_") or "1F1B",
                *(str(counted[key]) for key in ("per_process", "edge_per_process")),
                f"{counted['links']} ({counted['edge_links']})", str(counted["groups"]),
            )
    for schedule in ("1f1b", "gpipe"):
        ratio, seconds = proof_over_lowering(schedule)
        result[f"proof_over_lowering_{schedule}"] = round(ratio, 3)
        result[f"lowering_ms_{schedule}"] = round(1e3 * seconds, 2)
    _common.console().print(table)
    _common.emit(result, args.json)


if __name__ == "__main__":
    main()
