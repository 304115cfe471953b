"""Scaling surface: the speed of a module without neighbours, by GPUs and SM quota (Mosaic §3.3).

A quota is a whole number of steps of a GPU's multiprocessors (``quota=3`` of ``steps=10``: three
tenths), so that quotas are added and compared exactly. A degree is a number of data-parallel
replicas, one per GPU, all with the same quota (eq. 6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.graph.strict_json import (
    MOST_STEPS,
    items,
    members,
    number,
    parsed,
    shown,
    text,
    whole,
)

SURFACES_FORMAT = 1
# Largest size of a replica; sums over all modules of a GPU then fit into 64 bits.
MOST_BYTES = 2**53


@dataclass(frozen=True)
class ScalingSurface:
    """Measurements of one module without neighbours on its GPUs; raises ``PlanError`` naming an
    invalid field.

    Between samples, seconds are interpolated linearly in the logarithms of degree, quota and
    seconds. This is exact at samples, and everywhere if scaling is ideal (seconds ~ 1 / (degree *
    quota)). It is also monotonic where the samples are, in both directions at once; cubic pieces
    could cross.

    Attributes:
        degrees: (D,) sampled data-parallel degrees, increasing (powers of two in the paper).
        quotas: (A,) sampled quotas in steps, increasing, from 1 to ``steps``.
        steps: steps per GPU, e.g. 10 for tenths.
        seconds: (D, A) seconds of one iteration.
        memory_bytes: (D,) bytes of a replica on its GPU.
        bandwidth: (A,) B(m, a): share of a GPU's memory bandwidth in use, 0 to 1.
    """

    name: str
    degrees: tuple[int, ...]
    quotas: tuple[int, ...]
    steps: int
    seconds: tuple[tuple[float, ...], ...]
    memory_bytes: tuple[int, ...]
    bandwidth: tuple[float, ...]

    def __post_init__(self) -> None:
        name = text(self.name, "surface.name")
        whole(self.steps, f"{name}.steps", 1, MOST_STEPS)
        for field, most in (("degrees", None), ("quotas", self.steps)):
            values = items(getattr(self, field), f"{name}.{field}")
            for i, value in enumerate(values):
                whole(value, f"{name}.{field}[{i}]", 1, most)
            if not values or values != sorted(set(values)):
                raise PlanError(
                    f"{name}.{field} is {values}; it must be a non-empty list of increasing numbers"
                )
            object.__setattr__(self, field, tuple(values))
        rows = items(self.seconds, f"{name}.seconds")
        memory = items(self.memory_bytes, f"{name}.memory_bytes")
        bandwidth = items(self.bandwidth, f"{name}.bandwidth")
        for field, values, axis in (
            ("seconds", rows, "degrees"), ("memory_bytes", memory, "degrees"),
            ("bandwidth", bandwidth, "quotas"),
        ):
            if len(values) != len(getattr(self, axis)):
                raise PlanError(
                    f"{name}.{field} has {len(values)} entries; it must have one for each of the "
                    f"{len(getattr(self, axis))} {axis}"
                )
        checked = []
        for i, row in enumerate(rows):
            row = items(row, f"{name}.seconds[{i}]")
            if len(row) != len(self.quotas):
                raise PlanError(
                    f"{name}.seconds[{i}] has {len(row)} entries; it must have one for each of "
                    f"the {len(self.quotas)} quotas"
                )
            checked.append(tuple(
                number(value, f"{name}.seconds[{i}][{j}]", 0.0, above=True)
                for j, value in enumerate(row)
            ))
        object.__setattr__(self, "seconds", tuple(checked))
        object.__setattr__(self, "memory_bytes", tuple(
            whole(value, f"{name}.memory_bytes[{i}]", 0, MOST_BYTES)
            for i, value in enumerate(memory)
        ))
        object.__setattr__(self, "bandwidth", tuple(
            number(value, f"{name}.bandwidth[{i}]", 0.0, 1.0) for i, value in enumerate(bandwidth)
        ))

    def seconds_at(self, degree: int, quota: int, steps: int | None = None) -> float:
        """Return T(d, a): seconds on ``degree`` GPUs with ``quota`` of ``steps`` each (by default
        the steps of the surface); raise ``PlanError`` outside the sampled range."""
        low, high, t = self._between_degrees(degree)
        lower, upper, s = self._between_quotas(quota, steps)
        if not s and not t:
            return self.seconds[low][lower]
        table = np.log(np.array(self.seconds)[np.ix_((low, high), (lower, upper))])
        row = (1 - t) * table[0] + t * table[1]
        return float(np.exp((1 - s) * row[0] + s * row[1]))

    def bandwidth_at(self, quota: int, steps: int | None = None) -> float:
        """Return B(m, a), linear between samples; raise ``PlanError`` outside the sampled range."""
        lower, upper, _ = self._between_quotas(quota, steps)
        if lower == upper:
            return self.bandwidth[lower]
        a = quota * self.steps / (self.steps if steps is None else steps)
        s = (a - self.quotas[lower]) / (self.quotas[upper] - self.quotas[lower])
        return (1 - s) * self.bandwidth[lower] + s * self.bandwidth[upper]

    def memory_at(self, degree: int) -> int:
        """Return the bytes of a replica; between sampled degrees, the larger of the two
        neighbours."""
        low, high, _ = self._between_degrees(degree)
        return max(self.memory_bytes[low], self.memory_bytes[high])

    def _between_degrees(self, degree: int) -> tuple[int, int, float]:
        whole(degree, f"degree of {self.name}", self.degrees[0], self.degrees[-1])
        return _bracket(np.log(degree), np.log(self.degrees))

    def _between_quotas(self, quota: int, steps: int | None) -> tuple[int, int, float]:
        steps = whole(self.steps if steps is None else steps, "steps", 1)
        whole(quota, f"quota of {self.name}", 1, steps)
        # In units of 1 / (steps * self.steps), so that sampled quotas are matched exactly.
        target, samples = quota * self.steps, [q * steps for q in self.quotas]
        if not samples[0] <= target <= samples[-1]:
            raise PlanError(
                f"quota of {self.name} is {quota}/{steps}; sampled quotas are {self.quotas[0]} to "
                f"{self.quotas[-1]} of {self.steps}"
            )
        return _bracket(np.log(target), np.log(samples))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any, where: str = "surface") -> ScalingSurface:
        """Return the surface of a dict; raise ``PlanError`` naming an invalid field."""
        return cls(**members(data, where, [field.name for field in fields(cls)]))


def _bracket(x: float, samples: np.ndarray) -> tuple[int, int, float]:
    """Return the neighbouring samples of x and its relative position between them; at a sample,
    return it twice and 0."""
    high = int(np.searchsorted(samples, x))
    if high < len(samples) and samples[high] == x:
        return high, high, 0.0
    low = high - 1
    return low, high, float((x - samples[low]) / (samples[high] - samples[low]))


@dataclass(frozen=True)
class SurfaceConditions:
    """Conditions under which surfaces were measured, and for which alone they are valid; raises
    ``PlanError`` naming an invalid field.

    Attributes:
        device: device name of the driver.
        precision: ``"fp32"`` or ``"bf16"``.
        tokens: tokens per sample, by module.
    """

    batch: int
    device: str
    precision: str
    tokens: Mapping[str, int]

    def __post_init__(self) -> None:
        whole(self.batch, "measured.batch", 1)
        text(self.device, "measured.device")
        text(self.precision, "measured.precision")
        if not isinstance(self.tokens, dict):
            raise PlanError(f"measured.tokens is {shown(self.tokens)}; it must be an object")
        for name, count in self.tokens.items():
            whole(count, f"measured.tokens.{name}", 1)

    def check(
        self, batch: int | None = None, precision: str | None = None,
        tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Raise ``PlanError`` if the surfaces were measured under other conditions; None skips a
        condition. ``batch`` counts samples, ``tokens`` counts tokens per sample by module."""
        named = {"batch": (batch, self.batch), "precision": (precision, self.precision)}
        for module, requested in (tokens or {}).items():
            named[f"tokens.{module}"] = requested, self.tokens.get(module)
        for field, (requested, measured) in named.items():
            if requested is not None and requested != measured:
                raise PlanError(
                    f"{field} is {requested!r:.80}, but the surfaces were measured with "
                    f"{measured!r} "
                    "and are not valid for other values; use that value or measure new surfaces"
                )


