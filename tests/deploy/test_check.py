"""``python -m deploy.check`` accepts the shipped files, and detects planted mistakes."""

import copy
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.check import dashboard, dockerfile, kustomize, manifests
from deploy.check.__main__ import DEPLOY, OVERLAYS, checks

RAY = "2.60.0"
FOLDERS = ["base", *sorted(f"overlays/{one.name}" for one in OVERLAYS.iterdir())]


@functools.cache
def built(name: str) -> list[dict]:
    return kustomize.build(DEPLOY / name)


def shipped(name: str, kind: str) -> dict:
    (manifest,) = (one for one in built(name) if one["kind"] == kind)
    return copy.deepcopy(manifest)


def test_shipped_files_are_valid():
    found = list(checks())
    assert len(found) > 15
    assert [(what, problems) for what, problems in found if problems] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="compares with kubectl kustomize")
@pytest.mark.parametrize("folder", FOLDERS)
def test_overlays_are_built_like_kubectl(folder: str):
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def by_name(all_of_them):
        return {(one["kind"], one["metadata"]["name"]): one for one in all_of_them}

    assert by_name(built(folder)) == by_name(yaml.safe_load_all(done.stdout))


CLUSTER, JOB = ("overlays/interactive", "RayCluster"), ("overlays/job", "RayJob")
EIGHT = "overlays/eight-gpus", "RayJob"
BUCKET = "overlays/bucket", "RayJob"
KUEUE, QUEUE = ("overlays/kueue", "RayJob"), ("overlays/kueue", "ClusterQueue")
VOLUME, MONITOR = ("base", "PersistentVolumeClaim"), ("overlays/monitoring", "PodMonitor")
HEAD, WORKER = "/spec/headGroupSpec", "/spec/workerGroupSpecs/0"
HEAD_POD, POD = f"{HEAD}/template/spec", f"{WORKER}/template/spec"
RAY_CONTAINER = f"{POD}/containers/0"
OF_JOB = RAY_CONTAINER.replace("/spec/", "/spec/rayClusterSpec/", 1)

