"""Steps made of groups of samples that a planner composes, from metadata only.

A data position stores no sample indices. It records how the steps of the epoch so far were planned,
so that they can be planned again to find the samples that remain. It also stores a digest of all
sizes, because repeating a plan requires the same sizes. Steps never cross epochs; the last steps of
an epoch may have fewer microbatches. All groups of a step cost about the same, and therefore also
the shares of the replicas of any module: the ``serving`` option of the planner, which would level
the sums of neighbouring groups, is not used.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.data.sampling.sampler import flat
from raymm.errors import DataError, PlanError
from raymm.scheduler.minibatch.measured_costs import MeasuredCosts
from raymm.scheduler.minibatch.methods import plan_minibatches
from raymm.scheduler.minibatch.problem import SampleSizes

# For each planner, the name of its option for the samples per group, and its further options.
METHODS = {"balanced": "samples_per_group", "random": "batch", "length_grouped": "batch"}
OPTIONS = {
    "balanced": {"budgets", "alike", "source_weight"},
    "random": {"sharded"},
    "length_grouped": {"modality"},
}

Groups = list[list[int]]
# {"method", "groups", "samples", "seed", "options", "steps"}: planner settings for steps of an
# epoch, and the number of those steps taken; also "costs" for measured costs
# (:class:`raymm.scheduler.minibatch.measured_costs.MeasuredCosts`). Plain JSON.
Taken = dict[str, Any]
# {"epoch": e, "sizes": digest of all samples' sizes, "taken": [Taken, ...]}
GroupState = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Position:
    """Position in an epoch, with the planned steps that follow.

    Attributes:
        before: planner settings of the steps that were taken under earlier plans of this epoch.
        how: planner settings of ``steps``: a :data:`Taken` without ``"steps"``.
        left: indices of the samples that ``steps`` was planned from.
    """

    epoch: int
    before: tuple[Taken, ...]
    how: dict[str, Any]
    left: np.ndarray
    steps: list[Groups]
    taken: int = 0

    @property
    def entries(self) -> list[Taken]:
        """Planner settings of all steps taken in the epoch, in order."""
        return [*self.before, *([{**self.how, "steps": self.taken}] if self.taken else ())]

    @property
    def step(self) -> int:
        return sum(entry["steps"] for entry in self.entries)


class GroupSampler:
    """Deterministic, endless stream of steps, each of a number of groups of samples.

    Every epoch is planned from scratch (:mod:`raymm.scheduler.minibatch.methods`) with its number
    in the seed. A state records how the steps taken in its epoch were planned. A run that resumes
    with other groups, options, or another method therefore plans only the remaining samples of the
    epoch, and every sample still comes exactly once.

    Args:
        samples: approximate samples per group, > 0.
        method: one of :data:`METHODS`. Samples that a planner leaves out come in steps at the end.
        options: further options of the planner, see :data:`OPTIONS`, as plain JSON.
    """

    def __init__(
        self, sizes: SampleSizes, groups: int, samples: int, method: str = "balanced",
        seed: int = 0, **options: Any,
    ):  # fmt: skip
        self.sizes = sizes
        self.planner = {
            "method": method, "groups": groups, "samples": samples, "seed": seed,
            "options": options,
        }
        self.digest = _digest(sizes)
        self._whole: tuple[Any, list[Groups]] | None = None  # the last complete plan of an epoch

    def batches(self, state: GroupState | None = None) -> Iterator[tuple[Groups, GroupState]]:
        """Yield (groups of one step, state after the step) endlessly from ``state`` on. Groups are
        never empty, so a step may have fewer groups than configured. Errors are those of
        :meth:`open`."""
        for groups, position in self.walk(self.open(state)):
            yield groups, self.state(position)

    def walk(self, position: Position) -> Iterator[tuple[Groups, Position]]:
        while True:
            position = self.settled(position)
            groups = position.steps[position.taken]
            position = replace(position, taken=position.taken + 1)
            yield groups, position

    def open(self, state: GroupState | None = None) -> Position:
        """Return the position of a state, planned with the settings of this sampler. Raise a
        ``DataError`` if the state does not fit this dataset, and a ``PlanError`` if the sizes
        cannot be planned."""
        epoch, entries = self.check(state)
        *earlier, last = entries or [{**self.planner, "steps": 0}]
        costs = self._costs(last.get("costs"))
        settings = self.planner if costs is None else {**self.planner, "costs": costs}
        steps = last["steps"]
        if steps and {**last, "steps": 0} != {**settings, "steps": 0}:
            earlier, steps = entries, 0
        remaining = self._left(epoch, earlier)
        position = Position(
            epoch, tuple(earlier), settings, remaining,
            self._planned(epoch, remaining, len(earlier), settings), steps,
        )
        if steps > len(position.steps):
            raise self._misfit({"epoch": epoch, "taken": entries})
        return position

    def state(self, position: Position) -> GroupState:
        """Return a position as plain JSON that :meth:`open` restores."""
        epoch, entries = position.epoch, position.entries
        if position.taken == len(position.steps):
            # The next epoch only needs the costs that are known now.
            epoch, entries = epoch + 1, [{**position.how, "steps": 0}]
            entries = entries if "costs" in position.how else []
        return {"epoch": epoch, "sizes": self.digest, "taken": entries}

    def settled(self, position: Position) -> Position:
        """Return the position, or the beginning of the next epoch if all its steps are taken."""
        while position.taken == len(position.steps):
            epoch, samples = position.epoch + 1, np.arange(len(self.sizes))
            settings = position.how
            position = Position(
                epoch, (), settings, samples, self._planned(epoch, samples, 0, settings)
            )
        return position

    def replanned(self, position: Position, costs: dict[str, Any]) -> Position:
        """Plan the remaining samples of the epoch of a position again with measured costs."""
        used = [sample for step in position.steps[: position.taken] for sample in flat(step)]
        remaining = np.setdiff1d(position.left, used, assume_unique=True)
        earlier = tuple(position.entries)
        settings = {**position.how, "costs": costs}
        return Position(
            position.epoch, earlier, settings, remaining,
            self._planned(position.epoch, remaining, len(earlier), settings),
        )

    def _costs(self, costs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the measured costs to plan with after resuming from a state with ``costs``. None
        here: this class plans by units only."""
        return None

    def _left(self, epoch: int, taken: Sequence[Taken]) -> np.ndarray:
        """Return the samples of the epoch that were not taken yet, ascending."""
        remaining = np.arange(len(self.sizes))
        for number, entry in enumerate(taken):
            planned = self._planned(epoch, remaining, number, entry)
            if entry["steps"] > len(planned):
                raise self._misfit({"epoch": epoch, "taken": taken})
            used = [sample for step in planned[: entry["steps"]] for sample in flat(step)]
            remaining = np.setdiff1d(remaining, used, assume_unique=True)
        return remaining

    def _planned(
        self, epoch: int, left: np.ndarray, number: int, how: dict[str, Any]
    ) -> list[Groups]:
        """Return the steps for the samples ``left``, after ``number`` earlier plans of the epoch.
        """
        if number:
            return self._plan(epoch, left, number, how)
        key = (epoch, {**how, "steps": 0})
        if self._whole is None or self._whole[0] != key:
            self._whole = (key, self._plan(epoch, left, number, how))
        return self._whole[1]

    def _plan(
        self, epoch: int, left: np.ndarray, number: int, how: dict[str, Any]
    ) -> list[Groups]:
        method, groups, samples = how["method"], how["groups"], how["samples"]
        seed = how["seed"] + number
        # Too few samples for a planner of groups of fixed size, or fewer samples than groups.
        if len(left) < groups * (samples if METHODS[method] == "batch" else 1):
            random = np.random.default_rng([seed, epoch])
            return _cut(random.permutation(left), groups, samples)
        sizes = SampleSizes(
            self.sizes.names, self.sizes.values[left], self.sizes.sources[left], self.sizes.padded
        )
        options = {METHODS[method]: samples, **how["options"]}
        if "costs" in how:
            options["measured"] = MeasuredCosts.from_dict(how["costs"])
        plan = plan_minibatches(sizes, groups, method, seed=seed, epoch=epoch, **options)
        steps = [
            [left[plan.group(step, group)].tolist() for group in range(groups)]
            for step in range(plan.steps)
        ]
        steps = [[group for group in step if group] for step in steps]
        return steps + _cut(left[plan.left_out], groups, samples)

    def check(self, state: GroupState | None) -> tuple[int, list[Taken]]:
        """Return (epoch, entries of the steps taken in it) of a state; None is the beginning. Raise
        a ``DataError`` for an invalid state, or one of another batching or other samples."""
        if state is None:
            return 0, []
        if isinstance(state, Mapping) and "position" in state:
            raise DataError(
                f"data.batching is {self.planner['method']!r}, but data position {state} belongs "
                "to a run with 'random'; resume with 'random', or start a new run"
            )
        try:
            epoch, digest, entries = state["epoch"], state["sizes"], state["taken"]
            is_valid = len(state) == 3 and epoch >= 0 and all(map(_is_taken, entries))
        except (KeyError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            raise self._misfit(state)
        if digest != self.digest:
            if any(entry["steps"] for entry in entries):
                raise self._misfit(state)
            entries = []  # costs that were measured with other units do not apply
        return epoch, [dict(entry) for entry in entries]

    def _misfit(self, state: object) -> DataError:
        return DataError(
            f"data position {state} does not fit these {len(self.sizes)} samples: were the files, "
            "data.max_length, or settings that determine sizes (data.modalities, "
            "data.batching.units, the encoders) changed since the checkpoint?"
        )


def _digest(sizes: SampleSizes) -> str:
    digest = hashlib.sha256(repr(sizes.names).encode())
    digest.update(sizes.values.tobytes())
    digest.update(sizes.sources.tobytes())
    return digest.hexdigest()[:16]


def _is_taken(entry: Mapping[str, Any]) -> bool:
    if "costs" in entry:
        try:
            MeasuredCosts.from_dict(entry["costs"])
        except PlanError:
            return False
    return (
        set(entry) - {"costs"} == {"method", "groups", "samples", "seed", "options", "steps"}
        and ("costs" not in entry or entry["method"] == "balanced")
        and entry["method"] in METHODS
        and set(entry["options"]) <= OPTIONS[entry["method"]]
        and min(entry["groups"], entry["samples"]) > 0
        and min(entry["steps"], entry["seed"]) >= 0
    )


def _cut(samples: np.ndarray, groups: int, per_group: int) -> list[Groups]:
    """Split samples, in order, into the fewest steps that hold them, with groups of nearly equal
    size."""
    steps = -(-len(samples) // (groups * per_group))
    return [
        [group.tolist() for group in np.array_split(step, min(groups, len(step)))]
        for step in (np.array_split(samples, steps) if steps else ())
    ]
