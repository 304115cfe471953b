"""Claim: communicators, setup and driver time per process stay small up to 1,024 processes.

Run with `python -m benchmarks.communicators --json`.

The model has a vision and an audio encoder of one stage each and a language model of seven, tensor
parallelism 4, tied embeddings and ZeRO-1: 36 processes, times data parallelism; 1,024 with a
language model of six stages. Nothing is trained; the figures come from the plans of the processes.

- `per_process_<n>`: largest number of memberships among n processes: links for messages, groups
  within a rank, groups that sum gradients, and the group of all processes;
- `calls_<n>`: groups that a process creates, without the group of all; `groups_<n>`: the number if
  every process took part in the creation of every group;
- `chain_<n>`: longest chain of groups that wait for each other, in order of creation;
  `edge_chain_<n>`: the same in order of the plan's edges;
- `store_operations_<n>`: largest number of store operations of a process for these groups;
- `links_<n>`: communicators that are links for messages, one per ordered pair of processes with
  messages; `edge_links_<n>`: their number with one per directed edge of stages;
- `edge_per_process_<n>`: `per_process` with `edge_links`;
- `message_ctas_<n>`: multiprocessors that a message may occupy on a GPU;
- `connection_bytes_<n>`: largest pickled size of a process's connection plan;
  `connection_cpu_s_<n>`: driver CPU time to compute all of them;
- `program_cpu_s_<n>`: driver CPU time to lower a step with 8 microbatches per replica;
  `proof_cpu_s_<n>`: to prove that it terminates, and in which order;
- the same with two chunks of layers per rank (`interleaved_...`), where two ranks share several
  edges;
- `made_calls_<n>`, `made_store_operations_<n>`, `made_s_<n>`: for n real processes over gloo (1
  replica, a language model on 1 and 2 ranks), the largest number of calls and store operations of a
  process, and seconds until the last process has its groups, median of alternating rounds;
  `all_made_...`: the same if every process takes part in every group;
- `proof_over_lowering_<schedule>`: CPU time of `check_program`, including the order that it
  computes, over that of lowering, for 24 stages and microbatches; `lowering_ms_<schedule>`: time of
  lowering. Minimum of 9 rounds.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from benchmarks.shared import common
from benchmarks.shared.made_groups import made
from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.actors.rank.rank_spec import ConnectionPlan, connection_plans, link_ctas
from raymm.actors.sharding.parameter_shards import ShardSpec
from raymm.actors.sharding.tensor_plan import ParameterShard, TensorPlan
from raymm.layout.parameter_owners import parameter_ownership, reduction_groups
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import Processes, connected_pairs
from raymm.scheduler.plan.rendezvous_order import longest_chain
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import full_program

# Replicas, and ranks of the language model.
SIZES = ((1, 7), (4, 7), (16, 7), (32, 6))
TP = 4
MICROBATCHES = 8  # per replica
MADE_LLM_RANKS, MADE_TURNS = (1, 2), 5
CHAIN, TURNS = 24, 9
ENCODERS = ("vision", "audio")


def plan(replicas: int, llm_ranks: int = 7, chunks: int = 1) -> Plan:
    """Return a plan of encoders and a language model with equal replicas, on ranks of 4 processes.
    """
    layers = llm_ranks * chunks
    graph = ModuleGraph(
        (*(ModuleNode(name, (True,)) for name in ENCODERS), ModuleNode("llm", (True,) * layers)),
        tuple((name, "llm") for name in ENCODERS),
    )
    places = [(name, 0, rank) for rank, name in enumerate(ENCODERS)]
    places += [("llm", i, len(ENCODERS) + i % llm_ranks) for i in range(layers)]
    ranks = len(ENCODERS) + llm_ranks
    stages = tuple(
        Stage(name, i, (i, i + 1), copy * ranks + rank, copy, tp=TP, sharding="zero1")
        for copy in range(replicas) for name, i, rank in places
    )
    return Plan(graph, stages, MICROBATCHES * replicas)


def sums(processes: Processes) -> tuple[ReductionGroup, ...]:
    """Return every group that sums gradients.

    These are the groups for parameters that tensor parallelism shards, for those that it
    replicates, and for the embedding of the first and last stage.
    """
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
    return reduction_groups(parameter_ownership(processes, owned, specs))


def most(groups: Iterable[Iterable[int]]) -> int:
    """Return the largest number of groups that contain one process."""
    return max(Counter(process for group in groups for process in group).values())


def count(replicas: int, llm_ranks: int = 7, chunks: int = 1) -> dict[str, int | float]:
    """Return the figures of a layout by name."""
    planned = plan(replicas, llm_ranks, chunks)
    begin = time.process_time()
    processes = Processes(planned)
    p2p_groups = [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]
    reductions = sums(processes)
    plans = connection_plans(len(processes.all), p2p_groups, processes.groups, reductions)
    connection_s = time.process_time() - begin
    pairs = connected_pairs(p2p_groups)
    edges = [
        (p2p_group.senders[sender], p2p_group.receivers[receiver])
        for _, of_edge in p2p_groups for p2p_group in of_edge
        for sender, receiver in p2p_group.resharding.links()
    ]
    others = [*processes.groups, *(reduction.processes for reduction in reductions)]
    everyone = tuple(range(len(processes.all)))
    made = sorted({one for each in plans for one in each.rounds}, key=lambda one: one.number)
    return {
        "per_process": most([*pairs, *others, everyone]),
        "edge_per_process": most([*edges, *others, everyone]),
        "calls": max(len(each.rounds) for each in plans),
        "chain": longest_chain([one.members for one in made]),
        "edge_chain": longest_chain([*processes.groups, *pairs, *others[len(processes.groups):]]),
        # gloo sets its own address and reads the address of each member.
        "store_operations": max(
            sum(1 + len(one.members) for one in each.rounds) for each in plans
        ),
        "links": most(pairs),
        "edge_links": most(edges),
        "groups": len(made) + 1,
        "message_ctas": link_ctas(pairs),
        "connection_bytes": max(len(pickle.dumps(each)) for each in plans),
        "connection_cpu_s": round(connection_s, 3),
    }


def connections(replicas: int, llm_ranks: int) -> tuple[ConnectionPlan, ...]:
    """Return the connection plans of the processes of a layout."""
    processes = Processes(plan(replicas, llm_ranks))
    p2p_groups = [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]
    return connection_plans(len(processes.all), p2p_groups, processes.groups, sums(processes))


def really_made(llm_ranks: int) -> dict[str, float]:
    """Measure group creation by real processes, both ways."""
    plans = connections(1, llm_ranks)
    rows: dict[bool, list[tuple[int, int, float]]] = {True: [], False: []}
    for turn in range(MADE_TURNS):
        for own in ((True, False), (False, True))[turn % 2]:
            rows[own].append(made(plans, own))
    found: dict[str, float] = {}
    for own, name in ((True, "made"), (False, "all_made")):
        calls, operations, _ = rows[own][0]
        seconds = statistics.median(row[2] for row in rows[own])
        found |= {
            f"{name}_calls": calls, f"{name}_store_operations": operations,
            f"{name}_s": round(seconds, 3),
        }
    return found


def driver(replicas: int, llm_ranks: int) -> dict[str, float]:
    """Return CPU seconds of lowering a step's program and of its proof."""
    planned = plan(replicas, llm_ranks)
    begin = time.process_time()
    program = full_program(planned)
    lowered = time.process_time()
    check_program(program)
    return {
        "program_cpu_s": round(lowered - begin, 2),
        "proof_cpu_s": round(time.process_time() - lowered, 2),
    }


