"""Steps made of groups of samples that a planner put together: metadata only."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raymm.data.errors import DataError
from raymm.scheduler.minibatch import SampleSizes
from raymm.scheduler.minibatch_methods import plan_minibatches

# Planners, and what they call the number of samples in a group.
METHODS = {"balanced": "samples_per_group", "random": "batch", "length_grouped": "batch"}

Groups = list[list[int]]
# {"epoch": e, "taken": [[groups per step, steps], ...]}: what was taken of that epoch.
GroupState = dict[str, Any]


class GroupSampler:
    """Deterministic stream of steps, epoch after epoch, each of so many groups of samples.

    Every epoch is planned anew (:mod:`raymm.scheduler.minibatch_methods`), seeded by its number.
    A state does not depend on how many groups a step has: going on with another number plans
    what is left of the epoch, so every sample still comes exactly once.

    Args:
        sizes: of all samples.
        groups: per step, > 0.
        samples: about how many a group has, > 0.
        method: one of :data:`METHODS`. What a planner leaves out comes in steps at the end.
        seed: >= 0.
        options: further ones of the planner.
    """

    def __init__(
        self, sizes: SampleSizes, groups: int, samples: int, method: str = "balanced",
        seed: int = 0, **options: Any,
    ):  # fmt: skip
        self.sizes, self.groups, self.samples, self.method = sizes, groups, samples, method
        self.seed, self.options = seed, {METHODS[method]: samples, **options}

    def steps(self, state: GroupState | None = None) -> Iterator[tuple[Groups, GroupState]]:
        """Endless (groups of one step, state after it), from ``state`` on. A group is never
        empty, so a step may have fewer groups than asked for.

        Raises:
            DataError: a state that does not fit this dataset.
            MiniBatchError: sizes that cannot be planned.
        """
        epoch, taken = self.check(state)
        while True:
            if not taken or taken[-1][0] != self.groups:
                taken = [*taken, [self.groups, 0]]
            *before, (_, start) = taken
            planned = self._planned(epoch, self._left(epoch, before), len(before), self.groups)
            if start > len(planned):
                raise _misfit({"epoch": epoch, "taken": taken}, len(self.sizes))
            for number in range(start, len(planned)):
                done = number + 1 == len(planned)
                after = [] if done else [*before, [self.groups, number + 1]]
                yield planned[number], {"epoch": epoch + done, "taken": after}
            epoch, taken = epoch + 1, []

    def _left(self, epoch: int, taken: list[list[int]]) -> np.ndarray:
        """Samples of the epoch that were not taken yet, ascending."""
        left = np.arange(len(self.sizes))
        for number, (groups, steps) in enumerate(taken):
            planned = self._planned(epoch, left, number, groups)
            if steps > len(planned):
                raise _misfit({"epoch": epoch, "taken": taken}, len(self.sizes))
            gone = [sample for step in planned[:steps] for sample in samples_of(step)]
            left = np.setdiff1d(left, gone, assume_unique=True)
        return left

    def _planned(self, epoch: int, left: np.ndarray, number: int, groups: int) -> list[Groups]:
        """The steps of what is left of an epoch that was planned ``number`` times before."""
        # Fewer than the planner of fixed groups takes, or than there are groups.
        if len(left) < groups * (self.samples if METHODS[self.method] == "batch" else 1):
            random = np.random.default_rng([self.seed + number, epoch])
            return self._cut(random.permutation(left), groups)
        sizes = SampleSizes(
            self.sizes.names, self.sizes.values[left], self.sizes.sources[left], self.sizes.padded
        )
        plan = plan_minibatches(
            sizes, groups, self.method, seed=self.seed + number, epoch=epoch, **self.options
        )
        steps = [
            [left[plan.group(step, group)].tolist() for group in range(groups)]
            for step in range(plan.steps)
        ]
        steps = [[group for group in step if group] for step in steps]
        return steps + self._cut(left[plan.left_out], groups)

    def _cut(self, samples: np.ndarray, groups: int) -> list[Groups]:
        """Samples in order, in as few steps of groups of about equal numbers as hold them."""
        steps = -(-len(samples) // (groups * self.samples))
        return [
            [part.tolist() for part in np.array_split(step, min(groups, len(step)))]
            for step in (np.array_split(samples, steps) if steps else ())
        ]

    def check(self, state: GroupState | None) -> tuple[int, list[list[int]]]:
        """(epoch, what was taken of it) of a state, None being the beginning.

        Raises:
            DataError: a state that is none.
        """
        if state is None:
            return 0, []
        try:
            epoch, taken = state["epoch"], state["taken"]
            if len(state) == 2 and epoch >= 0 and all(g > 0 and s >= 0 for g, s in taken):
                return epoch, [list(pair) for pair in taken]
        except (KeyError, TypeError, ValueError):
            pass
        raise _misfit(state, len(self.sizes))


def _misfit(state: object, samples: int) -> DataError:
    return DataError(
        f"data position {state} does not fit a dataset of {samples} samples that is taken in "
        "planned groups: was the file or data.batching changed since the checkpoint?"
    )


def samples_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """All samples of a step."""
    return [sample for group in groups for sample in group]
