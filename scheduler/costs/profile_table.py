"""Measured costs at several lengths, interpolated to a cost profile at any length."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import (
    NUMBERS,
    CostProfile,
    LayerBytes,
    LayerCost,
)
from raymm.scheduler.costs.recomputation import LayerOption
from raymm.scheduler.graph.strict_json import json_value

TABLE_FORMAT = 1
_INTEGER_FIELDS = (
    "activation_bytes", "parameter_bytes", "output_bytes", "replicated_bytes", "key_value_bytes",
    "working_bytes", "forward_bytes", "data_bytes", "base_bytes", "expert_bytes", "exchange_bytes",
    "few_bytes", "few_heads", "tied_bytes",
)
# Older tables lack these fields.
_OPTIONAL_FIELDS = (
    "replicated_bytes", "key_value_bytes", "working_bytes", "forward_bytes", "data_bytes",
    "base_bytes", "moments", "in_bf16", "copied", "quantised", "expert_bytes", "exchange_bytes",
    "few_bytes", "few_heads", "tied_bytes", "options", "halved",
)


@dataclass(frozen=True)
class Measurement:
    """Costs of a module's layers for one microbatch of ``tokens`` tokens, including padding, in
    ``samples`` sequences (for an encoder: items)."""

    tokens: int
    samples: int
    layers: tuple[LayerCost, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name} is {value!r}; it must be a whole number above 0")
        if not self.layers:
            raise PlanError("layers is empty; a module has at least one")


@dataclass(frozen=True)
class ProfileTable:
    """Measurements of every module of a model on one kind of device; raises ``PlanError`` naming an
    invalid field.

    Attributes:
        modules: measurements in the order of increasing ``tokens``, by module.
        default: ``tokens`` of a typical microbatch of the run, by module.
        device, dtype, versions: as in :class:`raymm.scheduler.costs.layer_costs.CostProfile`.
        date: date of the measurement, ISO 8601.
    """

    modules: Mapping[str, tuple[Measurement, ...]]
    default: Mapping[str, int]
    device: str = "unknown"
    dtype: str = "fp32"
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise PlanError(f"dtype is {self.dtype!r}; accepted: fp32, bf16")
        for name, rows in self.modules.items():
            if not rows:
                raise PlanError(f"modules.{name} is empty; it needs at least one measurement")
            tokens = [row.tokens for row in rows]
            if tokens != sorted(set(tokens)):
                raise PlanError(f"tokens of modules.{name} are {tokens}; they must increase")
            counts = {len(row.layers) for row in rows}
            if len(counts) > 1:
                raise PlanError(
                    f"modules.{name} has measurements of {sorted(counts)} layers; all must have "
                    "the same number"
                )
        if set(self.default) != set(self.modules):
            raise PlanError(
                f"default has modules {sorted(self.default)}; it must have exactly "
                f"{sorted(self.modules)}"
            )

    def at(
        self, tokens: Mapping[str, int] | None = None, extrapolate: bool = False
    ) -> CostProfile:
        """Return the profile of a microbatch.

        Numbers between two measured lengths are interpolated linearly. (Attention time is
        quadratic, so the line lies above it: by at most a quarter of the increase of the attention
        time from one measured length to the next, divided by their ratio. Measure closer lengths
        where that matters.)

        Args:
            tokens: tokens of the whole microbatch, by module; by default those of ``default``.
            extrapolate: True to extend the line through the two nearest measurements (or through
                one and zero) to lengths outside the measured range, instead of raising.

        Raises:
            PlanError: unknown module, invalid length, or a length outside the measured range.
        """
        tokens = dict(tokens or {})
        if unknown := set(tokens) - set(self.modules):
            raise PlanError(
                f"tokens name {sorted(unknown)}; the table has {sorted(self.modules)}"
            )
        lengths = {name: tokens.get(name, self.default[name]) for name in self.modules}
        modules = {
            name: self._layers(name, lengths[name], extrapolate) for name in self.modules
        }
        fixed = {name: self._fixed(name, length) for name, length in lengths.items()}
        return CostProfile(
            modules, self.device, self.dtype, "measured", lengths, dict(self.versions),
            fixed={name: fraction for name, fraction in fixed.items() if fraction},
        )

    def _layers(self, name: str, tokens: int, extrapolate: bool) -> tuple[LayerCost, ...]:
        if type(tokens) is not int or tokens < 1:
            raise PlanError(f"tokens of {name!r} is {tokens!r}; it must be a whole number >= 1")
        rows = self.modules[name]
        for row in rows:
            if row.tokens == tokens:
                return row.layers
        low, high = rows[0].tokens, rows[-1].tokens
        if not low < tokens < high and not extrapolate:
            measured = f"{low}" if low == high else f"{low} to {high}"
            raise PlanError(
                f"tokens of {name!r} is {tokens}, but {measured} were measured; profile more "
                "lengths, or extrapolate"
            )
        if len(rows) == 1:
            return tuple(_between(_nothing(c), c, tokens / high) for c in rows[0].layers)
        lower, upper = _nearest(rows, tokens)
        share = (tokens - lower.tokens) / (upper.tokens - lower.tokens)
        return tuple(
            _between(a, b, share) for a, b in zip(lower.layers, upper.layers, strict=True)
        )

    def _fixed(self, name: str, tokens: int) -> float:
        """Return the fraction of a module's seconds that a line through the two nearest
        measurements has at zero tokens; 0 for a single measurement."""
        rows = self.modules[name]
        if len(rows) == 1:
            return 0.0
        lower, upper = _nearest(rows, tokens)
        least, most = _seconds(lower), _seconds(upper)
        growth = (most - least) / (upper.tokens - lower.tokens)
        total = least + growth * (tokens - lower.tokens)
        return min(max(1 - growth * tokens / total, 0.0), 1.0) if total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"format": TABLE_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Any) -> ProfileTable:
        """Return the table of a dict made by :meth:`to_dict`; raise ``PlanError`` naming a field
        that is missing, unknown or of the wrong type."""
        _mapping(data, "the profile")
        if "format" not in data:
            raise PlanError("the profile lacks the key 'format'")
        if data["format"] != TABLE_FORMAT:
            raise PlanError(f"format is {data['format']!r}; accepted: {TABLE_FORMAT}")
        names = [f.name for f in fields(cls)]
        _keys(data, "the profile", ["format", *names], required=["modules", "default"])
        for name in ("device", "dtype", "date"):
            if name in data and not isinstance(data[name], str):
                raise PlanError(f"{name} is {data[name]!r}; it must be a string")
        for name in ("default", "versions"):
            _mapping(data.get(name, {}), name)
        modules = {}
        for name, rows in _mapping(data["modules"], "modules").items():
            where = f"modules.{name}"
            modules[name] = tuple(
                _measurement(row, f"{where}[{i}]") for i, row in enumerate(_list(rows, where))
            )
        for name, value in data["default"].items():
            if type(value) is not int or value < 1:
                raise PlanError(f"default.{name} is {value!r}; it must be a whole number >= 1")
        return cls(modules, **{n: data[n] for n in names if n != "modules" and n in data})

    @classmethod
    def from_json(cls, text: str) -> ProfileTable:
        return cls.from_dict(json_value(text, "the profile"))


def _nearest(rows: Sequence[Measurement], tokens: int) -> tuple[Measurement, Measurement]:
    """Return the two measurements around a length, or the two nearest to it."""
    index = next((i for i in range(1, len(rows)) if tokens < rows[i].tokens), len(rows) - 1)
    return rows[index - 1], rows[index]


def _seconds(row: Measurement) -> float:
    return sum(c.forward + c.backward_input + c.backward_weight for c in row.layers)


def _nothing(cost: LayerCost) -> LayerCost:
    """Return the cost of a layer for zero tokens: only its parameters remain."""
    return LayerCost(
        0.0, 0.0, 0.0, parameter_bytes=cost.parameter_bytes,
        replicated_bytes=cost.replicated_bytes, base_bytes=cost.base_bytes,
        moments=cost.moments, in_bf16=cost.in_bf16, copied=cost.copied, quantised=cost.quantised,
        expert_bytes=cost.expert_bytes, few_bytes=cost.few_bytes,
        few_heads=cost.few_heads, tied_bytes=cost.tied_bytes, options=_no_options(cost.options),
        halved=cost.halved and LayerBytes(0, 0, 0, _no_options(cost.halved.options)),
    )


def _no_options(options: Sequence[LayerOption]) -> tuple[LayerOption, ...]:
    return tuple(LayerOption(o.name, 0.0, 0, o.working_bytes and 0) for o in options)


def _between(a: LayerCost, b: LayerCost, share: float) -> LayerCost:
    """Interpolate from ``a`` at 0 to ``b`` at 1; results are never negative."""
    def between(start: float, end: float) -> float:
        return max(0.0, start + (end - start) * share)

    def options_between(
        starts: Sequence[LayerOption], ends: Sequence[LayerOption]
    ) -> tuple[LayerOption, ...]:
        pairs = [(start, end) for start in starts for end in ends if start.name == end.name]
        return tuple(
            LayerOption(
                start.name, between(start.seconds, end.seconds),
                round(between(start.nbytes, end.nbytes)),
                None if start.working_bytes is None or end.working_bytes is None
                else round(between(start.working_bytes, end.working_bytes)),
            )
            for start, end in pairs
        )

    values: dict[str, Any] = {}
    for name in NUMBERS:
        value = between(getattr(a, name), getattr(b, name))
        values[name] = round(value) if name in _INTEGER_FIELDS else value
    if a.halved and b.halved:
        values["halved"] = LayerBytes(
            round(between(a.halved.activation_bytes, b.halved.activation_bytes)),
            round(between(a.halved.working_bytes, b.halved.working_bytes)),
            round(between(a.halved.forward_bytes, b.halved.forward_bytes)),
            options_between(a.halved.options, b.halved.options),
        )
    return LayerCost(**values, options=options_between(a.options, b.options))


def _measurement(data: Any, where: str) -> Measurement:
    _keys(_mapping(data, where), where, [f.name for f in fields(Measurement)])
    layers = tuple(
        _layer(layer, f"{where}.layers[{i}]")
        for i, layer in enumerate(_list(data["layers"], f"{where}.layers"))
    )
    try:
        return Measurement(data["tokens"], data["samples"], layers)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _layer(data: Any, where: str) -> LayerCost:
    names = [f.name for f in fields(LayerCost)]
    _keys(
        _mapping(data, where), where, names,
        required=[name for name in names if name not in _OPTIONAL_FIELDS],
    )
    for name in NUMBERS:
        value = data.get(name, 0)
        kinds = int if name in _INTEGER_FIELDS else int | float
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise PlanError(f"{where}.{name} is {value!r}; it must be a number")
    _check_options(data.get("options", []), where)
    try:
        return LayerCost.from_dict(data)
    except (TypeError, PlanError) as error:
        raise PlanError(f"{where}: {error}") from None


def _check_options(data: Any, where: str) -> None:
    for number, option in enumerate(_list(data, f"{where}.options")):
        types = [type(value) for value in _list(option, f"{where}.options[{number}]")]
        # Older tables lack the working bytes of options.
        if types[:3] not in ([str, float, int], [str, int, int]) or types[3:] not in (
            [], [int], [type(None)],
        ):
            raise PlanError(
                f"{where}.options[{number}] is {option!r}; it must be [name, seconds, bytes, "
                "working bytes]"
            )


def _keys(
    data: Mapping[str, Any], where: str, accepted: Sequence[str], required: Sequence[str] = ()
) -> None:
    if unknown := sorted(set(data) - set(accepted)):
        raise PlanError(f"{where} has unknown keys {unknown}; accepted: {sorted(accepted)}")
    for name in required or accepted:
        if name not in data:
            raise PlanError(f"{where} lacks the key {name!r}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} is a {type(value).__name__}; it must be an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise PlanError(f"{where} is a {type(value).__name__}; it must be a list")
    return list(value)
