"""Request and workload of planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.config.planning_options import PIPELINED, PlanOptions
from raymm.config.sections import TrainConfig
from raymm.costs.profile_files import load_table
from raymm.costs.workload import check_tokens, full_microbatch
from raymm.data import DataConfig, is_there, local_steps
from raymm.data.loading.in_memory import split_batch
from raymm.errors import PlanError
from raymm.model.batch_rules import complete_microbatch
from raymm.model.features import MULTIPLEXED_PLANS, PLANS_PER_BATCH
from raymm.model.model import Model
from raymm.planning.degrees import DegreeRequest
from raymm.planning.passes import check_passes
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.plan.field_checks import check_number
from raymm.scheduler.search.options import SEARCHED_SCHEDULES

# Larger numbers of devices, or GiB of memory, are treated as mistakes.
MOST_RANKS = 2**16
MOST_GIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanOptions):
    """Options of planning; see :class:`raymm.config.planning_options.PlanOptions` for the fields.

    Unset devices are taken from the cluster. ``profile`` may also be a :class:`ProfileTable`. With
    ``keeps_features``, the features of frozen first blocks are cached, and pipelines are planned
    for the later epochs, which do not run these blocks.
    """

    keeps_features: bool = False

    @classmethod
    def of_config(cls, config: TrainConfig) -> PlanRequest:
        """Return the request of the sections ``planning`` and ``parallel``."""
        only = config.parallel.schedule
        return cls(
            **config.planning.model_dump(), recompute=config.parallel.recompute,
            schedules=SEARCHED_SCHEDULES if only is None else (only,),
            style=config.parallel.style or PIPELINED,
            keeps_features=config.cache is not None and config.cache.features != "none",
        )

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> PlanRequest:
        """Return the request of keyword arguments. Raises TypeError, which lists the accepted
        options, for an unknown one."""
        accepted = [option.name for option in fields(cls)]
        if unknown := [name for name in options if name not in accepted]:
            raise TypeError(
                f"unknown planning option {unknown[0]!r}; accepted: {', '.join(accepted)}"
            )
        return cls(**options)

    @property
    def degree_request(self) -> DegreeRequest:
        """:attr:`degrees`, parsed."""
        return DegreeRequest.of(self.degrees)

    def check(self, model: Model) -> None:
        """Check the request before anything starts. Raises PlanError, which names the field, its
        value and what is accepted."""
        if self.ranks is not None and self.ranks > MOST_RANKS:
            raise PlanError(f"ranks is {self.ranks}; accepted: at most {MOST_RANKS}")
        if self.memory_gib is not None and not 0 < self.memory_gib <= MOST_GIB:  # NaN fails too
            raise PlanError(
                f"memory_gib is {self.memory_gib}; accepted: a number above 0, at most {MOST_GIB}"
            )
        self.degree_request.check(model.module_names)
        if self.style != PIPELINED:
            model.require(MULTIPLEXED_PLANS, f"parallel.style is {self.style!r}")
            for name, value in (
                ("passes", list(self.passes)), ("per_batch", self.per_batch),
                ("dollars_per_gpu_hour", self.dollars_per_gpu_hour),
            ):
                if value:
                    raise PlanError(
                        f"planning.{name} is {value}, and parallel.style {self.style!r}; "
                        f"accepted: style {PIPELINED}"
                    )
        if self.per_batch:
            model.require(PLANS_PER_BATCH, "planning.per_batch is true")
            if self.keeps_features:
                raise PlanError(
                    "planning.per_batch is true, and cache.features is given; accepted: one of both"
                )
        check_passes(self.passes)
        if self.device is not None:
            find_device(self.device)
        if self.profile is not None:
            self.profile_table.at(extrapolate=True).check(model.graph)
        check_tokens(model, self.tokens)

    @property
    def profile_table(self) -> ProfileTable:
        """:attr:`profile` as a table, which is read if it is a file. It must be set."""
        assert self.profile is not None
        if isinstance(self.profile, ProfileTable):
            return self.profile
        return load_table(self.profile)


@dataclass(frozen=True)
class Workload:
    """The work of a step.

    Attributes:
        samples: samples per microbatch, if there is no ``microbatch``.
        text: tokens of the longest text of a sample, if there is no ``microbatch``.
        microbatch: a real microbatch, or a function that reads one; None without data.
        dtype: compute dtype, ``"fp32"`` or ``"bf16"``.
        optimizer: determines the optimizer state per trained parameter.
    """

    microbatches: int
    samples: int = 1
    text: int | None = None
    microbatch: Callable[[], Mapping[str, Any]] | Mapping[str, Any] | None = None
    dtype: str = "fp32"
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self) -> None:
        check_number("microbatches", self.microbatches)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.samples * self.microbatches

    def read_microbatch(self) -> Mapping[str, Any]:
        """Return the real microbatch, which must be set."""
        assert self.microbatch is not None
        return self.microbatch() if callable(self.microbatch) else self.microbatch

    @classmethod
    def of_config(
        cls, data: DataConfig, modalities: Sequence[str], dtype: str = "fp32"
    ) -> Workload:
        """Return the workload of a run's data, whose files need not exist. The microbatch should
        have all ``modalities``."""
        files_exist = all(is_there(source.path) for source in data.sources("train"))
        return cls(
            data.microbatches, data.batch_size // data.microbatches, data.max_length,
            (lambda: _full_or_first(data, modalities)) if files_exist else None, dtype,
        )

    @classmethod
    def of_batches(
        cls, batches: Sequence[Any], modalities: Sequence[str], ranks: int, dtype: str = "fp32"
    ) -> Workload:
        """Return the workload of batches in memory. Only the first batch is read.

        The number of microbatches is kept if the batches are already split. Otherwise, it divides
        the rows and keeps the ranks busy. Raises DataError if the first batch is invalid.
        """
        first = batches[0]
        if not isinstance(first, Mapping):
            largest = max(first, key=lambda part: (len(part), part["input_ids"].numel()))
            return cls(len(first), microbatch=largest, dtype=dtype)
        first = complete_microbatch(first, modalities)
        rows = len(first["input_ids"])
        count = max(n for n in range(1, min(rows, 2 * ranks) + 1) if rows % n == 0)
        largest = max(split_batch(first, count), key=len)
        return cls(count, rows // count, microbatch=largest, dtype=dtype)


def whole_microbatches(data: DataConfig | Sequence[Any]) -> int:
    """Return the number of microbatches per step in a data section or in batches in memory, before
    any split by the plan."""
    if isinstance(data, DataConfig):
        return data.microbatches
    return 1 if isinstance(data[0], Mapping) else len(data[0])


def _full_or_first(data: DataConfig, modalities: Sequence[str]) -> Mapping[str, Any]:
    try:
        return full_microbatch(data, modalities)
    except PlanError:  # no microbatch has all modalities; training works on such data too
        return next(iter(local_steps(data, steps=1))).microbatches[0]
