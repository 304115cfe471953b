"""Scenario ``python -m tests.cluster``: the shipped RayCluster with Ray's autoscaler and real runs.

It starts without a GPU node. A run without layouts, like the shipped job's, is planned for the GPUs
of the possible node types, requests them and trains; a submitted run requests as many as it needs.
Then a node of a second run is deleted, as ``kubectl drain`` does, and the run leaves with its last
step saved. The same run resumes with the losses of an undisturbed one, and idle nodes are removed.
Then ``tests.cluster.going_on`` tests automatic recovery.
"""

from __future__ import annotations

import subprocess
import sys
import time

from raymm.runtime.embedded.forked_workers import start_servers
from raymm.scheduler.plan.plan import Plan
from tests.cluster.rig import Rig, kuberay
from tests.cluster.scenario import STEPS, job, losses, shipped_cluster, submit, write_run

FEW_STEPS = 4


def main() -> int:
    """Run the whole scenario; return 0 if it succeeded."""
    start = time.monotonic()
    start_servers(ray_modules=())
    with kuberay(shipped_cluster(idle_seconds=25), jobs=True) as rig:
        write_run(rig.folder)
        assert rig.pods.workers() == []
        _planned(rig)
        output = job(rig, "whole")
        assert "waiting for nodes" in output, output
        whole = losses(rig.folder / "whole")
        assert len(whole) == STEPS, output
        assert "raymm-gpu-2" in "\n".join(rig.events)
        print(f"0 -> 2 nodes, {STEPS} steps", flush=True)
        _drained(rig, whole)
        rig.wait_until(lambda: not rig.pods.workers(), "nodes that are idle go")
        print("2 -> 0 nodes", flush=True)
    print(f"all as it should be, after {time.monotonic() - start:.0f} s", flush=True)
    return subprocess.run([sys.executable, "-m", "tests.cluster.going_on"], check=False).returncode


def _planned(rig: Rig) -> None:
    output = job(rig, "planned", "parallel={}", f"run.steps={FEW_STEPS}")
    plan = Plan.from_json((rig.folder / "planned" / "plan.json").read_text())
    (group,) = shipped_cluster(0)["spec"]["workerGroupSpecs"]
    # A model this small is faster on fewer devices than possible.
    assert 1 < plan.num_processes <= group["maxReplicas"], (plan, output)
    assert len(rig.pods.workers()) == plan.num_processes, (plan, output)
    assert len(losses(rig.folder / "planned")) == FEW_STEPS, output
    print(f"planned for {plan.num_processes} of the {group['maxReplicas']} GPUs that node types "
          "may bring, with none there", flush=True)
    rig.wait_until(lambda: not rig.pods.workers(), "nodes that are idle go")


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
