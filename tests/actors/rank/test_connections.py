"""Connections of a process: created by their members, and used once before the first step."""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks import communicators
from benchmarks.shared.tcp_rendezvous import LOCAL, TcpRendezvousStore
from raymm.actors.faults.stacks import records
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.actors.rank import rendezvous
from raymm.actors.rank.connections import Connections
from raymm.actors.rank.rank_spec import (
    MESSAGE_CTAS,
    ProcessGroups,
    RankSpec,
    connection_plans,
    link_ctas,
)
from raymm.actors.rank.rendezvous import Rendezvous, RendezvousStore, Timeouts
from raymm.errors import ChannelError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.process_grid import P2PGroup, Processes, connected_pairs
from raymm.scheduler.plan.stage import Edge, StageId
from tests.support.fork_server import run_processes
from tests.support.nccl_oracle import Operation, stuck

TIMEOUT = Timeouts.of(7.0, 20.0)


def degrees_plan() -> Plan:
    """Return a plan with two chunks on each of two ranks, replicas, and other encoder degrees."""
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,) * 4)), (("vision", "llm"),)
    )
    vision = [Stage("vision", 0, (0, 1), r, r, tp=2) for r in range(2)]
    llm = [Stage("llm", i, (i, i + 1), 2 + i % 2, cp=2, tp=2) for i in range(4)]
    return Plan(graph, (*vision, *llm), 4)


def all_p2p_groups(processes: Processes) -> list[tuple[Edge, tuple[P2PGroup, ...]]]:
    return [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]


def specs(plan: Plan) -> list[RankSpec]:
    processes = Processes(plan)
    reductions = (
        ReductionGroup((0, 2), (StageId("vision", 0),)),
        ReductionGroup((4, 8), (StageId("llm", 0), StageId("llm", 3))),
    )
    connections = connection_plans(
        len(processes.all), all_p2p_groups(processes), processes.groups, reductions
    )
    listed = []
    for number, process in enumerate(processes.all):
        groups = (
            tuple(processes.of_rank(process.rank)), processes.data_group(process),
            processes.sample_group(process), processes.token_group(process),
            processes.tensor_group(process),
        )  # fmt: skip
        listed.append(RankSpec(
            number, len(processes.all), {}, plan.stage_edges, connections[number],
            ProcessGroups(*(group if len(group) > 1 else () for group in groups)),
        ))
    return listed


class Group:
    """Process's end of a numbered group."""

    def __init__(self, number: int, ranks: list[int], me: int) -> None:
        self.number, self.ranks, self.me = number, ranks, me

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.me)


