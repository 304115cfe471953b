"""Grafana's dashboard: whole JSON, panels that do not overlap, queries of metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from raymm.callbacks import ray_metrics as raymm_metrics

# Metrics of Ray's node agents and head (ray/dashboard/modules/reporter), which tests look for on a
# running cluster, and of raymm.
METRICS = (
    "ray_cluster_active_nodes", "ray_cluster_pending_nodes", "ray_cluster_failed_nodes",
    "ray_node_cpu_utilization", "ray_node_gpus_utilization", "ray_node_gram_available",
    "ray_node_gram_used", "ray_node_mem_total", "ray_node_mem_used",
    "ray_node_network_receive_speed", "ray_node_network_send_speed", "ray_object_store_used_memory",
    *(f"ray_{name}" for name in raymm_metrics.METRICS),
)
_WIDTH = 24
# In PromQL: what has no label, no function and no keyword for a name.
_NAME = re.compile(r"\b(ray_[a-z0-9_]+)\b(?!\s*=)")


def problems(file: Path) -> Iterator[str]:
    """Return the problems of a dashboard."""
    try:
        dashboard = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        yield str(error)
        return
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard.get("panels", ()):
        title, place = panel.get("title", "?"), panel["gridPos"]
        if place["x"] + place["w"] > _WIDTH:
            yield f"{title}: is wider than the page"
        cells = [
            (x, y) for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        if covered := {taken[cell] for cell in cells if cell in taken}:
            yield f"{title}: lies over {', '.join(sorted(covered))}"
        taken.update(dict.fromkeys(cells, title))
        if not panel.get("targets"):
            yield f"{title}: asks nothing"
        for target in panel.get("targets", ()):
            names = set(_NAME.findall(target["expr"])) - {"ray_io_cluster"}
            if not names:
                yield f"{title}: {target['expr']!r} asks for no metric"
            for name in sorted(names - set(METRICS)):
                yield f"{title}: there is no metric {name}"
