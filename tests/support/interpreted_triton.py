"""Triton attention and the float64 oracle in a separate process.

The interpreter must be selected before the first import of Triton, which other tests import; and an
access out of bounds would end the process, not the tests. With a GPU the same cases run on it,
compiled.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.gpu import attention_case
from benchmarks.gpu.attention_case import Case


@contextmanager
def worker() -> Iterator[ProcessPoolExecutor]:
    """Start a process in which Triton interprets, unless there is a GPU."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
        yield pool


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _start() -> None:
    torch.set_num_threads(1)
    if device() == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        _quicken_interpreter()


def _quicken_interpreter() -> None:
    """Cache repeated work of the interpreter.

    At every call of a kernel and of each function in it, it replaces the whole language, member by
    member, and restores it at the end of the kernel: two thirds of the time of small kernels. This
    process only interprets, so the language stays replaced. Also, every sum and product of integers
    is recomputed in 64 bits for a disabled assertion (``debug``).
    """
    from triton.runtime import interpreter

    prepare = functools.cache(interpreter._patch_lang)

    def prepared(fn: Callable) -> interpreter._LangPatchScope:
        prepare(fn)
        return interpreter._LangPatchScope()  # an empty scope

    interpreter._patch_lang = prepared
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def run(case: Case) -> list[torch.Tensor]:
    """Return output, LSE and the three gradients, on the CPU."""
    return [tensor.cpu() for tensor in attention_case.run(case, device())]


def errors(case: Case, found: list[torch.Tensor] | None = None) -> dict[str, float]:
    """Return :func:`benchmarks.gpu.attention_case.errors` of the result computed here."""
    actual = None if found is None else [tensor.to(device()) for tensor in found]
    return attention_case.errors(case, device(), actual)
