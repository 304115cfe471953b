"""Planned steps whose rest of an epoch is planned anew while a run goes on."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from raymm.data.sampling.group_sampler import Groups, GroupSampler, GroupState, Position
from raymm.data.sampling.sampler import flat
from raymm.scheduler.minibatch.measured_costs import MeasuredCosts

# Of more samples than this, a part is planned to see what planning all of them would bring.
TRIAL_SAMPLES = 8192
# Steps whose samples are remembered until they are asked for.
REMEMBERED = 1024


class Decision(NamedTuple):
    """From which step on (counted in its epoch, from 0) steps are planned with which costs."""

    epoch: int
    step: int
    costs: dict[str, Any]


class RebalancedSampler(GroupSampler):
    """A :class:`GroupSampler` that takes measured costs while its steps are being taken.

    Costs hold from the next step that is asked for, for the rest of the epoch and for the epochs
    after it. States have them, so going on from one needs no more; to repeat steps after a state
    in the way they were taken before, give the decisions of that time to :meth:`follow`.
    """

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
        """Say, before the first step, what is known of the run.

        Args:
            replicas: of modules, by modality; what states and decisions say of another number of
                copies is left out.
            decisions: taken earlier, in order; those before the state are not looked at.
            shared: modalities of whose module the copies share every microbatch by samples.
        """
        self._replicas, self._decisions = dict(replicas), tuple(decisions)
        self._shared = frozenset(shared)

    def batches(self, state: GroupState | None = None) -> Iterator[tuple[Groups, GroupState]]:
        """As of :class:`GroupSampler`. The last one started is the one that is steered."""
        self._handed.clear()
        self._live = self.open(state)
        due = deque(d for d in self._decisions if d[:2] >= self.place)
        while True:
            costs = None
            while due and due[0][:2] <= self.place:
                costs = self._costs(due.popleft().costs)
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
        """Where the last :meth:`batches` is, which has begun."""
        assert self._live is not None
        return self._live

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, step in it) of the next step that will be handed out."""
        live = self.live
        return (live.epoch + 1, 0) if live.taken == len(live.steps) else (live.epoch, live.step)

    def groups_of(self, state_after: GroupState) -> Groups | None:
        """Samples of a step that was handed out, in the order of the steps; None if it was not,
        or is asked for again."""
        while self._handed:
            state, groups = self._handed.popleft()
            if state == state_after:
                return groups
        return None

    def upcoming(self, steps: int) -> list[Groups]:
        """The steps that come next, as things are."""
        return [groups for groups, _ in islice(self.walk(self.live), steps)]

    def trial(self, costs: MeasuredCosts, steps: int) -> list[Groups]:
        """Steps like those that would come next with these costs; where there are many samples,
        of some of them."""
        live = self.live
        gone = [sample for step in live.steps[: live.taken] for sample in flat(step)]
        left = np.setdiff1d(live.left, gone, assume_unique=True)
        if len(left) <= TRIAL_SAMPLES:
            position = self.replanned(live, costs.to_dict())
            return [groups for groups, _ in islice(self.walk(position), steps)]
        some = np.random.default_rng([live.how["seed"], *self.place]).choice(
            left, TRIAL_SAMPLES, replace=False
        )
        how = {**live.how, "costs": costs.to_dict()}
        return self._plan(live.epoch, np.sort(some), len(live.entries), how)[:steps]

    def adopt(self, costs: MeasuredCosts) -> None:
        """Plan all steps from :attr:`place` on with these costs."""
        self._live = self.replanned(self.live, costs.to_dict())

    def _costs(self, costs: dict[str, Any] | None) -> dict[str, Any] | None:
        if costs is None or self.planner["method"] != "balanced":
            return None
        measured = MeasuredCosts.from_dict(costs)
        if self._replicas is not None:
            measured = measured.for_replicas(self._replicas, self._shared)
        return measured.to_dict()
