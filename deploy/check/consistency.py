"""Mistakes that every server accepts: versions of Ray that differ, a cluster and a job that differ,
a grace period that is shorter than the commands that run in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.check.kustomize import Manifest
from deploy.check.quantities import quantity
from raymm.actors.storage.location import check_location, is_bucket

# Share of a pod's memory that Ray's object store takes; it uses the disk if /dev/shm is smaller.
OBJECT_STORE = 0.3
# Bytes of host memory per GPU: what trains is copied there for checkpoints and snapshots.
HOST_MEMORY = 32 * 2**30
# Seconds that Ray takes to end after the preStop command.
END_SECONDS = 15


def ray_versions(root: Path) -> dict[str, str]:
    """Ray's version by the file that says it: the constraints' and the image's."""
    constraint = re.search(r"^ray==(\S+)", (root / "constraints.txt").read_text(), re.M)
    image = re.search(
        r"^FROM rayproject/ray:([0-9.]+)-", (root / "deploy/Dockerfile").read_text(), re.M
    )
    return {
        "constraints.txt": constraint[1] if constraint else "none",
        "deploy/Dockerfile": image[1] if image else "none",
    }


def problems(manifest: Manifest, version: str) -> Iterator[str]:
    """Return the problems of one manifest.

    Args:
        version: of Ray, in the image.
    """
    spec = cluster_spec(manifest)
    if spec is None:
        return
    if spec.get("rayVersion") != version:
        yield f"rayVersion: {spec.get('rayVersion')!r}; the image has Ray {version}"
    if (spec.get("authOptions") or {}).get("mode") != "token":
        yield "authOptions.mode: whoever reaches the head may run code on it; give token"
    head = spec["headGroupSpec"]
    if str((head.get("rayStartParams") or {}).get("num-cpus")) != "0":
        yield "headGroupSpec.rayStartParams.num-cpus: work on the head takes the cluster with it"
    pods = [("headGroupSpec", head), *(
        (f"workerGroupSpecs.{number}", group)
        for number, group in enumerate(spec.get("workerGroupSpecs") or ())
    )]
    for where, group in pods:
        pod = group["template"]["spec"]
        ray = pod["containers"][0]
        mounted = {one["mountPath"] for one in ray.get("volumeMounts") or ()}
        if "/dev/shm" not in mounted:
            yield f"{where}: /dev/shm is not mounted; Docker's has 64 MiB"
        if "metrics" not in {one.get("name") for one in ray.get("ports") or ()}:
            yield f"{where}: no port named metrics, which the PodMonitor reads"
        yield from (f"{where}: {text}" for text in _gpus(ray))
        yield from (f"{where}: {text}" for text in _memory(pod, ray))
        if group is not head:
            yield from (f"{where}: {text}" for text in _leaving(pod, ray))
        yield from (f"{where}: {text}" for text in _run_folder(manifest, pod, ray))


def cluster_spec(manifest: Manifest) -> dict[str, Any] | None:
    """A RayCluster's spec, or that of a RayJob's cluster."""
    if manifest["kind"] == "RayCluster":
        return manifest["spec"]
    if manifest["kind"] == "RayJob":
        return manifest["spec"].get("rayClusterSpec")
    return None


def _gpus(container: dict[str, Any]) -> Iterator[str]:
    resources = container.get("resources") or {}
    asked, limit = ((resources.get(k) or {}).get("nvidia.com/gpu") for k in ("requests", "limits"))
    if asked is not None and asked != limit:
        yield f"requests nvidia.com/gpu {asked}, limit {limit}; GPUs must have both alike"


def _memory(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    limits = (container.get("resources") or {}).get("limits") or {}
    if "memory" not in limits:
        return
    memory, gpus = quantity(limits["memory"]), quantity(limits.get("nvidia.com/gpu", 0))
    if memory < gpus * HOST_MEMORY:
        yield (
            f"memory {limits['memory']} for {gpus:g} GPUs; checkpoints and snapshots copy what "
            f"trains to the host: give at least {gpus * HOST_MEMORY / 2**30:g}Gi"
        )
    names = {
        mount["name"] for mount in container.get("volumeMounts") or ()
        if mount["mountPath"] == "/dev/shm"
    }
    for volume in pod.get("volumes") or ():
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if volume["name"] in names and size is not None:
            if quantity(size) < OBJECT_STORE * memory:
                yield (
                    f"/dev/shm has {size}, memory is {limits['memory']}; Ray's object store takes "
                    f"{OBJECT_STORE:.0%} of the memory and uses the disk where /dev/shm is smaller"
                )


def _run_folder(
    manifest: Manifest, pod: dict[str, Any], container: dict[str, Any]
) -> Iterator[str]:
    """Return a problem if the nodes of a job do not share its run folder."""
    match = re.search(r"run\.storage_path=([^\s']+)", manifest["spec"].get("entrypoint") or "")
    if match is None:
        return
    try:
        location = check_location(match[1])
    except ValueError as error:
        yield f"entrypoint: run.storage_path={match[1]}: {error}"
        return
    shared = {
        volume["name"] for volume in pod.get("volumes") or () if "persistentVolumeClaim" in volume
    }
    mounted = [
        mount["mountPath"] for mount in container.get("volumeMounts") or ()
        if mount["name"] in shared
    ]
    if not is_bucket(location) and not any(Path(location).is_relative_to(m) for m in mounted):
        yield (
            f"entrypoint: run.storage_path={location} is on no volume that all nodes share "
            f"({', '.join(mounted) or 'there is none'})"
        )


def _leaving(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    hook = (container.get("lifecycle") or {}).get("preStop") or {}
    command = (hook.get("exec") or {}).get("command") or []
    if "raymm.runtime.leave_node" not in command:
        yield "no preStop that announces the node's end (raymm.runtime.leave_node)"
        return
    seconds = float(command[command.index("--seconds") + 1])
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if seconds + END_SECONDS > grace:
        yield (
            f"terminationGracePeriodSeconds: {grace}; preStop takes up to {seconds:g} s, and Ray "
            f"{END_SECONDS} s to end"
        )


def different_clusters(cluster: Manifest, job: Manifest) -> Iterator[str]:
    """Fields in which the interactive cluster's spec and the job's differ."""
    yield from _differences(cluster["spec"], job["spec"]["rayClusterSpec"], "")


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, f"{path}.{number}")
    elif one != other:
        yield f"{path.removeprefix('.')}: {one!r} in the cluster, {other!r} in the job"
