"""Detection of a lost Ray server (GCS) before the first step of a run.

Ray's calls that create actors and placement groups wait for a lost GCS in C++, where Python handles
no signals, until Ray ends the process a minute later. A thread of this process detects it earlier.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType

from raymm.actors.faults.cluster_observer import ClusterObserver

# Seconds in which the main thread may end the run by itself after a signal or a lost GCS.
ORDERLY_END_S = 10.0
LOOK_S = 0.5


class StartObserver:
    """Context in which a thread ends this process if the run cannot start.

    Args:
        is_starting: True while no step is in flight; nothing is ended after that.
        end: ends this process; called with the number of the first signal (SIGTERM or SIGINT), or
            None, and with a sentence on the GCS, empty if a signal came before it counted as lost.
    """

    def __init__(
        self, is_starting: Callable[[], bool], end: Callable[[int | None, str], None]
    ) -> None:
        self._is_starting, self._end = is_starting, end
        self._observer = ClusterObserver(())
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._hears_signals = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._observe, name="start-observer", daemon=True)

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._hears_signals = old_descriptor == -1
            if not self._hears_signals:  # a notebook's event loop uses it
                signal.set_wakeup_fd(old_descriptor)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._hears_signals:
            signal.set_wakeup_fd(-1)
        os.write(self._writer, b"\0")
        self._thread.join()
        self._observer.stop()
        os.close(self._reader)
        os.close(self._writer)

    def _observe(self) -> None:
        number: int | None = None
        since: float | None = None  # time of the first signal or lost GCS before the first step
        while not self._ended.is_set():
            if select.select([self._reader], [], [], LOOK_S)[0]:
                numbers = [n for n in os.read(self._reader, 64)
                           if n in (signal.SIGTERM, signal.SIGINT)]
                number = next(iter(numbers), None) if number is None else number
            if not self._is_starting() or (number is None and self._observer.lost is None):
                since = None
                continue
            since = time.monotonic() if since is None else since
            if time.monotonic() - since < ORDERLY_END_S or self._observer.gcs_answers():
                continue
            if not self._ended.is_set() and self._is_starting():
                self._end(number, self._observer.lost or "")
