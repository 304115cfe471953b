"""Tokens of a process from the arguments of a text model."""

import pytest
import torch

from raymm.actors.sharding.vlm.token_share import TokenShare

ROWS, TOKENS = 4, 6


def arguments():
    numbers = torch.arange(ROWS * TOKENS)
    marked = numbers.view(ROWS, TOKENS) % 5 == 0
    return {
        "embeds": numbers.view(ROWS, TOKENS, 1).float(), "position_ids": numbers.view(ROWS, TOKENS),
        "axes": torch.stack([numbers.view(ROWS, TOKENS)] * 3), "mark": marked,
        "features": numbers[numbers % 5 == 0].float()[:, None], "flag": True, "none": None,
    }


@pytest.mark.parametrize(("rows", "columns"), [
    (None, [0, 5]), (range(1, 3), None), (range(2, 4), [1, 2, 3]),
])
def test_a_share_has_its_rows_and_columns(rows, columns):
    share = TokenShare(
        (ROWS, TOKENS), rows, None if columns is None else torch.tensor(columns)
    )
    chosen = [
        row * TOKENS + column for row in rows or range(ROWS) for column in columns or range(TOKENS)
    ]
    own = share.of_arguments(arguments())
    shape = (len(rows or range(ROWS)), len(columns or range(TOKENS)))
    assert own["position_ids"].shape == shape
    assert own["position_ids"].flatten().tolist() == chosen
    assert own["embeds"].flatten().tolist() == chosen
    assert torch.equal(own["axes"], torch.stack([own["position_ids"]] * 3))
    assert torch.equal(own["mark"], own["position_ids"] % 5 == 0)
    assert own["features"].flatten().tolist() == [n for n in chosen if n % 5 == 0]
    assert own["flag"] is True and own["none"] is None
