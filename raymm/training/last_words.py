"""A sentence for a run whose process ends before it can say why.

Ray ends the process of a driver from C++, without running any of its code, when Ray's server on the
machine (raylet) is gone: the death of the raylet's agents takes the raylet with it. The kernel ends
a process in the same way when memory runs out. A second process, which costs a few megabytes, sees
that and prints the sentence. This file is its script, too, so it imports nothing but Python's own
modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Sent when the run has an end of its own, which needs no sentence.
_DONE = b"\0"


@contextmanager
def last_words(place: object) -> Iterator[Callable[[], None]]:
    """Have a sentence printed to the standard error if this process is ended within the block.

    Args:
        place: folder or URL of the run.

    Yields:
        Function after which nothing is printed: the process ends, and has printed why itself.
    """
    text = (
        f"\nthe run failed:\nprocess {os.getpid()}, which drove the run in {place}, ended without "
        "reporting a cause. Either it was killed (out of memory, or by hand), or Ray ended it "
        "because Ray's server on this machine (raylet) or one of its agents died. Run the same "
        "command again to resume from the last checkpoint.\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True, cwd="/",
    )
    pipe = process.stdin
    assert pipe is not None
    with suppress(OSError):
        pipe.write(text.encode(errors="replace"))
        pipe.flush()

    def done() -> None:
        with suppress(OSError, ValueError):  # closed before
            pipe.write(_DONE)
            pipe.close()

    try:
        yield done
    finally:
        done()
        process.wait()


def main() -> None:
    """Print what standard input has, if it ends without :data:`_DONE`."""
    text = b""
    while data := os.read(0, 2**16):
        text += data
    if not text.endswith(_DONE):
        with suppress(OSError):
            os.write(2, text)


if __name__ == "__main__":
    main()
