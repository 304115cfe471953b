"""Scenario ``python -m tests.cluster.going_on``: runs lose nodes and recover automatically.

A node is killed; another one is drained, at a random step, and no step is lost; and replicas follow
the nodes that Ray's autoscaler adds for them. Every run has the losses of an undisturbed one.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raymm.runtime.embedded.forked_workers import server_variables, start_servers
from tests.cluster.rig import Rig, kuberay
from tests.cluster.scenario import shipped_cluster

STEPS = 12
CHECKPOINT_EVERY = 2
ELASTIC = {"language_model": {"dp": {"min": 1, "max": 2}}}
# Relative error of losses under other layouts.
ROUNDING = 1e-5
# Seconds until idle nodes are removed: longer than between two runs.
IDLE_S = 15


class Runs:
    """Runs on a rig, driven by this process.

    Args:
        rig: rig of the runs; this process has its environment.
    """

    def __init__(self, rig: Rig) -> None:
        from tests.support.tiny_run import prepare

        self.rig = rig
        inputs = rig.folder / "inputs"
        inputs.mkdir()
        self._inputs = prepare(inputs)

    def folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.rig.folder / name

    def train(
        self, name: str, disturb: Mapping[int, Callable[[Any], None]] | None = None,
        parallel: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Train to the end; return steps in execution order.

        Args:
            name: name of the run folder.
            disturb: step -> action on the trainer after its first execution.
            parallel: layout; None for two ranks.
        """
        from raymm.config.build import build_layouts, build_model
        from raymm.config.sections import load_config
        from raymm.training.trainer import Trainer
        from tests.support.tiny_run import settings, write_config

        values = settings(self._inputs, self.folder(name), STEPS)
        values["resources"] = {"cpus": 1, "gpus": 1}
        values["run"] |= {"checkpoint_every": CHECKPOINT_EVERY, "log_samples": True}
        if parallel is not None:
            values["parallel"] = dict(parallel)
        config = load_config(write_config(values, self.rig.folder / f"{name}.yaml"))
        model = build_model(config)
        disturbing = _disturbing(dict(disturb or {}))
        trainer = Trainer(
            model, build_layouts(config), config.data, config.run,
            optimizer=config.optimizer.build(STEPS), resources=config.resources.for_device,
            callbacks=[disturbing],
        )
        disturbing.trainer = trainer
        result = trainer.fit()
        assert result.stopped is None, result.stopped
        return disturbing.taken

    def announce_end(self, name: str) -> Callable[[Any], None]:
        """Return an action that drains a pod and waits until the run is notified."""
        def delete(trainer: Any) -> None:
            self.rig.pods.delete(name)
            self.rig.wait_until(lambda: trainer.stop.reason is not None, "the notice")

        return delete

    def fail(self, name: str) -> Callable[[Any], None]:
        """Return an action that kills a pod's processes, and waits until Ray detects it."""
        def kill(trainer: Any) -> None:
            from raymm.actors.faults.cluster_observer import dead_nodes

            before = dead_nodes()
            self.rig.pods.kill(name)
            self.rig.wait_until(lambda: dead_nodes() - before, "the end of the node")

        return kill

    def restarts(self, name: str) -> list[tuple[str, int]]:
        """Return the cause of each restart, and the step after it."""
        from raymm.monitor.metrics import read_metrics

        rows = read_metrics(self.folder(name) / "metrics.jsonl")
        return [
            (row["restarted_after"].partition(":")[0], row["step"])
            for row in rows if "restarts" in row
        ]


def _disturbing(actions: dict[int, Callable[[Any], None]]) -> Any:
    from raymm import Callback

    class Disturbing(Callback):
        """Callback that records steps, and runs an action after one."""

        trainer: Any = None

        def __init__(self) -> None:
            self.taken: list[int] = []

        def on_step(self, row: Mapping[str, Any]) -> None:
            self.taken.append(row["step"])
            actions.pop(row["step"], lambda trainer: None)(self.trainer)

    return Disturbing()


def killed_node(runs: Runs, whole: list[tuple]) -> None:
    """Lose a node."""
    from tests.support.tiny_run import curve

    step, victim = random.randrange(1, STEPS - 2), random.choice(runs.rig.pods.workers())
    runs.train("killed", {step: runs.fail(victim)})
    assert curve(runs.folder("killed")) == whole
    (restart,) = runs.restarts("killed")
    assert restart[0] == "failure" and restart[1] <= step + 2 and restart[1] % 2 == 0
    print(f"killed node: after step {step}, gone on from {restart[1]}, every loss as without",
          flush=True)


