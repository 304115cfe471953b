"""A process delivers the snapshots that it copied."""

from __future__ import annotations

import pytest

from raymm.actors.optimizer import snapshot
from raymm.actors.optimizer.optimizer import Progress


def test_delivery_does_not_wait_for_a_failed_copy(monkeypatch):
    """Check that it does not deliver the next copy instead, which would be one step off."""
    taken = []

    def copy_of(stages, optimizer, staging):
        taken.append(step := len(taken) + 1)
        if step == 2:
            raise MemoryError

        def result():
            if step == 3:  # in the copying thread
                raise MemoryError
            return snapshot.Snapshot(Progress(step, True), {}, {})

        return result

    monkeypatch.setattr(snapshot, "copy_of", copy_of)
    actor = snapshot.SnapshotActor()
    actor._stages, actor._optimizer, actor._staging = {}, None, None
    handed = []
    for step in (1, 2, 3, 4):
        if step == 2:
            with pytest.raises(MemoryError):
                actor.copy_snapshot()
        else:
            actor.copy_snapshot()
        handed.append(actor.hand_over_snapshot()[0])
    assert handed == [1, None, None, 4]