def proof_over_lowering(schedule: str) -> tuple[float, float]:
    """Return CPU seconds of proof over lowering, and the seconds of lowering."""
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
    args = common.parser(__doc__.splitlines()[0]).parse_args()
    result: dict[str, Any] = {"machine": common.machine()}
    table = Table(
        "processes", "layout", "communicators", "one per edge", "links", "groups", "chain"
    )
    for replicas, llm_ranks in SIZES:
        processes = replicas * (len(ENCODERS) + llm_ranks) * TP
        for chunks, name in ((1, ""), (2, "interleaved_")):
            counted = count(replicas, llm_ranks, chunks)
            result |= {f"{name}{key}_{processes}": value for key, value in counted.items()}
            table.add_row(
                str(processes), name.strip("_") or "1F1B",
                *(str(counted[key]) for key in ("per_process", "edge_per_process")),
                f"{counted['links']} ({counted['edge_links']})", str(counted["groups"]),
                f"{counted['chain']} ({counted['edge_chain']})",
            )
        spent = driver(replicas, llm_ranks)
        result |= {f"{key}_{processes}": value for key, value in spent.items()}
        common.console().print(processes, counted, spent)
    for llm_ranks in MADE_LLM_RANKS:
        measured = really_made(llm_ranks)
        processes = (len(ENCODERS) + llm_ranks) * TP
        result |= {f"{key}_{processes}": value for key, value in measured.items()}
        common.console().print(processes, measured)
    for schedule in ("1f1b", "gpipe"):
        ratio, seconds = proof_over_lowering(schedule)
        result[f"proof_over_lowering_{schedule}"] = round(ratio, 3)
        result[f"lowering_ms_{schedule}"] = round(1e3 * seconds, 2)
    common.console().print(table)
    common.emit(result, args.json)


if __name__ == "__main__":
    main()
