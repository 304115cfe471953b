"""Processes of sections: started, ended in time, and restarted after a kernel broke one.

They are forked from a server that has imported torch and transformers and not used a GPU, so that
each starts immediately with its own CUDA context.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import BrokenContextError, Record, read_parts
from benchmarks.gpu.sections import Section

PRELOADED = (
    "torch", "transformers", "triton", "numpy", "raymm.kernels.flash.gpu.attention",
    "benchmarks.gpu.one_rank",
)  # fmt: skip
# Exit codes of a section's process, in addition to 0.
NO_DEVICE, BROKEN = 4, 5
# Maximum number of restarts of a section, for the parts after the one that broke it.
STARTS = 6
# Seconds that a process may exceed its time: parts check the clock when they begin.
GRACE_S = 12.0
POLL_S = 0.1
# Characters of a process's own output that an error keeps.
LOG_CHARACTERS = 8000


def ready_server(kind: str) -> Any:
    """Return the fork server once it has imported all packages.

    That takes a while on a machine that has just been started.
    """
    # torch then uses NVML to detect a GPU: a process forked from one that has initialized CUDA
    # cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if kind == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    first = server.Process(target=os.getpid)
    first.start()
    first.join()
    return server


def run_share(
    section: Section, kind: str, path: str, log: str, seconds: float, done: Sequence[str],
    share: tuple[int, int],
) -> None:  # fmt: skip
    """Run a share of a section in its process.

    Args:
        share: index of this process, and number of the section's processes.
    """
    os.setsid()  # child processes end with it
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    faulthandler.enable(target)
    import torch

    from benchmarks.gpu.device import Device

    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit(NO_DEVICE)

    record = Record(Path(path), seconds, done)
    try:
        section.run(Device(kind), record, share)
    except BrokenContextError:
        sys.exit(BROKEN)


@dataclass
class Share:
    """Process of a section, with its replacements.

    Attributes:
        number: index of the section's process, from 0.
    """

    section: Section
    number: int
    folder: Path
    starts: int = 0
    no_device: bool = False
    _process: Any = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """Return the path of its record."""
        return self.folder / f"{self.section.name}-{self.number}.jsonl"

    @property
    def log(self) -> Path:
        """Return the path of its output."""
        return self.path.with_suffix(".log")

    def start(self, server: Any, kind: str, deadline: float) -> None:
        """Start a process for the parts that have not begun."""
        self.starts += 1
        seconds = deadline - time.monotonic()
        self._process = server.Process(
            target=run_share,
            args=(
                self.section, kind, str(self.path), str(self.log), seconds,
                tuple(read_parts(self.path)), (self.number, self.section.shares),
            ),
        )  # fmt: skip
        self._process.start()

    def ended(self, server: Any, kind: str, deadline: float) -> bool:
        """Return True if it is over; replace a process that died early."""
        if self._process.is_alive():
            if time.monotonic() < deadline + GRACE_S:
                return False
            self.kill()
            self._note("killed: its time was over")
            return True
        self._process.join()
        code = self._process.exitcode
        self.no_device = code == NO_DEVICE
        if code in (0, NO_DEVICE):
            return True
        if code != BROKEN:  # a part whose context broke has reported so itself
            self._note(f"the process ended with {_in_words(code)}")
        if self.starts >= STARTS or time.monotonic() > deadline:
            return True
        self.start(server, kind, deadline)
        return False

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def _note(self, reason: str) -> None:
        """Record the reason as the outcome of the running part, or of the process."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        # A crash prints thousands of characters of extension modules, which are irrelevant.
        lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
        tail = "\n".join(lines)[-LOG_CHARACTERS:]
        begun = [name for name, row in read_parts(self.path).items() if row["state"] == "begun"]
        record = Record(self.path, 0.0)
        for name in begun or [f"process {self.number}.{self.starts}"]:
            record._write(name, "error", error=reason, log=tail)


def _in_words(code: int) -> str:
    if code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def run_together(
    sections: Sequence[Section], server: Any, kind: str, folder: Path, deadlines: Sequence[float],
    look: Callable[[], None],
) -> bool:  # fmt: skip
    """Run sections at the same time until all are over.

    Args:
        sections: sections with their ``shares`` processes each.
        server: result of :func:`ready_server`.
        deadlines: one per section, on the clock of ``time.monotonic()``.

    Returns:
        True if there is a device of that kind.
    """
    running = []
    for section, deadline in zip(sections, deadlines, strict=True):
        for number in range(section.shares):
            share = Share(section, number, folder)
            share.start(server, kind, deadline)
            running.append((share, deadline))
    shares = [share for share, _ in running]
    try:
        while running:
            time.sleep(POLL_S)
            running = [(s, end) for s, end in running if not s.ended(server, kind, end)]
            look()
    finally:
        for share, _ in running:
            share.kill()
    return not any(share.no_device for share in shares)
