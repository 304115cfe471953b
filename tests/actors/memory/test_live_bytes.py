"""Bytes of live tensors."""

from __future__ import annotations

import torch

from raymm.actors.memory.live_bytes import LiveBytes


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
