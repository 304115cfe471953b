"""Batches that can be replayed after a recovery."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

# Maximum number of batches since the last snapshot that are kept, with their tensors in the object
# store. Older batches are loaded again.
KEPT_BATCHES = 16


class HasPosition(Protocol):
    """Batch with the position in the data after it."""

    @property
    def state_after(self) -> Any: ...


Batch = TypeVar("Batch", bound=HasPosition)


class ReplayedBatches(Generic[Batch]):
    """Batches of a run in order. After :meth:`rewind`, the batches since a snapshot are replayed.

    Args:
        load: loads batches from a position in the data; also called with the number of steps taken.
        position: position in the data; None for the beginning.
    """

    def __init__(
        self, load: Callable[[Any, int], Iterator[Batch]], step: int, position: Any, keep: bool
    ) -> None:
        self._load, self._step, self._position = load, step, position
        self._loader = load(position, step)
        # Batches with their step numbers: already yielded, and waiting to be yielded again.
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
        """Drop batches up to a step, which will not be replayed."""
        while self._kept and self._kept[0][0] <= step:
            self._kept.popleft()

    def rewind(self, step: int, position: Any, anew: bool = False) -> None:
        """Continue after an earlier step, from ``position`` in the data. The last argument is True
        if the kept batches were lost, too, and must be loaded again."""
        replayed = [batch for batch in (*self._kept, *self._again) if batch[0] > step and not anew]
        is_replayed = not anew and (
            self._step == step or (bool(replayed) and replayed[0][0] == step + 1)
        )
        self._kept.clear()
        self._again = deque(replayed if is_replayed else ())
        self._step, self._position = step, position
        if not is_replayed:
            self.load_anew()

    def load_anew(self) -> None:
        """Replace a lost loader. Batches that are not kept are loaded by the new one."""
        step, position = self._step, self._position
        if self._again:
            step, position = self._again[-1][0], self._again[-1][1].state_after
        self.close()
        self._loader = self._load(position, step)

    def close(self) -> None:
        """Stop loading."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()
