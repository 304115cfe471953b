"""Run of two ranks on two of three nodes; one of them is killed. Prints values to compare."""

import os
import signal
import sys
from pathlib import Path

os.environ["PYTHONPATH"] = sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ["RAY_memory_monitor_refresh_ms"] = "0"

import ray  # noqa: E402  after the variables that it reads
import ray._private.state  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from raymm import Callback  # noqa: E402
from raymm.config.build import build_model, build_plan  # noqa: E402
from raymm.config.sections import parse_config  # noqa: E402
from raymm.runtime.embedded.forked_workers import start_servers  # noqa: E402
from raymm.training.trainer import Trainer  # noqa: E402
from tests.support.tiny_run import curve, prepare, settings  # noqa: E402

STEPS, KILL_AFTER = 8, 4
OPTIONS = {"object_store_memory": 100 * 2**20}


class KillNode(Callback):
    """Callback that kills the node of the last rank, the first time that a step is taken."""

    def __init__(self, nodes: dict) -> None:
        self.nodes, self.taken, self.killed = nodes, [], None

    def on_step(self, row) -> None:
        self.taken.append(row["step"])
        if row["step"] == KILL_AFTER and self.killed is None:
            ranks = [
                actor for actor in ray._private.state.actors().values()
                if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RankActor"
            ]
            self.killed = next(
                place for place in (actor["Address"]["NodeID"] for actor in ranks)
                if place in self.nodes
            )
            raylet = self.nodes[self.killed].all_processes["raylet"][0].process.pid
            os.kill(raylet, signal.SIGKILL)


def train(inputs: Path, run: Path, callbacks: list) -> list:
    values = settings(inputs, run, STEPS)
    values["resources"], values["data"]["worker_cpus"] = {"cpus": 1}, 0
    values["run"] |= {
        "snapshot_every": 1, "max_failures": 0, "checkpoint_every": 100, "timeout_s": 60,
    }
    config = parse_config(values)
    model = build_model(config)
    Trainer(
        model, build_plan(config, model), config.data, config.run, callbacks=callbacks,
        optimizer=config.optimizer.build(STEPS), resources=config.resources.for_device,
    ).fit()
    return curve(run)


def main(folder: Path) -> None:
    inputs = folder / "inputs"
    inputs.mkdir()
    prepare(inputs)
    start_servers(ray_modules=())
    head = {"num_cpus": 1, "include_dashboard": False, **OPTIONS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    added = [cluster.add_node(num_cpus=1, **OPTIONS) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    whole = train(inputs, folder / "whole", [])
    killing = KillNode({node.node_id: node for node in added})
    lossy = train(inputs, folder / "killed", [killing])
    print("steps:", killing.taken)
    (lost,) = (node for node in ray.nodes() if not node["Alive"])
    print("Ray was told:", lost["DeathReasonMessage"])
    print("as without:", len(whole) == STEPS and lossy == whole, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
