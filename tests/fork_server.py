"""Processes that tests start are forked from one which has imported what they need; each of them
would take seconds for it."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import torch.multiprocessing as mp

MODULES = (
    "torch", "torch.distributed", "torch.distributed.tensor", "transformers.modeling_utils",
    "hypothesis", "pytest", "raymm.actors.executor.executor", "raymm.kernels.hf.self_attention",
)


def fork_server() -> ForkServerContext:
    """Where such processes come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))  # before the first of them
    return context


def run_processes(function: Callable, arguments: tuple, count: int) -> None:
    """``function(rank, *arguments)`` in that many processes.

    Raises:
        ProcessRaisedException: with the traceback of the first one that fails.
    """
    fork_server()
    mp.start_processes(function, args=arguments, nprocs=count, start_method="forkserver")
