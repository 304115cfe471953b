"""How modules' times change with the GPUs that they share samples over, with their quotas, and with
what runs beside them: scaling surfaces and interference (Mosaic §3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.costs.surface import ScalingSurface
from raymm.scheduler.graph.strict_json import items, members

# Quotas are multiples of one over at most this.
FINEST_QUOTA = 1000


@dataclass(frozen=True)
class DeviceSharing:
    """Surfaces of modules, and what they cost each other. A surface's seconds have the sum of
    gradients over its GPUs in them.

    Attributes:
        surfaces: of the same work as the layer costs that they stand beside; of modules without one
            it is taken that samples and quotas are used without loss.
        interference: of modules on one GPU.
    """

    surfaces: tuple[ScalingSurface, ...]
    interference: Interference = Interference()

    @cached_property
    def _by_name(self) -> dict[str, ScalingSurface]:
        return {surface.name: surface for surface in self.surfaces}

    @cached_property
    def _alone(self) -> dict[tuple[str, int, float], float]:
        return {}

    def has(self, module: str) -> bool:
        """Whether a module's seconds on one whole device are known, and so what others are of
        them."""
        surface = self._by_name.get(module)
        return surface is not None and surface.degrees[0] == 1 and (
            surface.quotas[-1] == surface.steps
        )

    def most_devices(self, module: str) -> int:
        """As many as a module's surface has, which share its samples; one where that is not
        known."""
        return self._by_name[module].degrees[-1] if self.has(module) else 1

    def seconds(self, module: str, degree: int, quotas: Mapping[str, float]) -> float:
        """Of a forward and backward, as a multiple of those of the whole batch on one whole device
        (eq. 7).

        Args:
            module: which.
            degree: GPUs that it is on, each with an equal share of the samples.
            quotas: of the modules that run on this GPU, itself too, as shares of it.
        """
        own = quotas[module]
        if not self.has(module):
            return 1 / degree / own
        surface = self._by_name[module]
        others = [
            self._bandwidth(surface.name, quotas[surface.name]) for surface in self.surfaces
            if surface.name in quotas and surface.name != module
        ]
        alone, use = self._seconds(surface, degree, own), (self._bandwidth(module, own), *others)
        return self.interference.colocated(alone, (use,)) / self._seconds(surface, 1, 1.0)

    def _seconds(self, surface: ScalingSurface, degree: int, quota: float) -> float:
        """Alone. Beyond what was sampled, GPUs and quotas are used without loss."""
        key = surface.name, degree, quota
        if key not in self._alone:
            sampled = min(degree, surface.degrees[-1])
            asked, least = _fraction(quota), Fraction(surface.quotas[0], surface.steps)
            share = max(asked, least)
            seconds = surface.seconds_at(sampled, share.numerator, share.denominator)
            self._alone[key] = seconds * sampled / degree * float(share / asked)
        return self._alone[key]

    def _bandwidth(self, module: str, quota: float) -> float:
        surface = self._by_name.get(module)
        if surface is None:
            return 0.0
        share = max(_fraction(quota), Fraction(surface.quotas[0], surface.steps))
        share = min(share, Fraction(surface.quotas[-1], surface.steps))
        return surface.bandwidth_at(share.numerator, share.denominator)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> DeviceSharing:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanError: naming the field that does not fit.
        """
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
