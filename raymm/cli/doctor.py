"""``raymm doctor``: start a process per GPU, describe the nodes, and measure the connections."""

from __future__ import annotations

import argparse

from rich import box
from rich.console import Console
from rich.table import Table

from raymm.errors import ConfigError
from raymm.plural import plural

_CPU_PROCESSES = 2
_REPEATS = 5
_TIMEOUT_S = 120.0
_WIDTH = 120


def add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of ``raymm doctor``."""
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--processes", type=int, metavar="N",
        help=f"default: one per GPU of the cluster; {_CPU_PROCESSES} on CPUs",
    )
    command.add_argument(
        "--megabytes", type=int, metavar="N", default=64, help="size of a message (default 64)"
    )


def run_doctor(args: argparse.Namespace) -> None:
    """Connect the processes as a run would, and print nodes and bandwidths. Raise a ``ConfigError``
    or ``ClusterError`` that names what is wrong, and a ``RankFailedError`` if a process fails to
    start, connect, or transfer data."""
    for name in ("processes", "megabytes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    from raymm.actors.placement.node_types import reachable_resources
    from raymm.actors.rank.doctor import DoctorGroup, DoctorSpec
    from raymm.actors.rank.rank_resources import RankResources
    from raymm.runtime.cluster import connected, pick_device

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _WIDTH))
    with connected():
        device = pick_device(args.device)
        gpus = int(reachable_resources().get("GPU", 0))
        count = args.processes or (gpus if device == "cuda" else _CPU_PROCESSES)
        specs = [DoctorSpec(rank, count, device, _TIMEOUT_S) for rank in range(count)]
        group = DoctorGroup(
            specs, [f"process {rank}" for rank in range(count)],
            RankResources(cpus=0.1, gpus=float(device == "cuda")),
        )
        try:
            nodes = group.call("describe_node")
            transfers = group.call("measure", args.megabytes * 10**6, _REPEATS)
            hosts = [rank.host for rank in group.places]
        finally:
            group.shutdown()
    backend = "NCCL" if device == "cuda" else "gloo"
    on = plural(len(set(hosts)), "node")
    console.print(f"{plural(count, 'process', 'es')} on {on}, {device}, over {backend}")
    console.print(_nodes_table(hosts, nodes))
    console.print(_processes_table(hosts, nodes, transfers))
    if count > 1:
        slowest = min(transfer.reduced for transfer in transfers)
        console.print(
            f"all-reduce of {args.megabytes} MB over all processes: {slowest / 1e9:.3g} GB/s",
            highlight=False,
        )
    console.print("all messages arrived as they were sent")


def _nodes_table(hosts: list[str], nodes: list) -> Table:
    table = _table("nodes", "node", "driver", "torch's CUDA", "NCCL", "gloo, NCCL interfaces",
                   "free memory", "/dev/shm free")
    for host, node in dict(zip(hosts, nodes, strict=True)).items():
        free, size = node.shared_memory
        table.add_row(
            host, node.driver, node.torch_cuda, node.nccl, ", ".join(node.interfaces.values()),
            f"{node.free_memory / 2**30:.0f} GiB",
            f"{free / 2**30:.1f} of {size / 2**30:.1f} GiB",
        )
    return table


def _processes_table(hosts: list[str], nodes: list, transfers: list) -> Table:
    table = _table("processes and the ring of messages between them", "process", "node", "GPU",
                   "NVLinks", "receives from", "GB/s")
    for rank, (host, node, transfer) in enumerate(zip(hosts, nodes, transfers, strict=True)):
        previous = (rank - 1) % len(hosts)
        where = "the same node" if hosts[previous] == host else hosts[previous]
        table.add_row(
            str(rank), host, node.gpu, str(node.nvlinks),
            f"{previous} ({where})" if len(hosts) > 1 else "-",
            f"{transfer.received / 1e9:.3g}" if len(hosts) > 1 else "-",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in columns:
        table.add_column(name)
    return table
