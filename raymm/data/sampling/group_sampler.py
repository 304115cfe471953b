"""Steps made of groups of samples that a planner put together: metadata only.

A data position holds no samples: it says how the steps taken of the epoch were planned, so that
they can be planned again and the rest anew, with a digest of all sizes, since planning again needs
the same ones. Steps never cross epochs; the last ones of an epoch may have fewer microbatches.
All groups of a step are alike, so what replicas of any module get is, too: ``serving`` of the
planner, which would level sums of neighbouring groups, is not used.
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

# Planners, what they call the number of samples in a group, and their further options.
METHODS = {"balanced": "samples_per_group", "random": "batch", "length_grouped": "batch"}
OPTIONS = {
    "balanced": {"budgets", "alike", "source_weight"},
    "random": {"sharded"},
    "length_grouped": {"modality"},
}

Groups = list[list[int]]
# {"method", "groups", "samples", "seed", "options", "steps"}: how steps of an epoch were planned,
# and how many of them were taken; with "costs", if there were measured ones
# (:class:`raymm.scheduler.minibatch.measured_costs.MeasuredCosts`). Plain JSON.
Taken = dict[str, Any]
# {"epoch": e, "sizes": digest of all samples' sizes, "taken": [Taken, ...]}
GroupState = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Position:
    """A place in an epoch, with the steps that come next.

    Attributes:
        epoch: its number.
        before: how what was taken before had been planned.
        how: how the steps were planned: a :data:`Taken` without ``"steps"``.
        left: samples that were left when they were.
        steps: the steps that were planned for them.
        taken: how many of these were taken.
    """

    epoch: int
    before: tuple[Taken, ...]
    how: dict[str, Any]
    left: np.ndarray
    steps: list[Groups]
    taken: int = 0

    @property
    def entries(self) -> list[Taken]:
        """How all that was taken of the epoch had been planned."""
        return [*self.before, *([{**self.how, "steps": self.taken}] if self.taken else ())]

    @property
    def step(self) -> int:
        """How many steps of the epoch were taken."""
        return sum(entry["steps"] for entry in self.entries)


class GroupSampler:
    """Deterministic stream of steps, epoch after epoch, each of so many groups of samples.

    Every epoch is planned anew (:mod:`raymm.scheduler.minibatch.methods`), seeded by its number.
    A state says how what was taken of its epoch had been planned. So going on with other groups,
    options or even another method plans what is left of the epoch, and every sample still comes
    exactly once.

    Args:
        sizes: of all samples.
        groups: per step, > 0.
        samples: about how many a group has, > 0.
        method: one of :data:`METHODS`. What a planner leaves out comes in steps at the end.
        seed: >= 0.
        options: further ones of the planner, of :data:`OPTIONS`, as plain JSON.
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
        self._whole: tuple[Any, list[Groups]] | None = None  # the last epoch planned as a whole

    def batches(self, state: GroupState | None = None) -> Iterator[tuple[Groups, GroupState]]:
        """Endless (groups of one step, state after it), from ``state`` on. A group is never
        empty, so a step may have fewer groups than asked for.

        Raises:
            DataError: a state that does not fit this dataset.
            PlanError: sizes that cannot be planned.
        """
        for groups, position in self.walk(self.open(state)):
            yield groups, self.state(position)

    def walk(self, position: Position) -> Iterator[tuple[Groups, Position]]:
        """Endless (groups of one step, position after it)."""
        while True:
            position = self.settled(position)
            groups = position.steps[position.taken]
            position = replace(position, taken=position.taken + 1)
            yield groups, position

    def open(self, state: GroupState | None = None) -> Position:
        """The position that a state says, planned as this sampler plans.

        Raises:
            DataError: a state that does not fit this dataset.
            PlanError: sizes that cannot be planned.
        """
        epoch, taken = self.check(state)
        *before, last = taken or [{**self.planner, "steps": 0}]
        costs = self._costs(last.get("costs"))
        how = self.planner if costs is None else {**self.planner, "costs": costs}
        steps = last["steps"]
        if steps and {**last, "steps": 0} != {**how, "steps": 0}:
            before, steps = taken, 0
        left = self._left(epoch, before)
        position = Position(
            epoch, tuple(before), how, left, self._planned(epoch, left, len(before), how), steps
        )
        if steps > len(position.steps):
            raise self._misfit({"epoch": epoch, "taken": taken})
        return position

    def state(self, position: Position) -> GroupState:
        """A position as plain JSON, from which :meth:`open` finds it again."""
        epoch, taken = position.epoch, position.entries
        if position.taken == len(position.steps):
            # Of the next epoch only what costs are known now must be known.
            epoch, taken = epoch + 1, [{**position.how, "steps": 0}]
            taken = taken if "costs" in position.how else []
        return {"epoch": epoch, "sizes": self.digest, "taken": taken}

    def settled(self, position: Position) -> Position:
        """The same position, or the beginning of the next epoch at the end of one."""
        while position.taken == len(position.steps):
            epoch, left = position.epoch + 1, np.arange(len(self.sizes))
            how = position.how
            position = Position(epoch, (), how, left, self._planned(epoch, left, 0, how))
        return position

    def replanned(self, position: Position, costs: dict[str, Any]) -> Position:
        """What is left of the position's epoch, planned anew with measured costs."""
        gone = [sample for step in position.steps[: position.taken] for sample in flat(step)]
        left = np.setdiff1d(position.left, gone, assume_unique=True)
        before = tuple(position.entries)
        how = {**position.how, "costs": costs}
        return Position(
            position.epoch, before, how, left,
            self._planned(position.epoch, left, len(before), how),
        )

    def _costs(self, costs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Measured costs with which a run goes on that began with these. Here: none, steps are
        planned by units alone."""
        return None

    def _left(self, epoch: int, taken: Sequence[Taken]) -> np.ndarray:
        """Samples of the epoch that were not taken yet, ascending."""
        left = np.arange(len(self.sizes))
        for number, entry in enumerate(taken):
            planned = self._planned(epoch, left, number, entry)
            if entry["steps"] > len(planned):
                raise self._misfit({"epoch": epoch, "taken": taken})
            gone = [sample for step in planned[: entry["steps"]] for sample in flat(step)]
            left = np.setdiff1d(left, gone, assume_unique=True)
        return left

    def _planned(
        self, epoch: int, left: np.ndarray, number: int, how: dict[str, Any]
    ) -> list[Groups]:
        """The steps of what is left of an epoch that was planned ``number`` times before."""
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
        # Fewer than the planner of fixed groups takes, or than there are groups.
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
        """(epoch, what was taken of it) of a state, None being the beginning.

        Raises:
            DataError: a state of another batching or of other samples, or none at all.
        """
        if state is None:
            return 0, []
        if isinstance(state, Mapping) and "position" in state:
            raise DataError(
                f"data.batching is {self.planner['method']!r}, but data position {state} is one "
                "of 'random': go on with that, or begin a new run"
            )
        try:
            epoch, digest, taken = state["epoch"], state["sizes"], state["taken"]
            good = len(state) == 3 and epoch >= 0 and all(map(_is_taken, taken))
        except (KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise self._misfit(state)
        if digest != self.digest:
            if any(entry["steps"] for entry in taken):
                raise self._misfit(state)
            taken = []  # costs of other units are not known
        return epoch, [dict(entry) for entry in taken]

    def _misfit(self, state: object) -> DataError:
        return DataError(
            f"data position {state} does not fit these {len(self.sizes)} samples: were the files, "
            "data.max_length or what sizes depend on (data.modalities, data.batching.units, the "
            "encoders) changed since the checkpoint?"
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
    """Samples in order, in as few steps of groups of about equal numbers as hold them."""
    steps = -(-len(samples) // (groups * per_group))
    return [
        [part.tolist() for part in np.array_split(step, min(groups, len(step)))]
        for step in (np.array_split(samples, steps) if steps else ())
    ]