class Recorder:
    """Record of a process's calls of ``torch.distributed``, with simulated peers."""

    def __init__(self, monkeypatch) -> None:
        self.me = 0
        self.made: dict[int, list] = defaultdict(list)
        self.issued: dict[int, list[Operation]] = defaultdict(list)
        for name in ("new_group", "all_reduce", "get_rank", "get_world_size"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        for name in ("send_to", "receive_from"):
            monkeypatch.setattr(rendezvous, name, getattr(self, name))
        monkeypatch.setattr(Rendezvous, "_new_host_link", lambda _, *link: self.new_link(*link))

    def new_group(self, ranks, **options):
        number = distributed_c10d._world.group_count
        self.made[self.me].append((number, tuple(ranks), *sorted(options.items(), key=str)))
        return Group(number, ranks, self.me)

    def _issue(self, kind: str, name: object, group: Group) -> None:
        self.issued[self.me].append(Operation(kind, (group.number, name), group.number))

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> None:
        self._issue("sum", "first", group)
        tensor.fill_(group.size())

    def new_link(self, number: int, ends: tuple[int, int]):
        self.made[self.me].append((2 * number, ends))
        return Group(2 * number, list(ends), self.me)

    def send_to(self, group: Group, peer: int, tag: int, tensor: torch.Tensor):
        self._issue("message", tuple(group.ranks), group)
        assert group.ranks == [self.me, group.ranks[peer]]
        return Ended()

    def receive_from(self, group: Group, peer: int, tag: int, tensor: torch.Tensor):
        self._issue("message", tuple(group.ranks), group)
        assert group.ranks == [group.ranks[peer], self.me]
        tensor.fill_(group.ranks[peer])
        return Ended()

    def get_rank(self, group: Group | None = None) -> int:
        return self.me if group is None else sorted(group.ranks).index(self.me)

    def get_world_size(self, group: Group) -> int:
        return group.size()


class Ended:
    """Completed operation."""

    def wait(self) -> None:
        """Return immediately."""


def place(device: str, monkeypatch) -> Rendezvous:
    """Return a rendezvous whose process has joined the others."""
    monkeypatch.setattr(Rendezvous, "__init__", lambda self: None)
    made = Rendezvous()
    made.device, made.timeouts = torch.device(device), TIMEOUT
    made._store = RendezvousStore(0, TIMEOUT.wait)
    return made


def test_processes_create_their_groups_in_one_order(monkeypatch) -> None:
    monkeypatch.setattr(distributed_c10d._world, "group_count", 0)
    recorder, here = Recorder(monkeypatch), place("cpu", monkeypatch)
    listed = specs(degrees_plan())
    connections = []
    for spec in listed:
        recorder.me = spec.rank
        connections.append(Connections(spec, here, TaskTracker()))
    assert len(recorder.made) == len(listed)
    makers = defaultdict(list)
    for process, made in recorder.made.items():
        numbers = [number for number, *_ in made]
        assert numbers == sorted(set(numbers))
        # Each is used as soon as it exists, before the next is created.
        assert numbers == [operation.communicator for operation in recorder.issued[process]]
        for number, *what in made:
            makers[number, *what].append(process)
    # Only members create a group, all by the same number and with the same options.
    assert len({number for number, *_ in makers}) == len(makers)
    assert all(sorted(ranks) == processes for (_, ranks, *_), processes in makers.items())
    issued = [recorder.issued[process] for process in range(len(listed))]
    assert not stuck(issued, lambda process, communicator: "all", host_blocks=True)
    links = Counter(ranks for _, ranks, *_ in makers if len(ranks) == 2)
    p2p_groups = all_p2p_groups(Processes(degrees_plan()))
    pairs = connected_pairs(p2p_groups)
    assert all(links[pair] >= 1 for pair in pairs)
    opened = {edge for c in connections for edge in (*c.senders, *c.receivers)}
    assert opened == {edge for edge, _ in p2p_groups}


def _links_between_two(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    here = Rendezvous(torch.device("cpu"), TcpRendezvousStore(rank, 2, port), rank, 2, TIMEOUT)
    threads = []
    for number in range(1, 7):
        here.new_link(number, *((0, 1) if number % 2 else (1, 0)), ctas=1)
        names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
        threads.append((sum("gloo_tcp" in name for name in names), len(names)))
    # One for the group of all processes, one for all links.
    assert {moving for moving, _ in threads} == {2}, threads
    assert threads[0] == threads[-1], threads
    dist.barrier()


def test_links_of_a_process_share_one_thread() -> None:
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    run_processes(_links_between_two, (port,), 2)


def test_a_process_gets_only_its_own_connections() -> None:
    for spec in specs(degrees_plan()):
        assert all(spec.rank in meeting.members for meeting in spec.connections.rounds)
        assert all(
            spec.rank in (*ends.senders, *ends.receivers)
            for _, _, ends in spec.connections.p2p_groups
        )


@pytest.mark.parametrize("replicas", [1, 4, 16])
@pytest.mark.parametrize("chunks", [1, 2])
def test_calls_of_a_process_do_not_grow_with_the_run(replicas: int, chunks: int) -> None:
    """Add replicas; each adds one gradient group to each process."""
    counted = communicators.count(replicas, chunks=chunks)
    assert counted["calls"] <= {1: 8, 2: 11}[chunks] + (replicas > 1)
    # a chain is at most as long as the calls of one process
    assert counted["chain"] == counted["calls"]
    assert counted["groups"] > 9 * replicas * communicators.TP


def test_edges_between_two_processes_share_a_link() -> None:
    plan = degrees_plan()
    processes = Processes(plan)
    of_edges = [(edge, processes.p2p_groups(edge)) for edge in processes.remote_edges]
    chunks = [edge for edge, _ in of_edges if edge[0].module == edge[1].module]
    assert len(chunks) == 6  # llm.0 -> llm.1 -> llm.2 -> llm.3 on two ranks, and back
    pairs = [pair for pair in connected_pairs(of_edges) if min(pair) >= 4]
    # four processes of a rank with one each of the other, in both directions
    assert len(pairs) == 8


def test_groups_of_nccl_connect_when_they_are_made(monkeypatch) -> None:
    """Check that only the members of a group connect."""
    asked = []
    monkeypatch.setattr(distributed_c10d._world, "group_count", 0)

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.config = type("Config", (), {})()

    class Nccl:
        pass

    Nccl.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: asked.append(options))
    here = place("cuda:0", monkeypatch)
    here._new_group(2, (0, 1), ctas=5)
    here._new_group(3, (0, 1), "gloo")
    message, host = asked
    assert message["device_id"] == here.device and message["pg_options"].config.max_ctas == 5
    assert host["device_id"] is None and host["pg_options"] is None
    # NCCL's watchdog, which names no rank, waits longer than the receivers of messages.
    assert message["timeout"] == timedelta(seconds=20) == message["pg_options"]._timeout
    assert host["timeout"] == timedelta(seconds=7)
    assert Timeouts.of(300.0, None).watchdog == timedelta(seconds=600)


def test_unset_nccl_and_cuda_variables_are_set(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCH_FR_", "TORCH_NCCL_", "PYTORCH_", "CUDA_DEVICE_MAX")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    rendezvous.prepare_nccl(torch.device("cpu"))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "7"
    rendezvous.prepare_nccl(torch.device("cuda"))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    # The watchdog aborts communicators and does not end the process.
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    file = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3")
    file.write_text("what torch writes")
    assert str(file) in records(os.getpid())
    file.unlink()
    os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
    del os.environ["PYTORCH_CUDA_ALLOC_CONF"], os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "1"
    rendezvous.prepare_nccl(torch.device("cuda"))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_messages_leave_multiprocessors_for_compute() -> None:
    assert link_ctas([]) == link_ctas([(0, 1)]) == 8
    for links in range(1, 60):
        pairs = [(0, peer) for peer in range(1, links + 1)]
        assert 1 <= link_ctas(pairs) <= max(1, MESSAGE_CTAS // links)


def test_missing_processes_are_named_with_the_timeout(monkeypatch) -> None:
    def new_group(ranks, **options):
        raise RuntimeError("Connect timeout")

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(distributed_c10d._world, "group_count", 0)
    here = place("cpu", monkeypatch)
    said = r"processes 3, 5 did not connect within 7 s .timeout_s.: Connect timeout"
    with pytest.raises(ChannelError, match=said):
        here.new_group(1, (3, 5))
    with pytest.raises(ChannelError, match="processes 0, 1, 2, 3 and 5 more did not connect"):
        here.new_group(2, range(9))
