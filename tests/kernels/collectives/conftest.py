"""Processes that the tests of collectives share."""

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import RankProcesses, rank_processes


@pytest.fixture(scope="package")
def processes() -> Iterator[RankProcesses]:
    """Start three processes in gloo groups."""
    with rank_processes(3) as running:
        yield running