def drained_node(runs: Runs, whole: list[tuple]) -> None:
    """Drain a node."""
    from tests.support.tiny_run import curve

    step, victim = random.randrange(1, STEPS - 2), random.choice(runs.rig.pods.workers())
    taken = runs.train("drained", {step: runs.announce_end(victim)})
    assert taken == list(range(1, STEPS + 1)), taken
    assert curve(runs.folder("drained")) == whole
    ((cause, left),) = runs.restarts("drained")
    assert cause == "preemption" and step <= left <= step + 2
    print(f"drained node: left after step {left}, 0 steps lost, every loss as without", flush=True)


def elastic_replicas(runs: Runs, whole: list[tuple]) -> None:
    """Train with 1, 2 and 1 replicas of the language model."""
    from raymm.monitor.metrics import read_metrics
    from tests.support.tiny_run import curve

    rig = runs.rig
    rig.wait_until(lambda: len(rig.pods.workers()) == 2, "two nodes")
    rig.pods.machines = 2
    asked = []

    def wait_for_node(trainer: Any) -> None:
        asked.extend(_constraints())
        rig.pods.machines = 3
        rig.wait_until(lambda: _gpu_nodes() == 3, "the node that was asked for")

    def drain(trainer: Any) -> None:
        rig.pods.machines = 2  # no other machine is available
        runs.announce_end(random.choice(rig.pods.workers()))(trainer)

    taken = runs.train("elastic", {3: wait_for_node, 7: drain}, ELASTIC)
    rig.pods.machines = None
    # For three ranks, and a data worker.
    assert sum(asked) == 4 and _constraints() == [], (asked, _constraints())
    assert taken == list(range(1, STEPS + 1)), taken
    (grown, at), (left, after) = runs.restarts("elastic")
    assert (grown, at, left) == ("resize", 4, "preemption") and 7 <= after <= 9
    rows = read_metrics(runs.folder("elastic") / "metrics.jsonl")
    stages = [len(row["stage_busy"]) for row in rows if "loss" in row]
    assert stages == [2] * 4 + [3] * (after - 4) + [2] * (STEPS - after), stages
    for mine, fixed in zip(curve(runs.folder("elastic")), whole, strict=True):
        assert mine[0] == fixed[0] and mine[3:] == fixed[3:]
        for value, due in zip(mine[1:3], fixed[1:3], strict=True):
            assert abs(value - due) <= ROUNDING * abs(due), (mine, fixed)
    samples = [
        sample for row in read_metrics(runs.folder("elastic") / "samples.jsonl")
        for part in row["microbatches"] for sample in part
    ]
    epoch = sorted(f"train-{number}" for number in range(13))
    assert [sorted(samples[n : n + 13]) for n in (0, 13, 26)] == [epoch] * 3
    print(f"1 -> 2 -> 1 replicas: after steps 4 and {after}, losses as without, to {ROUNDING:g}; "
          "every sample once an epoch; the autoscaler is asked for nothing any more", flush=True)


def _constraints() -> list[int]:
    """Return the resource constraints of the autoscaler: numbers of bundles."""
    import ray
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    client = GcsClient(ray.get_runtime_context().gcs_address)
    state = get_cluster_resource_state(client)
    return [
        request.count for constraint in state.cluster_resource_constraints
        for request in constraint.resource_requests
    ]


def _gpu_nodes() -> int:
    import ray

    return sum(node["Alive"] and "GPU" in node["Resources"] for node in ray.nodes())


def main() -> int:
    """Run the whole scenario; return 0 if it succeeded."""
    start = time.monotonic()
    start_servers(ray_modules=())
    assert server_variables()
    with kuberay(shipped_cluster(idle_seconds=IDLE_S)) as rig:
        # Before Ray is imported, which reads it once.
        os.environ.update(rig.environment, RAY_ADDRESS=rig.gcs)
        import ray

        from tests.support.tiny_run import curve

        try:
            runs = Runs(rig)
            runs.train("whole")
            whole = curve(runs.folder("whole"))
            assert len(whole) == STEPS
            for scenario in (drained_node, killed_node, elastic_replicas):
                scenario(runs, whole)
                print(f"after {time.monotonic() - start:.0f} s", flush=True)
        finally:
            ray.shutdown()  # before its cluster ends
        rig.wait_until(lambda: not rig.pods.workers(), "nodes that are idle go")
    print(f"all as it should be, after {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
