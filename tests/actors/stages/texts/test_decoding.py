"""The likeliest next tokens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from raymm.actors.stages.texts.decoding import likeliest


class Columns:
    """Group of threads, each with some columns of the vocabulary."""

    def __init__(self, size: int) -> None:
        self._values: list[torch.Tensor] = []
        self._all = threading.Barrier(size, timeout=60)

    def all_reduce_max(self, value: torch.Tensor) -> torch.Tensor:
        self._values.append(value)
        self._all.wait()
        largest = torch.stack(self._values).amax(0)
        if not self._all.wait():
            self._values.clear()
        self._all.wait()
        return largest


def test_ties_give_the_smallest_token_on_any_number_of_processes() -> None:
    logits = torch.tensor([[0.0, 3, 3, 1], [-1, -2, -3, -1], [0, 0, 0, 5]])
    expected = [1.0, 0.0, 3.0]
    assert likeliest(logits).tolist() == expected
    for bounds in ([0, 2, 4], [0, 1, 1, 4]):
        pairs = list(zip(bounds, bounds[1:], strict=False))
        group = Columns(len(pairs))
        with ThreadPoolExecutor(len(pairs)) as pool:
            tokens = [pool.submit(likeliest, logits[:, a:b], a, group) for a, b in pairs]
            assert [each.result().tolist() for each in tokens] == [expected] * len(pairs)
