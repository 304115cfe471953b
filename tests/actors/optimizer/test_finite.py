"""Non-finite values are located, however many batches are recorded before an update."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.optimizer import finite
from raymm.actors.optimizer.finite import FiniteObserver, Place
from raymm.scheduler.plan.stage import StageId

CPU = torch.device("cpu")
STAGES = [StageId("llm", index) for index in range(3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
VALUES = st.sampled_from([1.0, -2.5, float("nan"), float("inf"), -float("inf")])


@st.composite
def tensors(draw) -> torch.Tensor:
    """Draw (rows, ...), or a scalar."""
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 4), (3, 1, 2)]))
    tensor = torch.ones(shape, dtype=draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        place = draw(st.integers(0, tensor.numel() - 1))
        tensor.view(-1)[place] = draw(VALUES)
    return tensor


@settings(deadline=None, max_examples=60)
@given(batches=st.lists(st.lists(tensors(), max_size=4), min_size=1, max_size=5))
def test_positions_in_all_batches_are_named(batches) -> None:
    observer, expected = FiniteObserver(CPU), []
    for number, batch in enumerate(batches):
        observer.begin()
        for microbatch, tensor in enumerate(batch):
            stage = STAGES[microbatch % len(STAGES)]
            observer.saw("output", stage, microbatch, (tensor,))
            bad = ~torch.isfinite(tensor)
            rows = bad.reshape(len(bad), -1).any(dim=1).nonzero()[:, 0] if bad.dim() else []
            count = len(tensor) if tensor.dim() else 0
            if bad.any():
                expected.append(Place(
                    "output", stage, number, microbatch, stage, tuple(map(int, rows)), count
                ))
    assert observer.places() == expected
    observer.clear()
    assert observer.places() == []


def test_a_finished_batch_is_one_tensor() -> None:
    """Check that small tensors do not fragment the buffers of later batches."""
    observer, hidden, batches = FiniteObserver(CPU), torch.ones(4, 8), 20
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(batches):
        observer.begin()
        for microbatch in range(16):
            observer.saw("output", STAGES[0], microbatch, (hidden,))
    observer.begin()
    alive = sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) - before
    assert alive <= batches + 2, alive


def test_the_oldest_batches_are_dropped(monkeypatch) -> None:
    monkeypatch.setattr(finite, "MAX_NOTES", 10)
    observer = FiniteObserver(CPU)
    for _ in range(9):
        observer.begin()
        for microbatch in range(4):
            observer.saw("gradient", STAGES[1], microbatch, (torch.tensor([[float("nan")]]),))
    observer.begin()
    assert {place.batch for place in observer.places()} == {7, 8}
