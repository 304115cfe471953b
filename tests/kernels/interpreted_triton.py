"""Run Triton attention beside the float64 oracle, in a process of its own.

The interpreter must be chosen before anything imports Triton, which other tests do; and an
access out of bounds would end the process, not the tests. Where there is a GPU the same cases
run on it, compiled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from benchmarks.gpu import attention_case
from benchmarks.gpu.attention_case import Case


@contextmanager
def worker() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets, unless there is a GPU."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
        yield pool


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _start() -> None:
    if device() == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def run(case: Case) -> list[torch.Tensor]:
    """Output, LSE and the three gradients, on the CPU."""
    return [tensor.cpu() for tensor in attention_case.run(case, device())]


def errors(case: Case, found: list[torch.Tensor] | None = None) -> dict[str, float]:
    """:func:`benchmarks.gpu.attention_case.errors` of what is found here, or was."""
    actual = None if found is None else [tensor.to(device()) for tensor in found]
    return attention_case.errors(case, device(), actual)
