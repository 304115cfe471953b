"""All that is checked of a manifest, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.check import consistency, core_kinds, operator_rules, resource_definitions
from deploy.check.kustomize import Manifest


def problems(manifest: Manifest, version: str) -> list[str]:
    """Return the problems of a manifest.

    Args:
        version: of Ray, in the image.
    """
    if not isinstance(manifest, dict) or not {"apiVersion", "kind"} <= manifest.keys():
        return ["no apiVersion and kind"]
    if core_kinds.has(manifest):
        return list(core_kinds.problems(manifest))
    if not resource_definitions.has(manifest):
        return [f"{manifest['apiVersion']} {manifest['kind']}: a kind without a definition here"]
    found = list(resource_definitions.problems(manifest))
    if found:  # the rest reads fields, which must be there
        return found
    if manifest["apiVersion"].startswith("ray.io/"):
        found += operator_rules.problems(manifest)
        found += _pods(manifest)
        found += consistency.problems(manifest, version)
    return found


def _pods(manifest: Manifest) -> Iterator[str]:
    spec = consistency.cluster_spec(manifest)
    if spec is None:
        return
    yield from core_kinds.pod_problems(spec["headGroupSpec"]["template"], "headGroupSpec.template")
    for number, group in enumerate(spec.get("workerGroupSpecs") or ()):
        where = f"workerGroupSpecs.{number}.template"
        yield from core_kinds.pod_problems(group["template"], where)
