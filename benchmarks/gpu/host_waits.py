"""Counter of host waits for the device, by file and line."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.device import Device

REPOSITORY = Path(__file__).resolve().parents[2]
# torch's message about operators that wait (torch.cuda.set_sync_debug_mode).
SYNCHRONIZES = "synchronizing CUDA operation"
# Waiting calls that the debug mode does not report.
WAITS = (
    (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"),
    (torch.cuda, "synchronize"),
)  # fmt: skip


def place() -> str:
    """Return the innermost line of this repository on the stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        inside = path.is_relative_to(REPOSITORY) and ".venv" not in path.parts
        if inside and path != Path(__file__):
            return f"{path.relative_to(REPOSITORY)}:{frame.lineno}"
    return "elsewhere"


@contextmanager
def counted(device: Device) -> Iterator[Counter[str]]:
    """Count the host's waits for the device within a `with` block, by file and line."""
    waits: Counter[str] = Counter()

    def show(message: Warning | str, *rest: Any) -> None:
        if SYNCHRONIZES in str(message):
            waits[place()] += 1
        else:
            sys.stderr.write(f"{message}\n")

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(patch.object(warnings, "showwarning", show))
        for owner, name in WAITS:
            stack.enter_context(patch.object(owner, name, _noting(getattr(owner, name), waits)))
        if device.is_gpu:
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield waits


def _noting(function: Callable[..., Any], waits: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        waits[place()] += 1
        return function(*args, **kwargs)

    return run
