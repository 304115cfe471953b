"""Planned steps that can be planned again with measured costs during an epoch."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from raymm.data.sampling.group_sampler import Groups, GroupSampler, GroupState, Position
from raymm.data.sampling.sampler import flat
from raymm.scheduler.minibatch.measured_costs import MeasuredCosts

# Most samples that a trial plan uses; of larger data it plans a random subset.
TRIAL_SAMPLES = 8192
# Most steps for which the samples are kept until :meth:`RebalancedSampler.groups_of` returns them.
REMEMBERED = 1024


class Decision(NamedTuple):
    """Change of the planning costs from a step on. ``step`` counts from 0 within the epoch."""

    epoch: int
    step: int
    costs: dict[str, Any]


class RebalancedSampler(GroupSampler):
    """:class:`GroupSampler` that adopts measured costs while the run takes steps. Costs apply from
    the next step on, for the rest of the epoch and for later epochs. States contain the costs, so
    resuming needs nothing else. To repeat the steps after a state exactly as they were taken
    before, pass the decisions of that time to :meth:`follow`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._replicas: Mapping[str, int] | None = None
        self._shared: frozenset[str] = frozenset()
        self._decisions: tuple[Decision, ...] = ()
        self._live: Position | None = None
        self._handed: deque[tuple[GroupState, Groups]] = deque(maxlen=REMEMBERED)

    def follow(
        self, replicas: Mapping[str, int], decisions: Sequence[Decision] = (),
        shared: Collection[str] = (),
    ) -> None:
        """Configure the sampler for a run, before its first step.

        Args:
            replicas: number of replicas by modality; relative costs of replicas are ignored where
                they were measured with another number.
            decisions: earlier decisions to repeat, in order; decisions before the state are
                ignored.
            shared: modalities whose replicas split every microbatch by samples.
        """
        self._replicas, self._decisions = dict(replicas), tuple(decisions)
        self._shared = frozenset(shared)

    def batches(self, state: GroupState | None = None) -> Iterator[tuple[Groups, GroupState]]:
        """See :class:`GroupSampler`. :attr:`live` and :meth:`adopt` refer to the iterator started
        last."""
        self._handed.clear()
        self._live = self.open(state)
        pending = deque(d for d in self._decisions if d[:2] >= self.place)
        while True:
            costs = None
            while pending and pending[0][:2] <= self.place:
                costs = self._costs(pending.popleft().costs)
            if costs is not None:
                self._live = self.replanned(self._live, costs)
            position = self.settled(self._live)
            groups = position.steps[position.taken]
            self._live = replace(position, taken=position.taken + 1)
            after = self.state(self._live)
            self._handed.append((after, groups))
            yield groups, after

    @property
    def live(self) -> Position:
        """Current position of the last :meth:`batches` iterator, which must have started."""
        assert self._live is not None
        return self._live

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, step in the epoch) of the next step."""
        live = self.live
        return (live.epoch + 1, 0) if live.taken == len(live.steps) else (live.epoch, live.step)

    def groups_of(self, state_after: GroupState) -> Groups | None:
        """Return the samples of a step by the state after it, or None if the step is unknown. Call
        it in the order of the steps and once per step: earlier steps are forgotten."""
        while self._handed:
            state, groups = self._handed.popleft()
            if state == state_after:
                return groups
        return None

    def upcoming(self, steps: int) -> list[Groups]:
        return [groups for groups, _ in islice(self.walk(self.live), steps)]

    def trial(self, costs: MeasuredCosts, steps: int) -> list[Groups]:
        """Return steps as they would be planned with ``costs``; from a random subset of large data.
        """
        live = self.live
        used = [sample for step in live.steps[: live.taken] for sample in flat(step)]
        remaining = np.setdiff1d(live.left, used, assume_unique=True)
        if len(remaining) <= TRIAL_SAMPLES:
            position = self.replanned(live, costs.to_dict())
            return [groups for groups, _ in islice(self.walk(position), steps)]
        subset = np.random.default_rng([live.how["seed"], *self.place]).choice(
            remaining, TRIAL_SAMPLES, replace=False
        )
        settings = {**live.how, "costs": costs.to_dict()}
        return self._plan(live.epoch, np.sort(subset), len(live.entries), settings)[:steps]

    def adopt(self, costs: MeasuredCosts) -> None:
        """Plan all steps from :attr:`place` on with ``costs``."""
        self._live = self.replanned(self.live, costs.to_dict())

    def _costs(self, costs: dict[str, Any] | None) -> dict[str, Any] | None:
        if costs is None or self.planner["method"] != "balanced":
            return None
        measured = MeasuredCosts.from_dict(costs)
        if self._replicas is not None:
            measured = measured.for_replicas(self._replicas, self._shared)
        return measured.to_dict()
