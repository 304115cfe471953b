"""Part of a soak, or the undisturbed run: ``python -m tests.soak.soaked_run FOLDER PART STEPS``.

Resumes the run in the folder of that name, and the faults of ``trials.json`` there.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.soak.soak_files import DRIVER, RAYLETS, write_json
from tests.support import REPOSITORY

os.environ.update(
    OMP_NUM_THREADS="1", RAY_memory_monitor_refresh_ms="0", PYTHONPATH=str(REPOSITORY),
)

UNDISTURBED = "undisturbed"
STORE_BYTES = 150 * 2**20


def main(folder: Path, part: str, steps: int) -> None:
    """Run the steps.

    Args:
        folder: folder of the soak, with ``inputs``.
        part: one of :data:`trials.PARTS`, or :data:`UNDISTURBED`.
        steps: total steps.
    """
    from raymm.runtime.embedded.embedded_ray import start_embedded_ray
    from raymm.runtime.embedded.forked_workers import start_servers

    own, nodes = folder / part, None
    os.environ[DRIVER] = str(os.getpid())
    if part == "several nodes":
        nodes = Nodes(own / RAYLETS)
    else:
        start_servers(2, ["transformers.models.llama.modeling_llama"])
        start_embedded_ray(num_cpus=4, log_to_driver=False, object_store_memory=STORE_BYTES)
    from tests.soak.soaking import Soak, Times
    from tests.soak.trials import Trial

    trainer = _trainer(folder / "inputs", own / "run", part, steps)
    trainer.callbacks = (*trainer.callbacks, Times(own / "times.txt"))
    if part != UNDISTURBED:
        from raymm.training.stop_request import StopReason

        trials = [Trial(**values) for values in json.loads((own / "trials.json").read_text())]
        soak = Soak(
            trials, own, lambda: trainer.stop.ask(StopReason("the soak is over")), nodes
        )
        trainer.callbacks = (*trainer.callbacks, soak)
    try:
        trainer.fit()
    finally:
        if part != UNDISTURBED:
            soak.write()


def _trainer(inputs: Path, run: Path, part: str, steps: int) -> Any:
    from raymm.config.build import build_model, build_plan
    from raymm.config.sections import parse_config
    from raymm.training.trainer import Trainer
    from tests.support.tiny_run import change, settings

    values = settings(inputs, run, steps)
    several = part == "several nodes"
    for path, value in {
        "model.mask": "tests.soak.soak_faults:causal",
        "run.snapshot_every": 1, "run.max_recoveries": 10**6,
        "run.max_failures": 0, "run.timeout_s": 60, "run.checkpoint_every": 4, "run.eval_every": 4,
        "run.eval_shuffled": False, "run.eval_steps": 1, "run.log_samples": True,
        "run.log_every": 50, "run.max_skipped_steps": 100, "run.spares": int("spare" in part),
        "data.heldout": str(inputs / "heldout.jsonl"), "resources.cpus": 1 if several else 0.25,
        "data.worker_cpus": 0, "data.worker_timeout": 120 if several else 30,
        "data.modalities.vision.processor": "tests.soak.soak_faults:image",
    }.items():
        change(values, path, value)
    config = parse_config(values)
    model = build_model(config)
    return Trainer(
        model, build_plan(config, model), config.data, config.run, callbacks=[],
        optimizer=config.optimizer.build(steps), resources=config.resources.for_device,
    )


class Nodes:
    """Cluster of this process's own node, without ranks, and three nodes for two ranks.

    Args:
        file: file for the process of every node's server, by Ray's node id.
    """

    def __init__(self, file: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._file = file
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._raylets: dict[str, int] = {}
        for _ in range(3):
            self.add(wait=True)
        ray.init(
            address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR
        )

    def add(self, wait: bool = False) -> None:
        """Add a node.

        Args:
            wait: True to wait until it is ready.
        """
        node = self._cluster.add_node(
            wait=wait, num_cpus=1, object_store_memory=STORE_BYTES
        )
        self._raylets[node.node_id] = node.all_processes["raylet"][0].process.pid
        write_json(self._file, self._raylets)

    def kill(self) -> None:
        """Kill a node with a rank."""
        import ray._private.state

        victim = next(
            actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()
            if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RankActor"
        )
        os.kill(self._raylets[victim], signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
