"""Requirements of tests, for the selections of ``make test`` and ``make test-fast``.

A test that uses the fixture ``ray_cluster``, itself or through other fixtures, has the marker
``ray``, and one that uses ``triton_worker`` the marker ``triton``. Tests whose processes start
another Ray are marked by hand. An unmarked test that needs one of them fails: Ray finds no folder
to start in, and Triton's interpreter must not be imported in this process.

``system`` is set by hand for commands, nodes of a cluster, and kernels of notebooks, which import
everything again and are killed. They take a quarter of the time of all tests.

``cells(n)`` is set manually on a test of many layouts or models: ``make test`` runs the first ``n -
1`` and the last of its parameters, and ``make test-sweep`` runs all others, which get the marker
``sweep``.
"""

import os
import sys
from collections.abc import Generator

import pytest

MARKER_OF_FIXTURE = {"ray_cluster": "ray", "triton_worker": "triton"}
INTERPRETER = "triton.runtime.interpreter"
# Folder of Ray's files; processes that a test starts inherit the variable.
RAY_FOLDER = "RAY_TMPDIR"
NO_RAY = "/dev/null/a test that starts Ray asks for the fixture ray_cluster or has the marker ray"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need more than this process, and parameters that only a sweep runs."""
    cells: dict[str, list[pytest.Item]] = {}
    for item in items:
        for fixture, marker in MARKER_OF_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if item.get_closest_marker("cells"):
            cells.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for items_of_test in cells.values():
        marker = items_of_test[0].get_closest_marker("cells")
        assert marker is not None
        for item in items_of_test[marker.args[0] - 1 : -1]:
            item.add_marker("sweep")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Prevent Ray from starting in unmarked tests."""
    if item.get_closest_marker("ray"):
        return (yield)
    before = os.environ.get(RAY_FOLDER)
    os.environ[RAY_FOLDER] = NO_RAY
    try:
        return (yield)
    finally:
        if before is None:
            del os.environ[RAY_FOLDER]
        else:
            os.environ[RAY_FOLDER] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that imports Triton's interpreter, which needs a separate process."""
    result = yield
    assert INTERPRETER not in sys.modules, f"{INTERPRETER} was imported: ask for triton_worker"
    return result
