"""Checks of an API server for custom resources: the structural schema of their definition, which
rejects unknown fields (``kubectl apply --validate=strict``), and its CEL rules.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from cel_expr_python import cel

_FOLDER = Path(__file__).resolve().parent
# KubeRay's own, whole.
_DEFINITIONS = {
    "RayCluster": "kuberay/ray.io_rayclusters.yaml.gz", "RayJob": "kuberay/ray.io_rayjobs.yaml.gz",
}
# Definitions for Prometheus' operator and Kueue: only the fields that the manifests use.
_PARTS = "other_kinds.yaml"


@functools.cache
def _schema(version: str, kind: str) -> dict[str, Any] | None:
    if kind in _DEFINITIONS:
        text = gzip.decompress((_FOLDER / _DEFINITIONS[kind]).read_bytes())
        definition = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        for one in definition["versions"]:
            if f"{definition['group']}/{one['name']}" == version:
                return one["schema"]["openAPIV3Schema"]
        return None
    return yaml.safe_load((_FOLDER / _PARTS).read_text()).get(f"{version} {kind}")


@functools.cache
def _validator(version: str, kind: str) -> jsonschema.Draft202012Validator:
    schema = _as_json_schema(_schema(version, kind))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"type": "string"}
    return jsonschema.Draft202012Validator(schema)


def has(manifest: dict[str, Any]) -> bool:
    """Return True if there is a definition for a manifest's kind."""
    return _schema(str(manifest.get("apiVersion")), str(manifest.get("kind"))) is not None


def problems(manifest: dict[str, Any]) -> Iterator[str]:
    """Return the fields that an API server with the definition rejects, by path, with reasons."""
    version, kind = manifest["apiVersion"], manifest["kind"]
    errors = list(_validator(version, kind).iter_errors(manifest))
    for error in errors:
        yield f"{'.'.join(map(str, error.absolute_path)) or kind}: {error.message[:200]}"
    if errors:
        return  # rules are for values of the right type
    for path, rule, message, value in _rules(_schema(version, kind), manifest, ""):
        if _evaluate(rule, value) is not True:
            yield f"{path.removeprefix('.') or kind}: {message}"


def _as_json_schema(schema: Any) -> Any:
    """A structural schema in JSON Schema's words: quantities may be numbers, and what has
    properties has no others. Formats (int32) are left out: JSON Schema does not know them."""
    if not isinstance(schema, dict):
        return schema
    schema = {
        key: value for key, value in schema.items() if key not in ("format", "description")
    }
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        schema["properties"] = {
            name: _as_json_schema(value) for name, value in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for key in ("additionalProperties", "items"):
        if key in schema:
            schema[key] = _as_json_schema(schema[key])
    return schema


def _rules(schema: Any, value: Any, path: str) -> Iterator[tuple[str, str, str, Any]]:
    """(path, rule, message, value) of all rules that apply; those that compare with what was there
    before are left out."""
    for one in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in one["rule"]:
            yield path, one["rule"], one.get("message", one["rule"]), value
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, others)
            if isinstance(inner, dict):
                yield from _rules(inner, item, f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from _rules(schema["items"], item, f"{path}.{number}")


@functools.cache
def _environment() -> Any:
    return cel.NewEnv(variables={"self": cel.Type.DYN})


def _evaluate(rule: str, value: Any) -> Any:
    return _environment().compile(rule).eval(data={"self": value}).value()
