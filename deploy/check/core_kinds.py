"""Checks of an API server for Kubernetes' own kinds, and for pods within custom resources, whose
definitions lack some rules of pods. Uses the published schemas (``kubernetes-validate``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate

# The oldest that the manifests are for, and the newest whose schemas the checker has.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def has(manifest: dict[str, Any]) -> bool:
    """Return True if the kind is Kubernetes' own: its group has no dot, or ends in ``.k8s.io``."""
    group, slash, _ = str(manifest.get("apiVersion")).rpartition("/")
    core = not slash or "." not in group or group.endswith(".k8s.io")
    return core and not group.endswith(".x-k8s.io")


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    """Return the problems of a manifest of Kubernetes' own kinds."""
    found: dict[str, None] = {}
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path)) or str(manifest.get("kind"))
            found[f"{path}: {error.message[:200]} (Kubernetes {version})"] = None
        except kubernetes_validate.SchemaNotFoundError:
            kind = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
            found[f"{kind} is no kind of Kubernetes {version}"] = None
    yield from found


def pod_problems(template: dict[str, Any], where: str) -> Iterator[str]:
    """Return the problems of a pod template at ``where`` in another manifest."""
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "pod", **(template.get("metadata") or {})},
        "spec": template.get("spec") or {},
    }
    for problem in problems(pod):
        yield f"{where}.{problem}"
    spec = pod["spec"]
    volumes = {one.get("name") for one in spec.get("volumes") or ()}
    for container in spec.get("containers") or ():
        for mount in container.get("volumeMounts") or ():
            if mount.get("name") not in volumes:
                yield (
                    f"{where}.spec.containers: {container.get('name')} mounts "
                    f"{mount.get('name')!r}; the pod's volumes are {sorted(map(str, volumes))}"
                )
        yield from _too_much(container, where)


def _too_much(container: dict[str, Any], where: str) -> Iterator[str]:
    from deploy.check.quantities import QuantityError, quantity

    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name, asked in (resources.get("requests") or {}).items():
        try:
            if name in limits and quantity(asked) > quantity(limits[name]):
                yield (
                    f"{where}.spec.containers: {container.get('name')} requests {name} {asked}, "
                    f"and its limit is {limits[name]}"
                )
        except QuantityError as error:
            yield f"{where}.spec.containers: {container.get('name')}: {name}: {error}"
