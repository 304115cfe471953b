"""Plans of either style as plain data, for checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan

MULTIPLEXED = "multiplexed"


def plan_to_dict(plan: Plan | StageMapping) -> dict[str, Any]:
    """A plan as data; a mapping says its style."""
    if isinstance(plan, Plan):
        return plan.to_dict()
    return {"style": MULTIPLEXED, **json.loads(plan.to_json())}


def plan_from_dict(data: Mapping[str, Any]) -> Plan | StageMapping:
    """Inverse of :func:`plan_to_dict`.

    Raises:
        PlanError, MultiplexError: naming the field that does not fit.
    """
    if data.get("style") != MULTIPLEXED:
        return Plan.from_dict(dict(data))
    fields = {name: value for name, value in data.items() if name != "style"}
    return StageMapping.from_json(json.dumps(fields))
