"""Degrees of tensor, context and data parallelism that planning may use for each module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymm.actors.sharding.tensor_plan import TensorPlan, tensor_plan
from raymm.errors import PlanError, ProbeError
from raymm.model.model import Model
from raymm.plural import plural
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.module_degrees import KINDS, DegreeChoices, degrees_of

# With fewer tokens of a microbatch per process, context parallelism costs more than it saves.
LEAST_TOKENS = 1024
_ENTRY = re.compile(r"(?:(?P<module>\w+)\.)?(?P<kind>tp|cp|dp)(?:=(?P<number>\d+))?")
Refused = tuple[str, str, int]
"""(module, kind of parallelism, degree)."""


@dataclass(frozen=True)
class DegreeRequest:
    """Degrees that the search may use.

    Attributes:
        most: highest degree by kind; None for no limit. Kinds that are absent are not used.
        fixed: required degree by (module, kind).
    """

    most: Mapping[str, int | None]
    fixed: Mapping[tuple[str, str], int]

    @classmethod
    def of(cls, degrees: str | Sequence[str]) -> DegreeRequest:
        """Parse a request for degrees.

        Args:
            degrees: ``"auto"`` to search all kinds, ``"none"`` to search none, or a list (or a
                comma-separated string) of entries. ``tp``, ``cp`` and ``dp`` allow a kind, ``tp=4``
                limits its degree, and ``llm.tp=4`` fixes the degree of one module.

        Raises:
            PlanError: an entry has none of these forms.
        """
        entries = degrees.split(",") if isinstance(degrees, str) else list(degrees)
        entries = [entry.strip() for entry in entries]
        if entries == ["auto"]:
            return cls(dict.fromkeys(KINDS), {})
        if entries == ["none"]:
            return cls({}, {})
        most: dict[str, int | None] = {}
        fixed: dict[tuple[str, str], int] = {}
        for entry in entries:
            match = _ENTRY.fullmatch(entry)
            number = int(match["number"]) if match and match["number"] else None
            if not match or number == 0 or (match["module"] and number is None):
                raise PlanError(
                    f"degrees has {entry!r}; accepted: auto, none, or a list of tp, cp, dp, each "
                    "optionally with a maximum degree (tp=4) or a fixed degree for one module "
                    "(llm.tp=4)"
                )
            if match["module"] and number is not None:
                fixed[match["module"], match["kind"]] = number
            else:
                most[match["kind"]] = number
        return cls(most, fixed)

    def __bool__(self) -> bool:
        return bool(self.most or self.fixed)

    def check(self, modules: Sequence[str]) -> None:
        """Check that the model has all modules of the request. Raises PlanError if it does not."""
        for module, kind in self.fixed:
            if module not in modules:
                raise PlanError(
                    f"degrees has {module}.{kind}; the model's modules are {', '.join(modules)}"
                )

    def choices(
        self, model: Model, devices: int, num_microbatches: int,
        tokens: Mapping[str, int], refused: frozenset[Refused] = frozenset(),
    ) -> dict[str, DegreeChoices]:
        """Return the degrees that each module may have.

        Degrees are powers of two up to ``devices``. ``tp`` must split heads and feed-forwards
        evenly, ``cp`` must leave each process at least :data:`LEAST_TOKENS` tokens, and ``dp`` must
        divide the microbatches. A fixed degree only has to divide the microbatches and be supported
        by the model's code. ``refused`` comes from :func:`refused_degrees`.

        Raises:
            PlanError: a fixed degree is not possible.
        """
        choices = {}
        for module in model.module_names:
            allowed = {
                kind: tuple(
                    degree for degree in self._degrees(module, kind, devices)
                    if (module, kind, degree) not in refused
                )
                for kind in KINDS
            }
            if (module, "cp") not in self.fixed:
                most = max(1, tokens.get(module, 0) // LEAST_TOKENS)
                allowed["cp"] = tuple(n for n in allowed["cp"] if n <= most)
            allowed["dp"] = tuple(n for n in allowed["dp"] if num_microbatches % n == 0)
            if (module, "tp") not in self.fixed:
                allowed["tp"] = tuple(n for n in allowed["tp"] if _divides(model, module, n))
            for kind, degrees in allowed.items():
                if not degrees:
                    raise PlanError(
                        f"degrees has {module}.{kind}={self.fixed[module, kind]}, which "
                        + (
                            f"does not divide {plural(num_microbatches, 'microbatch', 'es')}"
                            if kind == "dp"
                            else "the model's code does not allow"
                        )
                    )
            for degree in allowed["tp"]:
                if (module, "tp") in self.fixed and degree > 1:
                    _tensor_plan(model, module, degree)
            choices[module] = DegreeChoices(**allowed)
        return choices

    def _degrees(self, module: str, kind: str, devices: int) -> Iterator[int]:
        if (module, kind) in self.fixed:
            yield self.fixed[module, kind]
            return
        yield 1
        most = self.most.get(kind, 1)
        degree = 2
        while degree <= (devices if most is None else min(most, devices)):
            yield degree
            degree *= 2


def _divides(model: Model, module: str, tp: int) -> bool:
    """Return True if every process gets its own shard of the heads and feed-forwards."""
    if tp == 1:
        return True
    try:
        plan = _tensor_plan(model, module, tp)
    except PlanError:
        return False
    copied = any(plan.is_replica(name, rank) for name in plan.shards for rank in range(tp))
    return bool(plan.shards) and not copied


def _tensor_plan(model: Model, module: str, tp: int) -> TensorPlan:
    return tensor_plan(model.spec(module).source, tp, module)


def refused_degrees(model: Model, plan: Plan) -> dict[Refused, str]:
    """Return the degrees of a plan that the model's code does not support, with the reason. Each is
    tried on a small replica of the model, as when a run starts."""
    refused: dict[Refused, str] = {}
    for node in plan.graph.nodes:
        name, degrees = node.name, degrees_of(plan, node.name)
        module = model.module(name)
        if degrees.cp > 1:
            try:
                module.share_tokens(module.spec)
            except (ProbeError, PlanError) as error:
                for degree in range(2, plan.num_processes + 1):
                    refused[name, "cp", degree] = str(error)
        if degrees.tp > 1:
            try:
                module.tensor_plan(module.spec, degrees.tp)
            except (ProbeError, PlanError) as error:
                refused[name, "tp", degrees.tp] = str(error)
    return refused