# (document, mistake as a JSON patch, a part of the message)
MISTAKES = {
    # types and names in the schemas
    "misspelt field": (CLUSTER, {"op": "add", "path": "/spec/rayverion", "value": "2.60.0"},
                       "'rayverion' was unexpected"),
    "misspelt field of a pod": (
        CLUSTER, {"op": "add", "path": f"{POD}/terminationGracePeriod", "value": 300},
        "'terminationGracePeriod' was unexpected"),
    "text for a number": (CLUSTER, {"op": "replace", "path": f"{WORKER}/maxReplicas",
                                    "value": "4"}, "'4' is not of type 'integer'"),
    "number for a text": (
        CLUSTER, {"op": "replace", "path": f"{HEAD}/rayStartParams/num-cpus", "value": 0},
        "0 is not of type 'string'"),
    "value that is not accepted": (
        CLUSTER, {"op": "replace", "path": "/spec/autoscalerOptions/upscalingMode",
                  "value": "Fast"}, "'Fast' is not one of"),
    "required field missing": (CLUSTER, {"op": "remove", "path": f"{WORKER}/template"},
                               "'template' is a required property"),
    "resources one level too high": (
        CLUSTER, {"op": "add", "path": f"{POD}/limits", "value": {"cpu": "7"}}, "'limits'"),
    "CEL rule": (CLUSTER, {"op": "add", "path": "/spec/managedBy", "value": "me"},
                 "managedBy"),
    "run in a folder of one node": (
        JOB, {"op": "replace", "path": "/spec/entrypoint",
              "value": "raymm train x.yaml --set run.storage_path=/mnt/rayn/run"},
        "/mnt/rayn/run is on no volume that all nodes share (/mnt/raymm)"),
    "run in a store of another kind": (
        BUCKET, {"op": "replace", "path": "/spec/entrypoint",
                 "value": "bash -c 'raymm train x.yaml --set run.storage_path=s4://a/b'"},
        "s4:// is not known; accepted: a folder"),
    "CEL rule of a job": (
        JOB, {"op": "add", "path": "/spec/deletionStrategy",
              "value": {"onSuccess": {"policy": "DeleteSelf"}}}, "deletionStrategy"),
    "no version of the API": (CLUSTER, {"op": "replace", "path": "/apiVersion",
                                        "value": "ray.io/v2"}, "without a definition"),
    "field of a job's that is a cluster's": (
        JOB, {"op": "add", "path": "/spec/enableInTreeAutoscaling", "value": True},
        "'enableInTreeAutoscaling' was unexpected"),
    "access mode that there is not": (
        VOLUME, {"op": "replace", "path": "/spec/accessModes", "value": "ReadWriteMany"},
        "is not of type"),
    "kind in another group": (VOLUME, {"op": "replace", "path": "/apiVersion",
                                       "value": "apps/v1"}, "is no kind of Kubernetes"),
    "restart policy that there is not": (
        CLUSTER, {"op": "replace", "path": f"{POD}/restartPolicy", "value": "Newer"}, "Newer"),
    "port without a number": (
        CLUSTER, {"op": "replace", "path": f"{RAY_CONTAINER}/ports/0/containerPort",
                  "value": "metrics"}, "is not of type 'integer'"),
    "interval without a unit": (
        MONITOR, {"op": "replace", "path": "/spec/podMetricsEndpoints/0/interval",
                  "value": "15"}, "does not match"),
    "resources in another order": (
        QUEUE, {"op": "replace", "path": "/spec/resourceGroups/0/coveredResources",
                "value": ["memory", "cpu", "nvidia.com/gpu"]}, "coveredResources"),
    # the operator's rules
    "name with an upper case letter": (
        CLUSTER, {"op": "replace", "path": "/metadata/name", "value": "Raymm"}, "lower case"),
    "name too long for a job": (
        JOB, {"op": "replace", "path": "/metadata/name", "value": "r" * 48}, "at most 47"),
    "minimum above the maximum": (
        CLUSTER, {"op": "replace", "path": f"{WORKER}/minReplicas", "value": 5},
        "above maxReplicas"),
    "restarts under autoscaler v2": (
        CLUSTER, {"op": "replace", "path": f"{POD}/restartPolicy", "value": "Always"},
        "autoscaler v2 needs Never"),
    "two autoscaler versions": (
        CLUSTER, {"op": "add", "path": f"{HEAD_POD}/containers/0/env/-",
                  "value": {"name": "RAY_enable_autoscaler_v2", "value": "1"}}, "give one"),
    "keeps what it does not shut down": (
        JOB, {"op": "replace", "path": "/spec/shutdownAfterJobFinishes", "value": False},
        "ttlSecondsAfterFinished: needs"),
    "suspended and not shut down": (
        KUEUE, {"op": "replace", "path": "/spec/shutdownAfterJobFinishes", "value": False},
        "suspend: needs"),
    "environment that is no YAML": (
        JOB, {"op": "add", "path": "/spec/runtimeEnvYAML", "value": "env_vars: {a: [}"},
        "runtimeEnvYAML"),
    # accepted by the operator, but not working
    "another Ray than the image's": (
        CLUSTER, {"op": "replace", "path": "/spec/rayVersion", "value": "2.55.0"},
        "the image has Ray 2.60.0"),
    "no token": (CLUSTER, {"op": "remove", "path": "/spec/authOptions"}, "give token"),
    "work on the head": (CLUSTER, {"op": "remove", "path": f"{HEAD}/rayStartParams/num-cpus"},
                         "num-cpus"),
    "no shared memory": (CLUSTER, {"op": "remove", "path": f"{RAY_CONTAINER}/volumeMounts/0"},
                         "/dev/shm"),
    "little shared memory": (
        CLUSTER, {"op": "replace", "path": f"{POD}/volumes/0/emptyDir/sizeLimit", "value": "14Gi"},
        "/dev/shm has 14Gi, memory is 48Gi"),
    "little memory for the GPUs of a pod": (
        EIGHT, {"op": "replace", "path": f"{OF_JOB}/resources/limits/memory", "value": "255Gi"},
        "give at least 256Gi"),
    "mounts a volume that is not there": (
        CLUSTER, {"op": "replace", "path": f"{POD}/volumes/1/name", "value": "disk"},
        "mounts 'storage'"),
    "grace period shorter than the drain": (
        CLUSTER, {"op": "replace", "path": f"{POD}/terminationGracePeriodSeconds", "value": 60},
        "terminationGracePeriodSeconds: 60"),
    "leaves without a word": (CLUSTER, {"op": "remove", "path": f"{RAY_CONTAINER}/lifecycle"},
                              "no preStop"),
    "requests above the limit": (
        CLUSTER, {"op": "replace", "path": f"{RAY_CONTAINER}/resources/requests/memory",
                  "value": "64Gi"}, "requests memory 64Gi"),
    "quantity that is none": (
        CLUSTER, {"op": "replace", "path": f"{RAY_CONTAINER}/resources/requests/memory",
                  "value": "48GB"}, "48GB"),
    "GPUs requested, not limited": (
        CLUSTER, {"op": "remove", "path": f"{RAY_CONTAINER}/resources/limits/nvidia.com~1gpu"},
        "must have both"),
    "port without the monitor's name": (
        CLUSTER, {"op": "replace", "path": f"{RAY_CONTAINER}/ports/0/name", "value": "prom"},
        "no port named metrics"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str):
    (folder, kind), operation, says = MISTAKES[name]
    whole = shipped(folder, kind)
    assert manifests.problems(whole, RAY) == []
    found = manifests.problems(kustomize.json_patch(whole, [operation]), RAY)
    assert any(says in problem for problem in found), found


def test_planted_mistakes_of_a_dockerfile_are_found(tmp_path: Path):
    text = (DEPLOY / "Dockerfile").read_text()
    for old, new, rule in [
        ("ray:2.60.0-py311-gpu", "ray", "DL3006"), ("--no-cache-dir ", "", "DL3042"),
        ("WORKDIR /home/ray/raymm", "WORKDIR raymm", "DL3000"), ("COPY", "COPPY", "unexpected"),
    ]:
        assert old in text
        (tmp_path / "Dockerfile").write_text(text.replace(old, new))
        found = list(dockerfile.problems(tmp_path / "Dockerfile"))
        assert any(rule in problem for problem in found), (rule, found)


def test_planted_mistakes_of_a_kustomization_are_found(tmp_path: Path):
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder, ignore=shutil.ignore_patterns("check"))
    file = folder / "overlays" / "cpu" / "kustomization.yaml"
    text = file.read_text()
    for old, new, says in [
        ("../interactive", "interactive", "No such file"), ("resources:", "resource:", "resource"),
        ("name: raymm}", "name: ray}", "no resource is"),
        ("/spec/workerGroupSpecs/0/groupName", "/spec/workerGroupSpecs/1/groupName", "not there"),
        ("op: remove", "op: delete", "delete is not known"),
    ]:
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(kustomize.KustomizeError, match=says):
            kustomize.build(file.parent)


def test_planted_mistakes_of_a_dashboard_are_found(tmp_path: Path):
    shipped_file = OVERLAYS / "monitoring" / "dashboard.json"
    text, file = shipped_file.read_text(), tmp_path / "dashboard.json"
    for old, new, says in [
        ("ray_node_mem_used", "ray_node_memory_used", "there is no metric ray_node_memory_used"),
        ('"x": 8', '"x": 7', "lies over"), ('"w": 8', '"w": 9', "wider"), ("{", "", "Extra data"),
    ]:
        assert old in text
        file.write_text(text.replace(old, new))
        found = list(dashboard.problems(file))
        assert any(says in problem for problem in found), (says, found)
