"""Offloaded activations: the same numbers, moved once, fetched one block ahead."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raymm.actors.recompute.recomputed_layers import OffloadedBlocks, _Moved


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)  # three views of one storage
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + nn.functional.dropout(self.out(mixed).exp(), 0.3)


@pytest.fixture
def events(monkeypatch):
    """Record moves, fetches and frees, in order."""
    events: list[str] = []
    make, fetch = _Moved.__init__, _Moved.fetch

    def made(moved, storage, blocks):
        make(moved, storage, blocks)
        events.append(f"out {storage.nbytes()}")

    def fetched(moved):
        if moved._back is None:
            events.append(f"back {moved._host.nbytes}")
        fetch(moved)

    monkeypatch.setattr(_Moved, "__init__", made)
    monkeypatch.setattr(_Moved, "fetch", fetched)
    return events


def run(offload: bool, smallest: int = 0, microbatches: int = 2, events: list[str] | None = None):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    offloaded = OffloadedBlocks(smallest)
    for index, block in enumerate(blocks if offload else ()):
        block.forward = offloaded.wrap(block.forward)

        def mark(gradient, index=index):
            if events is not None:
                events.append(f"backward {index}")

        block.register_forward_hook(lambda _, __, out, mark=mark: out.register_hook(mark) and None)
    outputs = []
    for _ in range(microbatches):
        x = torch.randn(2, 10, 16, requires_grad=True)
        hidden = x
        for block in blocks:
            hidden = block(hidden)
        outputs.append((x, hidden))
    for _, hidden in outputs:
        hidden.square().sum().backward()
    gradients = [p.grad for block in blocks for p in block.parameters()]
    return [h for _, h in outputs], [x.grad for x, _ in outputs] + gradients


def test_numbers_are_the_same(events):
    before, after = run(False), run(True)
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
    assert events


def test_views_are_moved_once_and_parameters_stay(events):
    run(True, microbatches=1)
    moved = [int(event.split()[1]) for event in events if event.startswith("out")]
    assert moved.count(2 * 10 * 48 * 4) == 3  # q, k and v of each block together
    parameters = {p.untyped_storage().nbytes() for p in Block().parameters()}
    assert not parameters & set(moved)
    assert len(moved) == sum(event.startswith("back") for event in events)


def test_a_block_is_fetched_while_the_one_after_it_runs(events):
    run(True, microbatches=2, events=events)
    first = events.index("backward 2")
    assert not any(event.startswith("back ") for event in events[:first])
    second = events.index("backward 1", first)
    large = f"back {2 * 10 * 48 * 4}"
    # The last block's own, and those of the one before, but not the first one's yet.
    assert events[first:second].count(large) == 2
    # The last block of the other microbatch is not fetched until its backward.
    third = events.index("backward 2", first + 1)
    assert events[first:third].count(large) == 3
    assert events[third:].count(large) == 3


def test_small_ones_stay(events):
    run(True, smallest=2 * 10 * 48 * 4)
    assert {int(event.split()[1]) for event in events if event.startswith("out")} == {3840}


def test_nothing_is_moved_without_gradients(events):
    block = Block()
    block.forward = OffloadedBlocks(0).wrap(block.forward)
    with torch.no_grad():
        block(torch.randn(1, 4, 16))
    assert not events


def test_a_fetch_waits_for_its_own_copy_out_only(monkeypatch):
    """Check that it does not wait for later copies."""
    log: list[tuple] = []

    class Stream:
        def __init__(self, name="main"):
            self.name, self.work = name, 0

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name, other.work))

        def wait_event(self, event):
            log.append((self.name, "waits for", *event))

        def record_event(self):
            self.work += 1
            return self.name, self.work

    out, back = Stream("out"), Stream("back")
    blocks = OffloadedBlocks()
    blocks._streams = out, back
    cuda = SimpleNamespace(stream=nullcontext, current_stream=Stream, Event=object)
    monkeypatch.setattr(torch, "cuda", cuda)
    first, later = (object.__new__(_Moved) for _ in range(2))
    for moved in (first, later):
        moved._blocks, moved._device, moved._back = blocks, torch.device("cuda"), None
        moved._host, moved._left = torch.ones(4), out.record_event()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor.clone())
    first.fetch()
    assert log == [("back", "waits for", "out", 1)]
