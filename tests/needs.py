"""What tests need beside this process, by which ``make test`` and ``make test-fast`` leave some
out.

A test that asks for the fixture ``ray_cluster``, itself or through other fixtures, has the marker
``ray``, and one that asks for ``triton_worker`` the marker ``triton``. Tests whose processes start
a Ray of their own are marked by hand. A test that does without saying so fails: Ray finds no folder
to start in, and Triton's interpreter is not to be imported in this process at all.

``system`` is set by hand: whole commands, nodes of a cluster, and kernels of notebooks, which
import everything anew and are killed. They take a quarter of the time of all tests.

``cells(n)`` is set by hand on a test of many layouts or models: ``make test`` runs the first
``n - 1`` and the last of its parameters, and ``make test-sweep`` runs all others, which get the
marker ``sweep``.
"""

import os
import sys
from collections.abc import Generator

import pytest

MARKER_OF_FIXTURE = {"ray_cluster": "ray", "triton_worker": "triton"}
INTERPRETER = "triton.runtime.interpreter"
# Where Ray puts its files; processes that a test starts inherit it.
RAY_FOLDER = "RAY_TMPDIR"
NO_RAY = "/dev/null/a test that starts Ray asks for the fixture ray_cluster or has the marker ray"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need more than this process, and the parameters that only a sweep runs."""
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
    """Keeps Ray from starting in tests that do not say so."""
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
    """Fails a test that imports Triton's interpreter, which belongs into a process of its own."""
    result = yield
    assert INTERPRETER not in sys.modules, f"{INTERPRETER} was imported: ask for triton_worker"
    return result
