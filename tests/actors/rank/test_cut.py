"""A call that cuts connections and comes late cuts none of those that were made since."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from raymm.actors.rank.rank_actor import RankActor


def test_only_connections_of_its_generation_are_cut() -> None:
    rank: Any = object.__new__(RankActor)
    counts = {"cut": 0}
    rank._changing, rank._generation = threading.Lock(), 1
    rank._own_connections = SimpleNamespace(cut=lambda: counts.update(cut=counts["cut"] + 1))
    rank.cut(0)
    assert counts["cut"] == 0 and not rank._failed
    rank.cut(1)
    assert counts["cut"] == 1 and rank._failed
