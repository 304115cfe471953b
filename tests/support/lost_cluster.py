"""Driver whose cluster loses a node, then the GCS. Prints the errors."""

import os
import signal
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from raymm.actors.faults import cluster_observer
from raymm.errors import Loss, RunFailedError
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.actors.rank.test_rank_group import microbatch, model_of

# The test need not wait for a GCS that may be restarted.
cluster_observer.GCS_TIMEOUT_S = 3.0


def steps_until_lost(parallel) -> None:
    """Run quick steps until an error."""
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 60:
            parallel.execute([microbatch(1)])
        print("nothing was noticed")
    except RunFailedError as error:
        assert error.lost in (Loss.NODE, Loss.CLUSTER)
        print("lost:", str(error).replace("\n", " | "))
        print("seconds:", round(time.monotonic() - begin, 1))


def server(node, name: str) -> int:
    return node.all_processes[name][0].process.pid


def main() -> None:
    options = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **options}
    )
    other = cluster.add_node(num_cpus=2, **options)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2))
    with spec.apply(model_of()) as parallel:  # three ranks on two nodes
        parallel.execute([microbatch(1)])
        places = [one["address"] for one in parallel.group.pids()]
        lost = [n for n, one in enumerate(places) if one.node == other.node_id]
        print("ranks there:", lost)
        os.kill(server(other, "raylet"), signal.SIGKILL)
        steps_until_lost(parallel)
    spec = MultimodalParallelSpec({"vision": ParallelSpec(ranks=(0,))}, ParallelSpec(ranks=(0,)))
    with spec.apply(model_of()) as parallel:
        parallel.execute([microbatch(1)])
        (rank,) = parallel.group.pids()
        os.kill(server(cluster.head_node, "gcs_server"), signal.SIGSTOP)
        steps_until_lost(parallel)
        # Ray's hook waits for the GCS before it prints an uncaught error.
        print("errors are printed at once:", sys.excepthook is sys.__excepthook__)
    time.sleep(1)
    print("rank is there:", Path(f"/proc/{rank['pid']}/fd/0").exists(), flush=True)
    os.kill(server(cluster.head_node, "gcs_server"), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
