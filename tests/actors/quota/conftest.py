"""Streams of three modules, and what runs them at the same time."""

from __future__ import annotations

import pytest

from raymm.actors.quota import (
    ConcurrentModules,
    RecordingBackend,
    StreamPool,
)
from tests.actors.quota.three_modules import QUOTAS


@pytest.fixture
def streams():
    with StreamPool(RecordingBackend(), {"s": QUOTAS}) as pool:
        yield pool.select("s")


@pytest.fixture
def side():
    with ConcurrentModules() as one:
        yield one
