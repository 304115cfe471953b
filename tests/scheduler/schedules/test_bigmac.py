"""BigMac holds a number of encoder activations that the number of microbatches does not change."""

from __future__ import annotations

from tests.support.field_schedules import most_held, replicated_plan, stepped


def test_bigmac_holds_as_many_encoder_activations_for_any_batch() -> None:
    held = [most_held(replicated_plan(count, "bigmac"), "vision") for count in (16, 64)]
    assert held == [2, 2]
    assert [most_held(replicated_plan(n, "mimo_colocated"), "vision") for n in (16, 64)] == [4, 16]
    bytes_held = [
        max(stepped(replicated_plan(count, "bigmac")).peaks()) for count in (16, 64)
    ]
    assert bytes_held[0] == bytes_held[1]
