"""Check that a process sees files that another process wrote to the same location."""

from __future__ import annotations

import secrets
import time

from raymm.actors.storage.folder import PARTIAL
from raymm.actors.storage.location import storage_folder

# Seconds until a file must be visible on other machines: NFS caches folders for some seconds.
SEEN_WITHIN_S = 10.0
# Seconds between two checks.
LOOK_S = 0.2
# An unreachable bucket is reported earlier at the start than during a run.
RETRY_FOR_S = 10.0


def problem_seeing(location: str, name: str, token: str) -> str | None:
    """Look for a file with the content ``token`` that another process wrote, and write a temporary
    one.

    Returns:
        The problem, as the rest of a sentence that starts with the name of this process; None if
        there is no problem.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    trial_file = f".seen-by-{secrets.token_hex(16)}{PARTIAL}"
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
        folder.replace(trial_file, b"")
        folder.unlink(trial_file)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        return f"cannot use it: {error}"
    return None
