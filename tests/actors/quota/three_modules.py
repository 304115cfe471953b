"""Three modules with a share of the multiprocessors each, and a rendezvous of their threads."""

from __future__ import annotations

import threading

MODULES = ("vision", "audio", "touch")
QUOTAS = {module: 0.33 for module in MODULES}
# A rendezvous that never comes about fails the test instead of hanging it.
MEET_SECONDS = 60


def meeting(parties):
    barrier = threading.Barrier(parties)
    return lambda *_: barrier.wait(MEET_SECONDS) is not None
