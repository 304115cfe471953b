"""Whether a process finds at a location what another one has written there."""

from __future__ import annotations

import secrets
import time

from raymm.actors.storage.folder import PARTIAL
from raymm.actors.storage.location import storage_folder

# Seconds that a file may take to be seen by other machines: NFS looks at folders again after some.
SEEN_WITHIN_S = 10.0
# Seconds between two looks.
LOOK_S = 0.2
# A bucket that a process cannot reach is refused sooner than one that goes away during a run.
RETRY_FOR_S = 10.0


def problem_seeing(location: str, name: str, token: str) -> str | None:
    """Look for a file, and write one.

    Args:
        location: of the folder.
        name: of the file.
        token: what is in it.

    Returns:
        What is wrong, as a sentence goes on after the name of this process; None if all is well.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    own = f".seen-by-{secrets.token_hex(16)}{PARTIAL}"
    try:
        folder = storage_folder(location, RETRY_FOR_S)
        while True:
            try:
                seen = folder.read(name)
                break
            except (FileNotFoundError, NotADirectoryError) as error:
                if time.monotonic() > deadline:
                    return f"does not find the file that the driver wrote there ({error.strerror})"
            time.sleep(LOOK_S)
        if seen != token.encode():
            return "finds a different file there than the driver wrote"
        folder.replace(own, b"")
        folder.unlink(own)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return f"cannot use it: {error}"
    return None
