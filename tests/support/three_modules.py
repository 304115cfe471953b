"""Three modules with a share of the multiprocessors each, and a rendezvous of their threads."""

from __future__ import annotations

import threading

MODULES = ("vision", "audio", "touch")
QUOTAS = {module: 0.33 for module in MODULES}
# Timeout of the rendezvous, so that the test fails instead of hanging.
MEET_SECONDS = 60


def meeting(parties):
    barrier = threading.Barrier(parties)
    return lambda *_: barrier.wait(MEET_SECONDS) is not None
