"""Scaling surfaces derived from a module's work alone."""

from __future__ import annotations

from collections.abc import Sequence

from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.strict_json import whole
from raymm.scheduler.multiplex.roofline import ModuleWork


def roofline_surface(work: ModuleWork, degrees: Sequence[int], steps: int = 10) -> ScalingSurface:
    """Sample the surface at these degrees and every quota.

    Raises:
        PlanError: a field is out of range; the message names it.
    """
    whole(steps, "steps", 1)
    for i, degree in enumerate(degrees):
        whole(degree, f"degrees[{i}]", 1)
    quotas = tuple(range(1, steps + 1))
    return ScalingSurface(
        work.name, tuple(degrees), quotas, steps,
        tuple(tuple(work.seconds(d, q / steps) for q in quotas) for d in degrees),
        tuple(work.state_bytes + work.activation_bytes // d for d in degrees),
        tuple(work.bandwidth(q / steps) for q in quotas),
    )
