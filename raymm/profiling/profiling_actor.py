"""Actor that exists during one measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import PlanError

# Maximum seconds for all repeats of one measurement.
MEASURE_TIMEOUT_S = 3600.0


class ProfilingActor:
    """Actor for the length of a ``with`` block. Yields a function that calls it.

    Raises:
        PlanError: from a call that fails or times out. Names the measured object.
    """

    def __init__(self, kind: type, resources: RankResources, arguments: tuple, what: str) -> None:
        self._make = ray.remote(kind).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus,
            resources=dict(resources.custom) or None, max_restarts=0,
        )
        self._arguments, self._what = arguments, what

    def __enter__(self) -> Callable[..., Any]:
        self._actor = self._make.remote(*self._arguments)
        return self._ask

    def _ask(self, method: str, *arguments: Any, timeout: float = MEASURE_TIMEOUT_S) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except GetTimeoutError:
            raise PlanError(f"profiling {self._what!r}: no answer within {timeout:g} s") from None
        except RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            raise PlanError(
                f"profiling {self._what!r} failed: {type(cause).__name__}: {cause}"
            ) from error
        except RayError as error:  # the actor died, for example out of memory
            raise PlanError(f"profiling {self._what!r} failed: {error}") from error

    def __exit__(self, *error: object) -> None:
        ray.kill(cast(ActorHandle, self._actor), no_restart=True)
