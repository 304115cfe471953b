"""Possible nodes, impossible placements, and messages while a run waits for nodes."""

import gc
import itertools
import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.core.generated.autoscaler_pb2 import ClusterConfig

from raymm.actors.placement import node_types, placement
from raymm.actors.placement.node_types import NodeType, spell, types_of, without_room
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.errors import ClusterError
from raymm.planning.planned_run import cluster_ranks
from raymm.runtime.cluster import pick_device

GPU = NodeType("gpu", {"CPU": 7.0, "GPU": 1.0, "memory": 2**35}, 4)
BIG = NodeType("big", {"CPU": 30.0, "GPU": 8.0}, 1)
HEAD = NodeType("head", {"CPU": 0.0}, 1)


def fits(bundles: list[dict[str, float]], types: list[NodeType]) -> bool:
    """Return True if bundles can be placed together, by trying every assignment."""
    nodes = [one.resources for one in types for _ in range(int(one.most))]
    for places in itertools.product(range(len(nodes)), repeat=len(bundles)):
        used = [dict.fromkeys(node, 0.0) for node in nodes]
        for place, bundle in zip(places, bundles, strict=True):
            for name, amount in bundle.items():
                used[place][name] = used[place].get(name, 0.0) + amount
        if all(
            amount <= node.get(name, 0.0)
            for node, of_node in zip(nodes, used, strict=True) for name, amount in of_node.items()
        ):
            return True
    return False


AMOUNTS = st.integers(0, 4).map(lambda quarters: quarters / 2)
RESOURCES = st.fixed_dictionaries({"CPU": AMOUNTS, "GPU": st.integers(0, 2).map(float)})


@given(
    st.lists(RESOURCES.filter(lambda one: any(one.values())), min_size=1, max_size=3),
    st.lists(st.tuples(RESOURCES, st.integers(1, 2)), min_size=1, max_size=2),
)
def test_requests_that_fit_are_never_rejected(bundles, types):
    types = [NodeType(f"t{n}", resources, most) for n, (resources, most) in enumerate(types)]
    refused = without_room(bundles, types)
    if refused is not None:
        assert not fits(bundles, types), refused
    elif len(bundles) == 1:
        assert fits(bundles, types)


@pytest.mark.parametrize(("bundles", "says"), [
    ([{"GPU": 2.0}], "no node type has room for 2 GPU; node types: gpu (7 CPU, 1 GPU), head"),
    ([{"CPU": 8.0, "GPU": 1.0}], "no node type has room for 8 CPU, 1 GPU"),
    ([{"TPU": 1.0}], "no node type has room for 1 TPU"),
    ([{"GPU": 1.0}] * 5, "5 x 1 GPU do not fit: there is room for 4 when all nodes are running"),
])  # fmt: skip
def test_requests_that_can_never_be_placed(bundles, says):
    assert says in without_room(bundles, [GPU, HEAD])


def test_node_types_are_read_from_the_autoscaler():
    config = ClusterConfig()
    config.node_group_configs.add(name="gpu", resources={"CPU": 7, "GPU": 1}, max_count=4)
    config.node_group_configs.add(name="any", resources={"CPU": 2}, max_count=-1)
    config.node_group_configs.add(name="head", resources={"CPU": 1}, max_count=0)
    gpu, unlimited = types_of(config.node_group_configs)
    assert (gpu.name, gpu.resources, gpu.most) == ("gpu", {"CPU": 7.0, "GPU": 1.0}, 4)
    assert unlimited.most == float("inf")
    assert spell(gpu.resources) == "7 CPU, 1 GPU"


@pytest.fixture
def scaling(monkeypatch, ray_cluster):
    """Simulate a cluster whose autoscaler can add GPUs."""
    monkeypatch.setattr(node_types, "kuberay_types", lambda: (GPU, BIG))
    return ray_cluster


