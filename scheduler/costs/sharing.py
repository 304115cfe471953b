"""Effect of sample splits, quotas and colocated modules on the times of modules: scaling surfaces
and interference (Mosaic §3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.strict_json import items, members

# Quotas are multiples of 1/n for an n up to this.
FINEST_QUOTA = 1000


@dataclass(frozen=True)
class DeviceSharing:
    """Surfaces of modules, measured for the same work as the layer costs, and their interference.
    The seconds of a surface include the gradient all-reduce over its GPUs. Without a surface, time
    is inversely proportional to the number of devices and the quota."""

    surfaces: tuple[ScalingSurface, ...]
    interference: Interference = Interference()

    @cached_property
    def _by_name(self) -> dict[str, ScalingSurface]:
        return {surface.name: surface for surface in self.surfaces}

    @cached_property
    def _alone(self) -> dict[tuple[str, int, float], float]:
        return {}

    def has(self, module: str) -> bool:
        """Return True if the module's seconds on one whole device are known, the reference for all
        others."""
        surface = self._by_name.get(module)
        return surface is not None and surface.degrees[0] == 1 and (
            surface.quotas[-1] == surface.steps
        )

    def most_devices(self, module: str) -> int:
        """Return the largest number of devices that may split the module's samples; 1 if
        unknown."""
        return self._by_name[module].degrees[-1] if self.has(module) else 1

    def seconds(self, module: str, degree: int, quotas: Mapping[str, float]) -> float:
        """Return the seconds of a forward and backward with an equal share of the samples on each
        of ``degree`` GPUs, as a multiple of those of the whole batch on one whole device (eq. 7).
        ``quotas`` has the quotas of all modules on the GPU, including this one."""
        quota = quotas[module]
        if not self.has(module):
            return 1 / degree / quota
        surface = self._by_name[module]
        peer_use = [
            self._bandwidth(surface.name, quotas[surface.name]) for surface in self.surfaces
            if surface.name in quotas and surface.name != module
        ]
        alone, use = (
            self._seconds(surface, degree, quota), (self._bandwidth(module, quota), *peer_use)
        )
        return self.interference.colocated(alone, (use,)) / self._seconds(surface, 1, 1.0)

    def _seconds(self, surface: ScalingSurface, degree: int, quota: float) -> float:
        """Return the seconds without neighbours. Beyond the sampled range, time is inversely
        proportional to GPUs and quota."""
        key = surface.name, degree, quota
        if key not in self._alone:
            sampled = min(degree, surface.degrees[-1])
            requested, least = _fraction(quota), Fraction(surface.quotas[0], surface.steps)
            share = max(requested, least)
            seconds = surface.seconds_at(sampled, share.numerator, share.denominator)
            self._alone[key] = seconds * sampled / degree * float(share / requested)
        return self._alone[key]

    def _bandwidth(self, module: str, quota: float) -> float:
        surface = self._by_name.get(module)
        if surface is None:
            return 0.0
        share = max(_fraction(quota), Fraction(surface.quotas[0], surface.steps))
        share = min(share, Fraction(surface.quotas[-1], surface.steps))
        return surface.bandwidth_at(share.numerator, share.denominator)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> DeviceSharing:
        """Return the object of a dict made by :meth:`to_dict`; raise ``PlanError`` naming an
        invalid field."""
        data = members(data, "sharing", ("surfaces", "interference"))
        surfaces = tuple(
            ScalingSurface.from_dict(entry, f"sharing.surfaces[{i}]")
            for i, entry in enumerate(items(data["surfaces"], "sharing.surfaces"))
        )
        names = ("constant", "additive", "product", "unit", "coupling")
        law = members(data["interference"], "sharing.interference", names)
        return cls(surfaces, Interference(**law))


def _fraction(quota: float) -> Fraction:
    return Fraction(quota).limit_denominator(FINEST_QUOTA)
