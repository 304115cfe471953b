"""Process in which Triton's interpreter runs."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.interpreted_triton import worker


@pytest.fixture(scope="session")
def triton_worker() -> Iterator[Callable]:
    """Yield a function that runs another one in that process."""
    with worker() as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