def test_possible_nodes_count(scaling):
    check_capacity(12, RankResources(cpus=1.0, gpus=1.0))
    assert PlacementOptions().waits() == 1800.0
    assert PlacementOptions(wait_for_nodes_s=5.0).waits() == 5.0
    assert cluster_ranks(RankResources(cpus=1.0, gpus=1.0)) == 12
    assert pick_device("auto") == "cuda"
    with pytest.raises(ClusterError, match="13 ranks of 1 GPU.*at most, including all nodes that"):
        check_capacity(13, RankResources(cpus=1.0, gpus=1.0))
    with pytest.raises(ClusterError, match="no node type has room for 1 CPU, 9 GPU"):
        check_capacity(1, RankResources(cpus=1.0, gpus=9.0))


def test_missing_resources_without_autoscaler_are_refused(ray_cluster):
    assert PlacementOptions().waits() == 0.0
    with pytest.raises(ClusterError, match=r"the cluster has 0 GPU\. Use fewer"):
        check_capacity(1, RankResources(gpus=1.0))
    check_capacity(1, RankResources(gpus=1.0), PlacementOptions(wait_for_nodes_s=1.0))


def test_the_device_is_that_of_the_resources(ray_cluster):
    assert pick_device("auto", lambda device: RankResources(gpus=1.0)) == "cuda"
    assert pick_device("auto", lambda device: RankResources()) == "cpu"
    assert pick_device("cuda", lambda device: RankResources()) == "cuda"
    # without GPUs in the cluster
    assert pick_device("auto", lambda device: RankResources(gpus=float(device == "cuda"))) == "cpu"


def test_missing_nodes_are_reported(ray_cluster, monkeypatch):
    from raymm.actors.placement import placement

    monkeypatch.setattr(placement, "LINE_EVERY_S", 1.0)
    said: list[str] = []
    options = PlacementOptions(({"CPU": 0.5},), wait_for_nodes_s=2.0, say=said.append)
    place = placement.Placement([{"CPU": 1.0, "GPU": 1.0}] * 2, options)
    try:
        with pytest.raises(ClusterError, match=r"could not be placed within 2 s \(run.wait_for"):
            place.wait()
        assert "1 node running (8 CPU), pending: none" in said[0]
        assert "requested: 2 x (1 CPU, 1 GPU) and 1 x (0.5 CPU)" in said[0]
    finally:
        place.remove()


def test_collected_objects_release_placements_in_a_thread(ray_cluster, monkeypatch):
    """Avoid a deadlock: garbage collection may happen within a call of Ray's own."""
    removed, release = queue.SimpleQueue(), placement.remove_placement_group

    def remove(group):
        release(group)
        removed.put(threading.current_thread().name)

    monkeypatch.setattr(placement, "remove_placement_group", remove)
    held = [placement.Placement([{"CPU": 0.1}], PlacementOptions()) for _ in range(2)]
    held[0].remove()
    assert removed.get_nowait() == "raymm-places"  # the removal has waited for the call
    assert not held[0].is_held
    held.clear()
    gc.collect()
    assert removed.get(timeout=10) == "raymm-places"
    assert removed.empty()


def test_everything_is_placed_together(ray_cluster):
    from raymm.actors.placement.placement import Placement

    place = Placement([{"CPU": 0.5}] * 2, PlacementOptions(({"CPU": 0.25},)))
    try:
        place.wait()
        (beside,) = place.worker_places
        assert beside.placement_group_bundle_index == 2
        assert place.nodes() == {ray_cluster.get_runtime_context().get_node_id()}
    finally:
        place.remove()


def test_a_call_that_never_returns_is_not_waited_for(ray_cluster, monkeypatch):
    """Skip calls that hang, such as those to a GCS that is gone."""
    called, returns, released = threading.Event(), threading.Event(), threading.Event()
    release = placement.remove_placement_group

    def remove(group):
        called.set()
        returns.wait(60)
        release(group)
        released.set()

    monkeypatch.setattr(placement, "remove_placement_group", remove)
    monkeypatch.setattr(placement, "RELEASE_S", 0.01)
    placement.Placement([{"CPU": 0.1}], PlacementOptions()).remove()
    assert called.wait(10) and not returns.is_set()
    returns.set()
    assert released.wait(10)
