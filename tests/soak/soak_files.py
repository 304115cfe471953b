"""What the processes of a soak say to each other by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Environment: the folder of this part of the soak; the process of the driver.
FOLDER, DRIVER = "RAYMM_SOAK_FOLDER", "RAYMM_SOAK_DRIVER"
# What is to go wrong next, and the process of each node's server, by Ray's id of the node.
FAULT, RAYLETS = "fault.json", "raylets.json"
# Processes that have become ranks so far, a line each.
RANKS_SO_FAR = "ranks.txt"
# Seconds that an operation on files takes on the slow disk.
SLOW_DISK_S = 3.0


def write_json(file: Path, value: Any) -> None:
    """Write it, in one step.

    Args:
        file: which.
        value: of what JSON has.
    """
    writing = file.with_name(f".{file.name}")
    writing.write_text(json.dumps(value))
    writing.rename(file)
