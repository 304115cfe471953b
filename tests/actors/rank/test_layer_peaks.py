"""What layers have for a time while they work, against bytes counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from raymm.actors.memory.live_bytes import LiveBytes
from raymm.actors.rank.layer_peaks import layer_peaks

ROWS, WIDTH, INNER = 64, 32, 256
FLOAT = 4
HIDDEN, WIDE, WEIGHT = ROWS * WIDTH * FLOAT, ROWS * INNER * FLOAT, WIDTH * INNER * FLOAT


class Block(nn.Module):
    """``x -> relu(x A) B``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(INNER, WIDTH))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (hidden_states @ self.up).relu() @ self.down


def test_what_is_alive_is_counted() -> None:
    """Storages count once, from when they are made until nobody refers to them; FSDP's may change
    their size."""
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
        parameter.grad.add_(1)  # was there already
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

    run().sum().backward()  # gradients are there, as in all microbatches but the first
    live = LiveBytes()
    live.note_all()
    with live:
        # A block keeps what relu gave, and the second one its input.
        working, forward = layer_peaks(run, list(blocks), live, [WIDE, WIDE + HIDDEN])
    # Of the second one's backward: the output's gradient, that of relu's result and of its input,
    # or of a weight. Of the first one's no gradient of the input is needed.
    assert HIDDEN + WIDE <= working[1] <= HIDDEN + 2 * WIDE + WEIGHT
    assert HIDDEN + WIDE <= working[0] <= HIDDEN + 2 * WIDE + WEIGHT
    # Without a backward: the product beside what relu makes of it; the second's input, too.
    assert forward == [2 * WIDE, HIDDEN + 2 * WIDE]
