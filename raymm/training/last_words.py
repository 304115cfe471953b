"""Message of a run whose process is killed before it can report why.

When Ray's server on the machine (raylet) dies, Ray ends the driver's process from C++ without
running any of its Python code. The death of one of the raylet's agents ends the raylet too. The
kernel kills a process in the same way when memory runs out. A second process, which costs a few
megabytes, detects that and prints the message. This file is also its script, so it imports only
Python's own modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Sent when the run ends by itself, so that no message is printed.
_DONE = b"\0"


@contextmanager
def last_words(place: object) -> Iterator[Callable[[], None]]:
    """Print a message to standard error if this process is killed within the block.

    Yields:
        Function that suppresses the message. Call it when the process has reported its own end.
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
        with suppress(OSError, ValueError):  # already closed
            pipe.write(_DONE)
            pipe.close()

    try:
        yield done
    finally:
        done()
        process.wait()


def main() -> None:
    """Print the text from standard input unless it ends with :data:`_DONE`."""
    text = b""
    while data := os.read(0, 2**16):
        text += data
    if not text.endswith(_DONE):
        with suppress(OSError):
            os.write(2, text)


if __name__ == "__main__":
    main()
