"""Files and variables for communication between the processes of a soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Environment: folder of this part of the soak; process of the driver.
FOLDER, DRIVER = "RAYMM_SOAK_FOLDER", "RAYMM_SOAK_DRIVER"
# The next fault, and the process of each node's server by Ray's node id.
FAULT, RAYLETS = "fault.json", "raylets.json"
# Processes that have become ranks so far, a line each.
RANKS_SO_FAR = "ranks.txt"
# Seconds that a file operation takes on the slow disk.
SLOW_DISK_S = 3.0


def write_json(file: Path, value: Any) -> None:
    """Write a JSON value atomically."""
    writing = file.with_name(f".{file.name}")
    writing.write_text(json.dumps(value))
    writing.rename(file)
