"""The process in which Triton's interpreter runs."""

from collections.abc import Callable, Iterator

import pytest
from interpreted_triton import worker


@pytest.fixture(scope="session")
def triton_worker() -> Iterator[Callable]:
    """Calls a function with arguments there, and returns what it returns or raises."""
    with worker() as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
