"""Creation of callbacks from their names in a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raymm.callbacks.callback import Callback
from raymm.errors import USER_CODE_RAISES, ConfigError, ModelError
from raymm.packages import import_object

LOGGERS = {
    "tensorboard": "raymm.callbacks.tensorboard:TensorBoardCallback",
    "wandb": "raymm.callbacks.wandb:WandbCallback",
    "mlflow": "raymm.callbacks.mlflow:MLflowCallback",
}


# Callback of every run.
RAY_METRICS = "raymm.callbacks.ray_metrics:RayMetrics"


def run_callbacks(
    entries: Sequence[str | Mapping[str, Mapping[str, Any]]], others: Sequence[Callback]
) -> tuple[Callback, ...]:
    """Create the callbacks of a run in their order: the metrics of Ray, those of ``run.callbacks``
    (see :func:`named_callbacks`), and others."""
    return (import_object(RAY_METRICS)(), *named_callbacks(entries), *others)


def named_callbacks(entries: Sequence[str | Mapping[str, Mapping[str, Any]]]) -> list[Callback]:
    """Create the callbacks of ``run.callbacks``.

    Args:
        entries: a name of :data:`LOGGERS`, or ``module:Class`` of a custom :class:`Callback`; with
            arguments as ``{name: {argument: value}}``.

    Raises:
        ConfigError: names an entry with an unknown callback, invalid arguments, or a missing
            package.
    """
    return [_named(f"run.callbacks[{i}]", entry) for i, entry in enumerate(entries)]


def _named(field: str, entry: str | Mapping[str, Mapping[str, Any]]) -> Callback:
    if isinstance(entry, str):
        name, arguments = entry, {}
    else:
        if len(entry) != 1:
            raise ConfigError(f"{field} has {len(entry)} names; accepted: one, with its arguments")
        (name, arguments), = entry.items()
    if name in LOGGERS:
        target = import_object(LOGGERS[name])
    elif ":" in name:
        try:
            target = import_object(name)
        except ModelError as error:
            raise ConfigError(f"{field}: {error}") from None
    else:
        raise ConfigError(
            f"{field} is {name!r}; accepted: {', '.join(LOGGERS)}, or module:Class for a custom one"
        )
    if not (isinstance(target, type) and issubclass(target, Callback)):
        raise ConfigError(f"{field}: {name!r} is not a subclass of raymm.Callback")
    try:
        return target(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    except USER_CODE_RAISES as error:
        raise ConfigError(
            f"{field}: {name} with {dict(arguments)} raised {type(error).__name__}: {error}"
        ) from error
