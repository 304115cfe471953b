"""Fork server for test processes that has imported their dependencies.

The imports would take seconds in each process.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import torch.multiprocessing as mp

MODULES = (
    "torch", "torch.distributed", "torch.distributed.tensor", "transformers.modeling_utils",
    "hypothesis", "pytest", "raymm.actors.executor.executor", "raymm.kernels.hf.self_attention",
)


def fork_server() -> ForkServerContext:
    """Return the context of the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))  # before the first process
    return context


def run_processes(function: Callable, arguments: tuple, count: int) -> None:
    """Run ``function(rank, *arguments)`` in that many processes.

    Raises:
        ProcessRaisedException: a process failed; has the traceback of the first.
    """
    fork_server()
    mp.start_processes(function, args=arguments, nprocs=count, start_method="forkserver")
