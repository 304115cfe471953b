"""``python -m deploy.check``: a line for everything that is checked; ends with 1 if something is
wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.check import consistency, dashboard, dockerfile, kustomize, manifests

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = DEPLOY / "overlays"


def checks() -> Iterator[tuple[str, list[str]]]:
    """(what, what is wrong with it) of everything in ``deploy/``."""
    versions = consistency.ray_versions(ROOT)
    version = versions["constraints.txt"]
    different = [f"Ray {v} in {file}" for file, v in versions.items() if v != version]
    yield f"Ray {version} everywhere", different
    yield "Dockerfile", list(dockerfile.problems(DEPLOY / "Dockerfile"))
    by_kind = {}
    for folder in [DEPLOY / "base", *sorted(OVERLAYS.iterdir())]:
        name = str(folder.relative_to(DEPLOY))
        try:
            built = kustomize.build(folder)
        except kustomize.KustomizeError as error:
            yield name, [str(error)]
            continue
        for manifest in built:
            label = f"{name}: {manifest['kind']} {manifest['metadata']['name']}"
            yield label, manifests.problems(manifest, version)
            by_kind[name, manifest["kind"]] = manifest
    yield "the job's cluster is the interactive one", list(consistency.different_clusters(
        by_kind["overlays/interactive", "RayCluster"], by_kind["overlays/job", "RayJob"]
    ))
    yield "dashboard", list(dashboard.problems(OVERLAYS / "monitoring" / "dashboard.json"))


def main() -> int:
    """Print the lines; 1 if something is wrong."""
    wrong = 0
    for what, found in checks():
        print(f"{'ok' if not found else 'WRONG':<6} {what}")
        for problem in found:
            print(f"       {problem}")
        wrong += bool(found)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
