"""Plans for a cluster use the links of its nodes."""

import math

import pytest

from raymm.actors.placement.node_types import NodeType
from raymm.actors.rank.rank_resources import RankResources
from raymm.planning import planned_run
from raymm.planning.planned_run import request_for_cluster
from raymm.planning.request import PlanRequest

HEAD = NodeType("head", {"CPU": 0.0}, 1)


def pods(gpus, most):
    return NodeType(f"gpu{gpus}", {"CPU": 8.0 * gpus, "GPU": float(gpus)}, most)


@pytest.mark.parametrize("types, per_node", [
    ([HEAD, pods(1, 4)], 1), ([HEAD, pods(8, 2)], 8), ([HEAD, pods(4, 2)], 4),
    ([pods(1, 1), pods(8, 2)], 8), ([pods(16, 1)], 8), ([pods(2, math.inf)], 2), ([HEAD], 1),
])  # fmt: skip
def test_ranks_of_one_node_are_those_that_a_pod_holds(monkeypatch, types, per_node):
    monkeypatch.setattr(planned_run, "all_types", lambda: types)
    request = PlanRequest(ranks=4, device="H100")
    resources = RankResources(cpus=2.0, gpus=1.0)
    assert request_for_cluster(request, "cuda", resources, 0.0)[0].ranks_per_node == per_node


def test_a_smaller_number_that_is_set_stays(monkeypatch):
    monkeypatch.setattr(planned_run, "all_types", lambda: [pods(8, 2)])
    request = PlanRequest(ranks=4, device="H100", ranks_per_node=2)
    resources = RankResources(cpus=2.0, gpus=1.0)
    assert request_for_cluster(request, "cuda", resources, 0.0)[0].ranks_per_node == 2
