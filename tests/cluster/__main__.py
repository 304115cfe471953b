"""``python -m tests.cluster``: the shipped RayCluster under Ray's own autoscaler, with real runs.

From no GPU node: a submitted run brings as many as it needs and trains; a node of a second run is
deleted, as ``kubectl drain`` does, and the run leaves with its last step saved; the same run,
started again, goes on, with the losses of an undisturbed one; and nodes go when they are idle.
"""

from __future__ import annotations

import sys
import time

from tests.cluster.rig import Rig, kuberay
from tests.cluster.scenario import STEPS, job, losses, shipped_cluster, submit, write_run


def main() -> int:
    """Run the scenario; 0 if all of it went as it should."""
    start = time.monotonic()
    with kuberay(shipped_cluster(idle_seconds=25)) as rig:
        write_run(rig.folder)
        assert rig.pods.workers() == []
        output = job(rig, "whole")
        assert "waiting for nodes" in output, output
        whole = losses(rig.folder / "whole")
        assert len(whole) == STEPS, output
        assert "raymm-gpu-2" in "\n".join(rig.events)
        print(f"0 -> 2 nodes, {STEPS} steps", flush=True)
        _drained(rig, whole)
        rig.wait_until(lambda: not rig.pods.workers(), "nodes that are idle go")
        print("2 -> 0 nodes", flush=True)
    print(f"all as it should be, after {time.monotonic() - start:.0f} s")
    return 0


def _drained(rig: Rig, whole: list[float]) -> None:
    run = rig.folder / "drained"
    process = submit(rig, "drained")
    rig.wait_until(lambda: len(losses(run)) > 2, "steps of the run")
    rig.pods.delete(rig.pods.workers()[0])
    text, _ = process.communicate(timeout=300)
    assert "stopped by the notice that node" in text, text
    assert "exit code 75" in text, text
    left = losses(run)
    assert left == whole[: len(left)], (left, whole)
    print(f"left after step {len(left)} of {STEPS}: "
          f"{next(line for line in text.splitlines() if 'stopped by' in line)}", flush=True)
    job(rig, "drained")
    assert losses(run) == whole
    print("gone on from there: every loss as without", flush=True)


if __name__ == "__main__":
    sys.exit(main())
