"""Errors that NCCL's watchdog records, which no call raises on the host."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
from torch.distributed import distributed_c10d

# Watchdog mode that aborts communicators after an error. The default, 3, ends the process.
ABORT_ONLY = "2"
# Seconds between two checks for errors.
INTERVAL_S = 1.0
# Seconds between a timeout and the end of the process, for torch to write the flight recorder.
RECORD_S = 5.0


def only_abort() -> None:
    """Configure NCCL's watchdog to abort failed communicators without ending this process, unless a
    mode is set. Ranks can then reconnect. Call this before the first group is created."""
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)


def nccl_error() -> str:
    """Return the first error of any NCCL group of this process: ``"TIMEOUT"``, ``"COMM_ERROR"`` or
    ``"REMOTE_ERROR"``. Empty without an error, and after the groups were aborted. The watchdog
    records an error before it aborts the communicator. Operations on the device then return with
    partly received buffers."""
    for group, (backend, _) in list(distributed_c10d._world.pg_map.items()):
        if backend == "nccl":
            error = group._get_backend(torch.device("cuda")).get_error()
            if error.name != "SUCCESS":
                return error.name
    return ""


def end_after_timeouts() -> None:
    """Start a thread that ends this process by SIGABRT after NCCL's watchdog has recorded a
    timeout, unless the driver has the groups aborted first."""
    threading.Thread(target=_end_after_timeout, name="nccl-timeouts", daemon=True).start()


def _end_after_timeout() -> None:
    while nccl_error() != "TIMEOUT":
        time.sleep(INTERVAL_S)
    time.sleep(RECORD_S)
    if nccl_error():
        print(
            "An NCCL operation did not finish within nccl_timeout_s, and the driver did not react; "
            "this process exits.", file=sys.stderr, flush=True,
        )
        os.abort()
    else:
        end_after_timeouts()
