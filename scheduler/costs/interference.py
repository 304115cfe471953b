"""What colocated modules cost each other: eq. 7 and 8 of Mosaic §3.3, and fitting them.

A module's delay on GPU g is ``e1 + e2 * sum(B) + e3 * prod(B)`` over the bandwidth use B of all
modules on g, itself included; the worst of its GPUs counts. A module alone has none: that is how
its surface was measured.

The product falls when a third module joins, which no contention does. As an alternative of this
code's own, ``coupling="own"`` puts ``e3 * B(m) * (sum(B) - B(m))`` in its place: how often m uses
the bus, times how much the others do. With two modules on a GPU both are the same; with more,
prefer ``"own"`` (`benchmarks.mapping_solver` has the errors of both).
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
# Nothing waits a billion times as long; beyond, sums and products leave the range of floats.
MOST_COEFFICIENT = 1e9
FIT_ROUNDS = 20
FIT_CONVERGED = 1e-6
# By this share at least a fit misses fewer squares than another, to be kept instead of it.
FIT_BETTER = 0.1


@dataclass(frozen=True)
class Interference:
    """Coefficients of eq. 8.

    Attributes:
        constant, additive, product: e1, e2, e3.
        unit: ``"seconds"`` as eq. 7 has it, where every module on a GPU waits the same time;
            ``"relative"``: the delay is a share of the module's time alone. Contention slows a
            kernel down by a factor, so a module that runs ten times as long loses ten times as
            much; with ``seconds`` one set of coefficients cannot say that.
        coupling: what e3 multiplies: ``"product"`` of all, as in eq. 8, or ``"own"`` use times
            that of the others.

    Raises:
        PlanError: naming the field that does not fit.
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
        """Whether it says that modules never disturb each other."""
        return not (self.constant or self.additive or self.product)

    def delay(self, own: float, others: Sequence[float]) -> float:
        """Eq. 8 for a module on a GPU where it and others use these shares of the bandwidth.

        Never below 0, and 0 without others. Sums go in the order given; use one order to
        compare exactly.
        """
        if not others:
            return 0.0
        _, total, coupled = self.terms(own, others)
        return max(0.0, self.constant + self.additive * total + self.product * coupled)

    def terms(self, own: float, others: Sequence[float]) -> tuple[float, float, float]:
        """What e1, e2 and e3 multiply."""
        rest = math.fsum(others)
        coupled = own * (math.prod(others) if self.coupling == "product" else rest)
        return 1.0, own + rest, coupled

    def seconds(self, alone: float, delay: float) -> float:
        """Eq. 7: a module's time from that alone and the delay on the worst of its GPUs."""
        return alone + delay * (alone if self.unit == "relative" else 1.0)

    def colocated(self, alone: float, on_gpus: Iterable[Sequence[float]]) -> float:
        """Eq. 7 and 8: seconds of a module beside others.

        Args:
            alone: its seconds by its surface, at the same degree and quota.
            on_gpus: for each of its GPUs the bandwidths of all modules there, its own first.
        """
        return self.seconds(alone, max(self.delay(use[0], use[1:]) for use in on_gpus))

    def to_json(self) -> str:
        """As a file's text."""
        return json.dumps({"format": INTERFERENCE_FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, source: str) -> Interference:
        """From such a text.

        Raises:
            PlanError: naming the field that does not fit.
        """
        names = [field.name for field in fields(cls)]
        data = parsed(source, "interference file", INTERFERENCE_FORMAT, names)
        return cls(**{name: data[name] for name in names})


@dataclass(frozen=True)
class Colocation:
    """A measurement of one module beside others.

    Attributes:
        alone: seconds by its surface at the same degree and quota.
        bandwidths: for each of its GPUs, B of all modules there, its own first.
        seconds: measured.

    Raises:
        PlanError: naming the field that does not fit.
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
    """Fitted coefficients and how well they predict.

    Attributes:
        model: the coefficients.
        form: ``"blind"``, ``"additive"`` (e3 = 0) or ``"full"``.
        samples: colocations with at least two modules on a GPU.
        r2: coefficient of determination of the delay, in the model's unit; 0 is no better than
            its mean, the blind model's is below 0.
        error, worst_error: mean and largest of ``|predicted / measured - 1|`` of seconds.
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
    """Coefficients by least squares of the relative error of seconds.

    Noise of measurements is relative, and so is the error that counts: squares are weighted by one
    over the predicted seconds (over the measured at first). Not weighted, the longest modules
    would decide the coefficients. Which of a module's GPUs is the worst depends on the
    coefficients, so it is fitted again until nothing changes. Where that ends depends on which were
    taken to be the worst at first (it may go round in circles, with coefficients of wrong signs):
    a full model is fitted from two beginnings, the GPU with the largest sum and the one with the
    largest product, and the fit that misses less is kept. Modules that are alone on all their GPUs
    are left out: their delay is 0 by definition.

    Args:
        samples: measured colocations.
        form: ``"blind"``, ``"additive"`` or ``"full"``.
        unit: ``"relative"`` or ``"seconds"``.
        coupling: ``"product"`` or ``"own"``.

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
        # Where both ends are the same, rounding does not decide.
        if relative < missed * (1 - FIT_BETTER):
            model, missed = fitted, relative
    return report(model, shared, form)


def _worst_groups(
    samples: Sequence[Colocation], key: Callable[[tuple[float, ...]], Any]
) -> list[tuple[float, ...]]:
    """Of every sample the GPU that ``key`` puts highest."""
    return [max(sample.bandwidths, key=key) for sample in samples]


def _fit_from(
    worst: list[tuple[float, ...]], samples: Sequence[Colocation], columns: int, unit: str,
    coupling: str,
) -> Interference:
    """The fit that begins with these GPUs as the worst ones; ``columns`` coefficients of eq. 8."""
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
        before, last = worst, expected
        delay = model.delay
        worst = _worst_groups(samples, lambda g, delay=delay: delay(g[0], g[1:]))
        expected = np.array([
            model.seconds(s.alone, delay(g[0], g[1:])) for s, g in zip(samples, worst, strict=True)
        ])
        if worst == before and np.allclose(expected, last, rtol=FIT_CONVERGED, atol=0.0):
            break
    return model


def report(model: Interference, samples: Sequence[Colocation], form: str) -> InterferenceFit:
    """How well coefficients predict the given colocations, e.g. some that were not fitted.

    Args:
        model: the coefficients.
        samples: measured colocations.
        form: ``"blind"``, ``"additive"`` or ``"full"``.

    Raises:
        PlanError: there are none.
    """
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
    """Measurements as a file's text."""
    return json.dumps({"format": INTERFERENCE_FORMAT, "colocations": [
        {"alone": s.alone, "bandwidths": s.bandwidths, "seconds": s.seconds} for s in samples
    ]}, indent=2)
