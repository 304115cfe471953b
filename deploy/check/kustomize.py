"""The part of ``kustomize build`` that the overlays use: resources and overlays, JSON patches,
images, and config maps from files. Whatever else a ``kustomization.yaml`` may have is refused, not
left out: tests compare what comes of it with ``kubectl kustomize``, where that is installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

KUSTOMIZATION = "kustomization.yaml"
_API = ("kustomize.config.k8s.io/v1beta1", "Kustomization")
# Fields that hold lists of containers in the kinds in use; kustomize knows pod templates of custom
# resources by the names of these fields, too.
_CONTAINERS = ("containers", "initContainers")


class KustomizeError(Exception):
    """A kustomization that cannot be built; names file and field."""


def build(folder: Path) -> list[Manifest]:
    """The manifests of a folder with a ``kustomization.yaml``, in its order.

    Raises:
        KustomizeError: a field that is not known here, a file that is missing, a patch that
            finds nothing.
    """
    file = folder / KUSTOMIZATION
    if not file.is_file():
        raise KustomizeError(f"{folder}: there is no {KUSTOMIZATION}")
    options = _load(file)[0]
    if (options.pop("apiVersion", None), options.pop("kind", None)) != _API:
        raise KustomizeError(f"{file}: apiVersion and kind must be {' and '.join(_API)}")
    manifests: list[Manifest] = []
    for name in options.pop("resources", []):
        manifests += _resource(folder, name)
    for generator in options.pop("configMapGenerator", []):
        manifests.append(_config_map(folder, generator))
    for patch in options.pop("patches", []):
        _patch(manifests, patch, file)
    for image in options.pop("images", []):
        _rename_image(manifests, image, file)
    if options:
        raise KustomizeError(f"{file}: {sorted(options)} is not known here")
    return manifests


def _load(file: Path) -> list[Any]:
    try:
        return [part for part in yaml.safe_load_all(file.read_text()) if part is not None]
    except OSError as error:
        raise KustomizeError(f"{file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise KustomizeError(f"{file}: {error}") from None


def _resource(folder: Path, name: str) -> list[Manifest]:
    path = folder / name
    if path.is_dir():
        return build(path.resolve())
    if not path.resolve().is_relative_to(folder.resolve()):
        raise KustomizeError(f"{folder / KUSTOMIZATION}: {name} is a file outside of its folder")
    return _load(path)


def _config_map(folder: Path, generator: dict[str, Any]) -> Manifest:
    options = generator.get("options", {})
    if not options.get("disableNameSuffixHash"):
        raise KustomizeError(f"{folder / KUSTOMIZATION}: only with disableNameSuffixHash: true")
    metadata = {"name": generator["name"]}
    if "labels" in options:
        metadata["labels"] = options["labels"]
    data = {}
    for name in generator["files"]:
        if not (folder / name).is_file():
            raise KustomizeError(f"{folder / KUSTOMIZATION}: there is no file {name}")
        data[name] = (folder / name).read_text()
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(manifests: list[Manifest], patch: dict[str, Any], file: Path) -> None:
    target = patch["target"]
    if unknown := set(target) - {"kind", "name"}:
        raise KustomizeError(f"{file}: patches.target: {sorted(unknown)} is not known here")
    found = False
    for number, manifest in enumerate(manifests):
        if target["kind"] == manifest["kind"] and target["name"] == manifest["metadata"]["name"]:
            found = True
            try:
                manifests[number] = json_patch(manifest, yaml.safe_load(patch["patch"]))
            except KustomizeError as error:
                raise KustomizeError(f"{file}: patch of {target}: {error}") from None
    if not found:
        raise KustomizeError(f"{file}: no resource is {target}")


def json_patch(document: Any, operations: list[dict[str, Any]]) -> Any:
    """A document after operations of RFC 6902: ``test``, ``add``, ``replace``, ``remove``.

    Raises:
        KustomizeError: a path that is not there, a test that fails, another operation.
    """
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~")
            for part in operation["path"].removeprefix("/").split("/")
        ]
        try:
            place = document
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            _apply(place, last, operation)
        except (KeyError, IndexError, ValueError, TypeError):
            raise KustomizeError(f"{operation['op']} {operation['path']}: not there") from None
    return document


def _apply(place: Any, last: str, operation: dict[str, Any]) -> None:
    name = operation["op"]
    key = int(last) if isinstance(place, list) and last != "-" else last
    if name == "add" and isinstance(place, list):
        place.insert(len(place) if last == "-" else int(last), operation["value"])
    elif name == "add":
        place[key] = operation["value"]
    elif name == "replace":
        place[key]  # noqa: B018  must be there
        place[key] = operation["value"]
    elif name == "remove":
        del place[key]
    elif name == "test":
        if place[key] != operation["value"]:
            raise KustomizeError(f"test {operation['path']}: it is {place[key]!r}")
    else:
        raise KustomizeError(f"{name} is not known here")


def _rename_image(manifests: list[Manifest], image: dict[str, Any], file: Path) -> None:
    if unknown := set(image) - {"name", "newName", "newTag"}:
        raise KustomizeError(f"{file}: images: {sorted(unknown)} is not known here")
    new = f"{image.get('newName', image['name'])}:{image['newTag']}"

    def rename(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                rename(item)
        if not isinstance(value, dict):
            return
        for key, item in value.items():
            for container in item if key in _CONTAINERS else ():
                if str(container.get("image", "")).partition(":")[0] == image["name"]:
                    container["image"] = new
            rename(item)

    rename(manifests)
