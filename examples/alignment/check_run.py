"""Check what a training run left behind.

    python -m examples.alignment.check_run RUN_FOLDER --steps N [--gap G]

Fails unless every step is there once with a finite loss, a whole checkpoint of the last step
and all pictures exist, and, with ``--gap``, the held-out loss with shuffled images exceeds
the one with the right images by at least G nats more at the end than at the start: a
projector that learns nothing does not pass.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore

PICTURES = ("loss.png", "schedule.png", "plan.png", "trace.json", "plan.json")


def problems(folder: Path, steps: int, gap: float | None) -> list[str]:
    """Return the problems of a run."""
    found = []
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if [step for step, _ in losses] != list(range(1, steps + 1)):
        found.append(f"steps logged are {[step for step, _ in losses]}, expected 1..{steps}")
    found += [f"loss of step {step} is {loss}" for step, loss in losses if not math.isfinite(loss)]
    checkpoint = CheckpointStore(folder).newest()
    if checkpoint is None:
        found.append("there is no checkpoint")
    elif checkpoint.manifest.step != steps:
        found.append(f"the last checkpoint is {checkpoint.folder}, not of step {steps}")
    found += checkpoint.warnings() if checkpoint is not None else []
    found += [f"{name} is missing" for name in PICTURES if not (folder / name).is_file()]
    if gap is not None:
        found += _gap_problems([row for row in rows if "heldout_loss" in row], gap)
    return found


def _gap_problems(rows: list[dict[str, Any]], gap: float) -> list[str]:
    if len(rows) < 2:
        return [f"{len(rows)} held-out evaluations, at least 2 are needed"]
    first, last = rows[0]["heldout_gap_vision"], rows[-1]["heldout_gap_vision"]
    print(f"held-out gap of vision: {first:+.4f} at step {rows[0]['step']}, "
          f"{last:+.4f} at step {rows[-1]['step']}")
    if not last - first >= gap:
        return [f"the gap of vision grew by {last - first:+.4f} nats, expected at least {gap}"]
    return []


def main() -> int:
    """Print what is wrong; returns 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--gap", type=float, default=None)
    arguments = parser.parse_args()
    found = problems(arguments.folder, arguments.steps, arguments.gap)
    for problem in found:
        print(f"{arguments.folder}: {problem}")
    if not found:
        print(f"{arguments.folder}: {arguments.steps} steps, all there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
