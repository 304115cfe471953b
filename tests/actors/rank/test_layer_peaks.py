"""Temporary memory of working layers, compared with bytes counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from raymm.actors.memory.live_bytes import LiveBytes
from raymm.actors.rank.module_profiler import layer_peaks

ROWS, WIDTH, INNER = 64, 32, 256
FLOAT = 4
HIDDEN, WIDE, WEIGHT = ROWS * WIDTH * FLOAT, ROWS * INNER * FLOAT, WIDTH * INNER * FLOAT


class Block(nn.Module):
    """Block ``x -> relu(x A) B``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(INNER, WIDTH))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (hidden_states @ self.up).relu() @ self.down


def test_live_storages_are_counted() -> None:
    """Count storages once, from creation to the last reference; FSDP may resize its storages."""
    live = LiveBytes()
    parameter = torch.zeros(100, requires_grad=True)
    parameter.grad = torch.zeros(100)
    live.note_all()
    before = live.now
    with live:
        made = torch.zeros(1000)
        view = made[10:]
        assert live.now - before == 4000
        del made
        assert live.now - before == 4000
        view.untyped_storage().resize_(0)
        assert live.now == before and live.most - before == 4000
        view.untyped_storage().resize_(2000)
        assert live.now - before == 2000
        del view
        parameter.grad.add_(1)  # existed before
        assert live.now == before
        live.restart()
        assert live.most == before


def test_layers_of_a_module() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    inputs = torch.randn(ROWS, WIDTH)

    def run() -> torch.Tensor:
        hidden = inputs
        for block in blocks:
            hidden = block(hidden)
        return hidden

    run().sum().backward()  # gradients exist, as in all microbatches but the first
    live = LiveBytes()
    live.note_all()
    with live:
        # A block keeps the result of relu, and the second one its input.
        working, forward = layer_peaks(run, list(blocks), live, [WIDE, WIDE + HIDDEN])
    # The second one's backward needs the output's gradient, and that of relu's result and of its
    # input, or of a weight. The first one's needs no gradient of the input.
    assert HIDDEN + WIDE <= working[1] <= HIDDEN + 2 * WIDE + WEIGHT
    assert HIDDEN + WIDE <= working[0] <= HIDDEN + 2 * WIDE + WEIGHT
    # Without a backward: the product and the result of relu; the second's input, too.
    assert forward == [2 * WIDE, HIDDEN + 2 * WIDE]