def surfaces_to_json(
    surfaces: Sequence[ScalingSurface], measured: SurfaceConditions | None = None
) -> str:
    """Return the text of a surfaces file."""
    about = {} if measured is None else {"measured": asdict(measured)}
    modules = [surface.to_dict() for surface in surfaces]
    return json.dumps({"format": SURFACES_FORMAT, **about, "surfaces": modules}, indent=2)


def conditions_from_json(source: str) -> SurfaceConditions | None:
    """Return the conditions in a surfaces file, or None; raise ``PlanError`` naming an invalid
    field."""
    data = parsed(source, "surfaces file", SURFACES_FORMAT, ("surfaces",), ("measured",))
    if "measured" not in data:
        return None
    names = [field.name for field in fields(SurfaceConditions)]
    return SurfaceConditions(**members(data["measured"], "measured", names))


def surfaces_from_json(source: str) -> tuple[ScalingSurface, ...]:
    """Return the surfaces of a surfaces file; raise ``PlanError`` naming an invalid field."""
    data = parsed(source, "surfaces file", SURFACES_FORMAT, ("surfaces",), ("measured",))
    surfaces = tuple(
        ScalingSurface.from_dict(entry, f"surfaces[{i}]")
        for i, entry in enumerate(items(data["surfaces"], "surfaces"))
    )
    names = [surface.name for surface in surfaces]
    if len(set(names)) != len(names):
        raise PlanError(f"surfaces[].name must differ, got {names}")
    return surfaces
