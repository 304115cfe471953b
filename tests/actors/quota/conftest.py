"""Streams of three modules, and their concurrent runner."""

from __future__ import annotations

import pytest

from raymm.actors.quota import (
    ConcurrentModules,
    RecordingBackend,
    StreamPool,
)
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_driver import FakeDriver
from tests.support.three_modules import QUOTAS


@pytest.fixture
def streams():
    with StreamPool(RecordingBackend(), {"s": QUOTAS}) as pool:
        yield pool.select("s")


@pytest.fixture
def side():
    with ConcurrentModules() as one:
        yield one


@pytest.fixture
def cuda(monkeypatch):
    """Replace torch's streams by fakes for an H100."""
    fake = FakeCuda(FakeDriver(minSmPartitionSize=8, smCoscheduledAlignment=8))
    fake.driver.primary_active = False  # until torch allocates
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with fake.installed(monkeypatch):
        yield fake
