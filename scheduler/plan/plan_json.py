"""Readers for the parts of a plan file, with errors that name the field.

All functions raise :class:`~raymm.scheduler.plan.field_checks.PlanError` for invalid values and
``KeyError`` for missing keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode, Port
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.schedules.policy import Policy


def graph_of(data: Mapping[str, Any]) -> ModuleGraph:
    """Return the module graph of a parsed plan file. Raises PlanError that names the field."""
    only(data, "graph", ("nodes", "edges", "every", "ports"))
    nodes = tuple(node_of(node) for node in data["nodes"])
    edges, every = (tuple(map(tuple, pairs)) for pairs in (data["edges"], data.get("every", ())))
    for edge in (*edges, *every):
        if [type(end) for end in edge] != [str, str]:
            raise PlanError(f"edge is {list(edge)}; it must be [producer, consumer]")
    ports = tuple(port_of(port) for port in data.get("ports", ()))
    try:
        return ModuleGraph(nodes, edges, every, ports)
    except ValueError as error:
        raise PlanError(f"graph: {error}") from None


def port_of(data: Any) -> Port:
    """Return the port of a parsed list [consumer, name, layers, producers, output]."""
    consumer, name, layers, producers, output = data
    port = Port(consumer, name, tuple(layers), tuple(producers), output)
    texts = (consumer, name, *port.producers, *([] if output is None else [output]))
    if any(type(text) is not str for text in texts) or any(type(n) is not int for n in port.layers):
        raise PlanError(
            f"port is {list(data)}; it must be [consumer, name, layers, producers, output or null]"
        )
    return port


def node_of(data: Mapping[str, Any]) -> ModuleNode:
    """Return the graph node of a parsed object."""
    only(data, "node", ("name", "trainable", "projector", "loss"))
    flags = tuple(data["trainable"])
    if any(type(flag) is not bool for flag in flags):
        raise PlanError(f"trainable is {list(flags)}; it must be a list of true and false")
    return ModuleNode(
        typed(data, "name", str), flags, typed(data, "projector", bool),
        typed({"loss": False, **data}, "loss", bool),
    )


def stage_of(data: Mapping[str, Any]) -> Stage:
    """Return the stage of a parsed object; fields of later versions have defaults."""
    only(data, "stage", tuple(field.name for field in fields(Stage)))
    layers = tuple(data["layers"])
    if [type(layer) for layer in layers] != [int, int]:
        raise PlanError(f"layers is {list(layers)}; it must be [first, one past the last]")
    return Stage(
        typed(data, "module", str), typed(data, "index", int), layers, typed(data, "rank", int),
        typed({"replica": 0, **data}, "replica", int),
        typed({"recompute": False, **data}, "recompute", bool),
        typed({"cp": 1, **data}, "cp", int),
        typed({"tp": 1, **data}, "tp", int),
        typed({"sharding": "none", **data}, "sharding", str),
        typed({"fsdp": 1, **data}, "fsdp", int),
        tuple(data.get("layer_options", ())),
        data.get("quota"),  # the plan checks it
        typed({"split": "microbatches", **data}, "split", str),
        data.get("slot"),  # the plan checks it
        typed({"ep": 1, **data}, "ep", int),
        typed({"microbatch_factor": 1, **data}, "microbatch_factor", int),
    )


def policy_of(data: Mapping[str, Any]) -> Policy:
    """Return the schedule policy of a parsed object."""
    only(data, "policy", tuple(field.name for field in fields(Policy)))
    try:
        ahead = tuple(tuple(module) for module in data.get("ahead", ()))
        return Policy(**{**data, "priority": tuple(data["priority"]), "ahead": ahead})
    except ValueError as error:
        raise PlanError(f"policy: {error}") from None


def only(data: Mapping[str, Any], where: str, accepted: tuple[str, ...]) -> None:
    """Raise ``PlanError`` if ``data`` has keys that are not in ``accepted``. ``where`` names the
    value in the error."""
    if unknown := set(data) - set(accepted):
        raise PlanError(
            f"{where}: unknown keys {sorted(map(str, unknown))}; accepted: {sorted(accepted)}"
        )


def integers(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    if any(type(value) is not int for value in data[key]):
        raise PlanError(f"{key} is {data[key]!r}; it must be a list of whole numbers")
    return tuple(data[key])


def typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return the value of ``key`` if its type is exactly ``kind``; else raise ``PlanError``."""
    value = data[key]
    if type(value) is not kind:  # not isinstance: bool is a subclass of int, but True is not a rank
        raise PlanError(f"{key} is {value!r}; it must be of type {kind.__name__}")
    return value
