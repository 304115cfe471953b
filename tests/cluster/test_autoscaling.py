"""Shipped RayCluster under Ray's own KubeRay autoscaler.

Nodes are added when a run requests resources, and removed later; the hook that a pod runs before
its end announces it. Runs are in ``test_going_on``; submitted jobs take minutes and are only in
``python -m tests.cluster``.
"""

import shutil
import subprocess
import sys

import pytest

from tests.cluster.rig import kuberay
from tests.cluster.scenario import shipped_cluster

# Timeout of the whole test: some 30 s alone, many times that on a busy machine.
TEST_TIMEOUT_S = 600
DRIVER = """
import ray, sys
from raymm.actors.placement import placement
from raymm.actors.placement.node_types import all_types, spell, without_room
from raymm.actors.rank.rank_resources import RankResources
from raymm.planning.planned_run import request_for_cluster
from raymm.planning.request import PlanRequest
from raymm.runtime.cluster import pick_device
from raymm.monitor.drain_notices import DrainObserver
import threading

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("types", [(one.name, spell(one.resources), one.most) for one in all_types()], flush=True)
print("refused", without_room([{"GPU": 2.0}], all_types()), flush=True)
device = pick_device("auto")
request, _ = request_for_cluster(PlanRequest(), device, RankResources(cpus=2, gpus=1), 0.5)
there = ray.cluster_resources().get("GPU", 0)
print(f"planned for {request.ranks} ranks on {device}; {there:g} GPUs are there", flush=True)
placement.LINE_EVERY_S = 1.0
options = placement.PlacementOptions(({"CPU": 0.5},), say=lambda line: print(line, flush=True))
place = placement.Placement([{"CPU": 1.0, "GPU": 1.0}] * 2, options)
place.wait()
print("placed on", len(place.nodes()), "nodes", flush=True)
heard = threading.Event()
with DrainObserver(place.nodes(), lambda notice: (print(notice, flush=True), heard.set())):
    assert heard.wait(120)
place.remove()
ray.shutdown()
print("left", flush=True)
"""


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(TEST_TIMEOUT_S)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the API server's certificate")
def test_nodes_come_are_announced_to_end_and_go():
    with kuberay(shipped_cluster(idle_seconds=3)) as rig:
        assert rig.pods.workers() == []
        output = rig.folder / "driver.txt"
        with open(output, "w") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, rig.gcs], env=rig.environment, stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            rig.wait_until(
                lambda: "placed on" in output.read_text() or driver.poll() is not None, "places"
            )
            assert "placed on 2 nodes" in output.read_text(), rig.account()
            first, second = rig.pods.workers()
            rig.pods.delete(first)
            driver.wait(timeout=120)
        finally:
            driver.kill()
            driver.wait()
        text = output.read_text()
        assert "left" in text, rig.account()
        assert "the notice that node" in text
        assert "('gpu', '7 CPU, 1 GPU', 4)" in text
        assert "planned for 4 ranks on cuda; 0 GPUs are there" in text
        assert "refused no node type has room for 2 GPU" in text
        assert "waiting for nodes" in text and "requested: 2 x (1 CPU, 1 GPU) and 1 x" in text
        rig.wait_until(lambda: rig.pods.workers() == [], "idle nodes go")
        rig.wait_until(
            lambda: any("was vacated after" in line for line in rig.events), "the preStop hook"
        )
        assert any(f"workersToDelete\": [\"{second}" in line for line in rig.events), rig.events
