"""Driver on a cluster of nodes with 2 and 3 CPUs, with ranks of 1, 2 and 2 processes.

Prints their nodes, their environment, and the messages.
"""

from dataclasses import replace
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.costs.devices import Link, Links
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from tests.actors.rank.test_rank_group import microbatch, model_of

NEAR, FAR = Link(0.0, 1e9), Link(1.0, 1e6)


def main() -> None:
    options = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **options}
    )
    cluster.add_node(num_cpus=3, **options)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    model = model_of()
    for tp in (2, 4):
        spec = MultimodalParallelSpec({}, ParallelSpec(pp=2 if tp == 2 else 1, tp=2, cp=tp // 2))
        plan = spec.plan(model)
        layer = LayerCost(1.0, 1.0, 1.0, 1, 1, 1)
        profile = CostProfile(
            {n.name: (layer,) * n.num_layers for n in plan.graph.nodes}, links=Links(NEAR, FAR, 8)
        )
        parallel = spec.apply(
            model, resources=RankResources(env={"RAYMM_TEST_VARIABLE": "as it was given"}),
            placement=PlacementOptions(say=lambda line: print("said:", line)),
        )
        with parallel:
            parallel.plan = replace(plan, profile=profile)
            output = parallel.execute([microbatch(2)])
            processes = parallel.group.pids()
            nodes = [one["address"].node for one in processes]
            print("nodes:", [nodes.index(node) for node in nodes], list(
                parallel.group.placement.process_nodes
            ))
            print("loss:", round(float(output.loss), 5))
            environments = [
                Path(f"/proc/{one['pid']}/environ").read_text().split("\0") for one in processes
            ]
            print("have the variable:", [
                "RAYMM_TEST_VARIABLE=as it was given" in one for one in environments
            ])
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
