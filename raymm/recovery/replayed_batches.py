"""Batches that can be had again after a recovery."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

# Batches since the last snapshot that are kept, with their tensors in the object store; what is
# older is loaded again.
KEPT_BATCHES = 16


class HasPosition(Protocol):
    """A batch that says where the data go on after it."""

    @property
    def state_after(self) -> Any: ...


Batch = TypeVar("Batch", bound=HasPosition)


class ReplayedBatches(Generic[Batch]):
    """The batches of a run, in order; those since a snapshot again after :meth:`rewind`.

    Args:
        load: loads batches, given the position in the data and how many steps were taken there.
        step: steps taken before the first.
        position: in the data; None for the beginning.
        keep: whether any may be asked for again.
    """

    def __init__(
        self, load: Callable[[Any, int], Iterator[Batch]], step: int, position: Any, keep: bool
    ) -> None:
        self._load, self._step, self._position = load, step, position
        self._loader = load(position, step)
        # Numbered by the steps that they are of: handed out, and to be handed out again.
        self._kept: deque[tuple[int, Batch]] = deque(maxlen=KEPT_BATCHES if keep else 0)
        self._again: deque[tuple[int, Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self._again:
                _, batch = self._again.popleft()
            elif (batch := next(self._loader, None)) is None:
                return
            self._step, self._position = self._step + 1, batch.state_after
            self._kept.append((self._step, batch))
            yield batch

    def forget(self, step: int) -> None:
        """Batches up to a step are not asked for again.

        Args:
            step: its number.
        """
        while self._kept and self._kept[0][0] <= step:
            self._kept.popleft()

    def rewind(self, step: int, position: Any, anew: bool = False) -> None:
        """Go on after a step.

        Args:
            step: its number.
            position: in the data after it.
            anew: what is kept was lost, too.
        """
        again = [kept for kept in (*self._kept, *self._again) if kept[0] > step and not anew]
        there = not anew and (
            self._step == step or (bool(again) and again[0][0] == step + 1)
        )
        self._kept.clear()
        self._again = deque(again if there else ())
        self._step, self._position = step, position
        if not there:
            self.load_anew()

    def load_anew(self) -> None:
        """What loads them was lost: load what is not there from new ones."""
        step, position = self._step, self._position
        if self._again:
            step, position = self._again[-1][0], self._again[-1][1].state_after
        self.close()
        self._loader = self._load(position, step)

    def close(self) -> None:
        """Load no more."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()
