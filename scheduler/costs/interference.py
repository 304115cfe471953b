"""Interference between colocated modules: eq. 7 and 8 of Mosaic §3.3, and their fit.

The delay of a module on GPU g is ``e1 + e2 * sum(B) + e3 * prod(B)`` over the bandwidth use B of
all modules on g, including itself; the largest delay over its GPUs counts. A module without
neighbours has no delay, because its surface was measured that way.

The product decreases when a third module joins, which contention never does. As an alternative that
is not in the paper, ``coupling="own"`` multiplies e3 by ``B(m) * (sum(B) - B(m))``: the bus use of
m times that of the others. With two modules on a GPU both are the same; with more, prefer ``"own"``
(`benchmarks.mapping_solver` has the errors of both).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.graph.strict_json import items, number, parsed

INTERFERENCE_FORMAT = 1
UNITS = ("relative", "seconds")
COUPLINGS = ("product", "own")
FORMS = ("blind", "additive", "full")
# Larger coefficients are meaningless, and sums and products could overflow floats.
MOST_COEFFICIENT = 1e9
FIT_ROUNDS = 20
FIT_CONVERGED = 1e-6
# A fit replaces another only if its sum of squares is lower by at least this fraction.
FIT_BETTER = 0.1


@dataclass(frozen=True)
class Interference:
    """Coefficients of eq. 8; raises ``PlanError`` naming an invalid field.

    Attributes:
        constant, additive, product: e1, e2, e3.
        unit: ``"seconds"``, as in eq. 7, where all modules on a GPU have the same delay, or
            ``"relative"``, where the delay is a fraction of the module's time alone. Contention
            slows a kernel down by a factor, so a module that runs ten times as long loses ten times
            as much, which no coefficients in ``"seconds"`` express.
        coupling: factor of e3: ``"product"`` of all bandwidths, as in eq. 8, or ``"own"`` bandwidth
            times the sum of the others.
    """

    constant: float = 0.0
    additive: float = 0.0
    product: float = 0.0
    unit: str = "relative"
    coupling: str = "product"

    def __post_init__(self) -> None:
        for name in ("constant", "additive", "product"):
            value = number(
                getattr(self, name), f"interference.{name}", -MOST_COEFFICIENT, MOST_COEFFICIENT
            )
            object.__setattr__(self, name, value)
        for name, accepted in (("unit", UNITS), ("coupling", COUPLINGS)):
            if getattr(self, name) not in accepted:
                raise PlanError(
                    f"interference.{name} is {getattr(self, name)!r:.80}; accepted: "
                    f"{', '.join(accepted)}"
                )

    @property
    def blind(self) -> bool:
        """True if modules never disturb each other in this model."""
        return not (self.constant or self.additive or self.product)

    def delay(self, own: float, others: Sequence[float]) -> float:
        """Return the delay of eq. 8 for a module on a GPU with these bandwidth shares: never
        negative, and 0 without others. Sums are in the given order; use one order for exact
        comparisons."""
        if not others:
            return 0.0
        _, total, coupled = self.terms(own, others)
        return max(0.0, self.constant + self.additive * total + self.product * coupled)

    def terms(self, own: float, others: Sequence[float]) -> tuple[float, float, float]:
        """Return the factors of e1, e2 and e3."""
        total = math.fsum(others)
        coupled = own * (math.prod(others) if self.coupling == "product" else total)
        return 1.0, own + total, coupled

    def seconds(self, alone: float, delay: float) -> float:
        """Return the time of a module (eq. 7) from its time alone and its largest delay over
        GPUs."""
        return alone + delay * (alone if self.unit == "relative" else 1.0)

    def colocated(self, alone: float, on_gpus: Iterable[Sequence[float]]) -> float:
        """Return the seconds of a module next to others (eq. 7 and 8). ``alone`` is its time on its
        surface; ``on_gpus`` has the bandwidths of all modules on each of its GPUs, its own
        first."""
        return self.seconds(alone, max(self.delay(use[0], use[1:]) for use in on_gpus))

    def to_json(self) -> str:
        return json.dumps({"format": INTERFERENCE_FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, source: str) -> Interference:
        """Parse the text of an interference file; raise ``PlanError`` naming an invalid field."""
        names = [field.name for field in fields(cls)]
        data = parsed(source, "interference file", INTERFERENCE_FORMAT, names)
        return cls(**{name: data[name] for name in names})


@dataclass(frozen=True)
class Colocation:
    """Measurement of one module next to others; raises ``PlanError`` naming an invalid field.

    Attributes:
        alone: seconds on its surface at the same degree and quota.
        bandwidths: B of all modules on each of its GPUs, its own first.
        seconds: measured seconds.
    """

    alone: float
    bandwidths: tuple[tuple[float, ...], ...]
    seconds: float

    def __post_init__(self) -> None:
        number(self.alone, "colocation.alone", 0.0, above=True)
        number(self.seconds, "colocation.seconds", 0.0, above=True)
        groups = items(self.bandwidths, "colocation.bandwidths")
        groups = [items(on_gpu, f"colocation.bandwidths[{g}]") for g, on_gpu in enumerate(groups)]
        if not groups or not all(groups):
            raise PlanError(
                f"colocation.bandwidths is {groups}; it must have at least one GPU, and at least "
                "the module itself on each"
            )
        object.__setattr__(self, "bandwidths", tuple(map(tuple, groups)))
        for g, group in enumerate(groups):
            for value in group:
                number(value, f"colocation.bandwidths[{g}]", 0.0, 1.0)


@dataclass(frozen=True)
class InterferenceFit:
    """Fitted coefficients and the quality of their predictions.

    Attributes:
        form: ``"blind"``, ``"additive"`` (e3 = 0) or ``"full"``.
        samples: number of colocations with at least two modules on a GPU.
        r2: coefficient of determination of the delay, in the model's unit. 0 is as good as the mean
            delay; the blind model is below 0.
        error, worst_error: mean and largest ``|predicted / measured - 1|`` of seconds.
    """

    model: Interference
    form: str
    samples: int
    r2: float
    error: float
    worst_error: float


def fit_interference(
    samples: Sequence[Colocation], form: str = "full", unit: str = "relative",
    coupling: str = "product",
) -> InterferenceFit:
    """Fit coefficients by least squares of the relative error of seconds.

    Squares are weighted by one over the predicted seconds (at first over the measured seconds),
    because noise and the relevant error are relative. Without weights, the longest modules would
    decide the coefficients.

    The coefficients decide which of a module's GPUs has the largest delay, so the fit is repeated
    until nothing changes. The result depends on the initial choice of GPUs, and the iteration may
    cycle through coefficients of wrong signs. A full model is therefore fitted from two starts, the
    GPU with the largest sum and the GPU with the largest product, and the better fit is kept.
    Modules that are alone on all their GPUs are ignored: their delay is 0 by definition.

    Raises:
        PlanError: an unknown form or unit, or fewer colocations than coefficients.
    """
    if form not in FORMS:
        raise PlanError(f"form is {form!r:.80}; accepted: {', '.join(FORMS)}")
    shared = [s for s in samples if any(len(group) > 1 for group in s.bandwidths)]
    columns = FORMS.index(form) + 1 if form != "blind" else 0
    if len(shared) < max(columns, 1):
        raise PlanError(
            f"samples has {len(shared)} colocations of at least two modules; a {form} model needs "
            f"at least {max(columns, 1)}"
        )
    starts = [_worst_groups(shared, lambda g: (len(g) > 1, math.fsum(g)))]
    if form == "full":
        law = Interference(coupling=coupling)
        starts.append(_worst_groups(shared, lambda g: (len(g) > 1, law.terms(g[0], g[1:])[2])))
    model, missed = Interference(unit=unit, coupling=coupling), math.inf
    for worst in starts if columns else ():
        fitted = _fit_from(worst, shared, columns, unit, coupling)
        relative = math.fsum(
            (fitted.colocated(s.alone, s.bandwidths) / s.seconds - 1) ** 2 for s in shared
        )
        # If both starts end in the same fit, rounding must not decide.
        if relative < missed * (1 - FIT_BETTER):
            model, missed = fitted, relative
    return report(model, shared, form)


def _worst_groups(
    samples: Sequence[Colocation], key: Callable[[tuple[float, ...]], Any]
) -> list[tuple[float, ...]]:
    """Return the bandwidths on the GPU with the largest ``key``, for every sample."""
    return [max(sample.bandwidths, key=key) for sample in samples]


def _fit_from(
    worst: list[tuple[float, ...]], samples: Sequence[Colocation], columns: int, unit: str,
    coupling: str,
) -> Interference:
    """Fit the first ``columns`` coefficients of eq. 8, starting with these GPUs as the worst
    ones."""
    model = Interference(unit=unit, coupling=coupling)
    scale = np.array([s.alone if unit == "relative" else 1.0 for s in samples])
    measured = np.array([s.seconds - s.alone for s in samples]) / scale
    expected = np.array([s.seconds for s in samples])
    for _ in range(FIT_ROUNDS):
        design = np.array([model.terms(g[0], g[1:]) for g in worst])[:, :columns]
        weights = scale / expected
        solution = np.linalg.lstsq(design * weights[:, None], measured * weights, rcond=None)[0]
        weighed = [*(float(x) for x in solution), *[0.0] * (3 - columns)]
        model = Interference(*weighed, unit=unit, coupling=coupling)
        previous, last = worst, expected
        delay = model.delay
        worst = _worst_groups(samples, lambda g, delay=delay: delay(g[0], g[1:]))
        expected = np.array([
            model.seconds(s.alone, delay(g[0], g[1:])) for s, g in zip(samples, worst, strict=True)
        ])
        if worst == previous and np.allclose(expected, last, rtol=FIT_CONVERGED, atol=0.0):
            break
    return model


def report(model: Interference, samples: Sequence[Colocation], form: str) -> InterferenceFit:
    """Return how well coefficients predict colocations, which need not be those of the fit; raise
    ``PlanError`` if there are none."""
    if not samples:
        raise PlanError("samples is empty; it must have at least one colocation")
    alone = np.array([s.alone for s in samples])
    seconds = np.array([s.seconds for s in samples])
    predicted = np.array([model.colocated(s.alone, s.bandwidths) for s in samples])
    scale = alone if model.unit == "relative" else np.ones(len(samples))
    delay, error = (seconds - alone) / scale, np.abs(predicted / seconds - 1)
    spread = float(((delay - delay.mean()) ** 2).sum())
    missed = float((((seconds - predicted) / scale) ** 2).sum())
    r2 = 1 - missed / spread if spread else (1.0 if missed == 0 else -math.inf)
    return InterferenceFit(
        model, form, len(samples), r2, float(error.mean()), float(error.max())
    )


def colocations_to_json(samples: Sequence[Colocation]) -> str:
    return json.dumps({"format": INTERFERENCE_FORMAT, "colocations": [
        {"alone": s.alone, "bandwidths": s.bandwidths, "seconds": s.seconds} for s in samples
    ]}, indent=2)
