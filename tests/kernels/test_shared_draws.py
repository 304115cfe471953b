"""A process with a shard of a tensor uses the random numbers of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.kernels.shared_draws import Cut, Features, Grid, SharedDraws, current_draws, set_grid

ROWS, TOKENS, HEADS, WIDTH = Cut.from_range(1, 3, 4), Cut(4, 5, ((0, 2), (4, 6))), 4, 12
FEATURES = Cut(6, 12, ((0, 3), (6, 9)))


def taken(whole: torch.Tensor, dim: int, cut: Cut) -> torch.Tensor:
    """Return entries by index; zeros beyond the end."""
    numbers = [n for start, stop in cut.ranges for n in range(start, stop)]
    parts = [
        whole.select(dim, n) if n < cut.whole else torch.zeros_like(whole.select(dim, 0))
        for n in numbers
    ]
    return torch.stack(parts, dim)


def kept(shape: tuple[int, ...], grid: Grid | None = None, features: Features | None = None):
    """Return elements that dropout keeps, and the next random number."""
    torch.manual_seed(3)
    with SharedDraws(grid, features):
        mask = F.dropout(torch.ones(shape), 0.4)
    return mask, torch.rand(())


DRAWS = {
    "dropout": lambda ones: F.dropout(ones, 0.4),
    "uniform": lambda ones: ones * torch.empty_like(ones).uniform_(0.5, 1.5),
    "rand": lambda ones: ones * torch.rand(ones.shape),
    "randn_like": lambda ones: ones * torch.randn_like(ones),
    "alpha": lambda ones: F.alpha_dropout(ones, 0.4, training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_rows_and_tokens_are_cut(draw):
    torch.manual_seed(3)
    whole, after = draw(torch.ones(4, 5, 7)), torch.rand(())
    torch.manual_seed(3)
    with SharedDraws(Grid(ROWS, TOKENS)):
        local = draw(torch.ones(2, 4, 7))
    real = torch.tensor([True, True, True, False])  # the last token is padding
    expected = taken(taken(whole, 0, ROWS), 1, TOKENS)
    assert torch.equal(local[:, real], expected[:, real])
    assert torch.equal(torch.rand(()), after)


@given(st.data())
def test_any_cut_of_any_shape(data):
    """Check rows, tokens and features of (B, T, F) and (B T, F), and heads of (B, H, T, S)."""
    def cut(most: int) -> Cut:
        edges = sorted(data.draw(st.sets(st.integers(0, most), min_size=2, max_size=4)))
        pairs = tuple(zip(edges[::2], edges[1::2], strict=False))
        return Cut(sum(b - a for a, b in pairs), most, pairs)

    rows, tokens, features = cut(5), cut(6), cut(9)
    grid, local = Grid(rows, tokens), (rows.size, tokens.size, features.size)
    torch.manual_seed(3)
    whole = F.dropout(torch.ones(5, 6, 9), 0.4)
    expected = taken(taken(taken(whole, 0, rows), 1, tokens), 2, features)
    assert torch.equal(kept(local, grid, Features(features))[0], expected)
    flat = (local[0] * local[1], local[2])
    if flat[0] not in (rows.size, 1):
        assert torch.equal(kept(flat, grid, Features(features))[0], expected.flatten(0, 1))
    grid = Grid(rows, Cut.uncut(7))
    torch.manual_seed(3)
    scores = F.dropout(torch.ones(5, 4, 7, 8), 0.4)
    heads, of_heads = Cut.from_range(2, 4, 4), Features(Cut.from_range(6, 12, 12), 2)
    expected = taken(taken(scores, 0, rows), 1, heads)
    assert torch.equal(kept((rows.size, 2, 7, 8), grid, of_heads)[0], expected)
    flat_heads = kept((rows.size * 2, 7, 8), grid, of_heads)[0]
    torch.manual_seed(3)
    scores = F.dropout(torch.ones(20, 7, 8), 0.4).view(5, 4, 7, 8)
    assert torch.equal(flat_heads.view(-1, 2, 7, 8), taken(taken(scores, 0, rows), 1, heads))


def test_numbers_for_each_row_and_for_all_of_them():
    grid = Grid(ROWS, TOKENS)
    torch.manual_seed(3)
    whole = F.dropout(torch.ones(4, 1, 1), 0.4)
    assert torch.equal(kept((2, 1, 1), grid)[0], whole[1:3])
    assert torch.equal(kept((), grid)[1], kept(())[1])


def test_unknown_shapes_are_refused():
    for shape, grid, features in (
        ((3, 7), Grid(ROWS, TOKENS), None), ((2, 3, 4, 4), Grid(ROWS, TOKENS), None),
        ((2, 4, 7), None, Features(FEATURES)), ((2, 4), None, Features(None)),
        ((2, 4), Grid(Cut(2, 0, ((0, 2),))), None),
    ):
        with pytest.raises(PlanError, match=r"random numbers of shape .*; accepted: shapes"):
            kept(shape, grid, features)
    with pytest.raises(PlanError), SharedDraws(Grid(ROWS)):
        torch.bernoulli(torch.full((2, 3), 0.5))


def operators_that_draw() -> list:
    """Return torch's operators that use random numbers, without fused kernels."""
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    every = (getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads())
    return [
        operator for operator in every
        if torch.Tag.nondeterministic_seeded in operator.tags
        and "dropout_p" not in (names := {one.name for one in operator._schema.arguments})
        and "out" not in names and "batch_sizes" not in names
    ]


def test_operators_with_local_random_numbers_are_detected():
    """Call each operator with local rows, or their number: it must be sharded or rejected."""
    values = {
        "size": [2, 3], "n": 2, "low": 0, "high": 3, "p": 0.5, "num_samples": 2, "dropout": 0.5,
        "train": True, "from": 0, "to": 3, "generator": None, "lambd": 1.0,
    }
    unnoticed = []
    for operator in operators_that_draw():
        draws, named = SharedDraws(Grid(ROWS)), {}
        for argument in operator._schema.arguments:
            if str(argument.type) in ("Tensor", "Optional[Tensor]"):
                named[argument.name] = torch.full((2, 3), 0.5)
            elif argument.name in values:
                named[argument.name] = values[argument.name]
            elif argument.default_value is not None:
                named[argument.name] = argument.default_value
            elif str(argument.type) == "float":
                named[argument.name] = 0.5
        try:
            if draws._draw(operator, tuple(named.values()), named, named) is None:
                unnoticed.append(str(operator))
        except (PlanError, RuntimeError, TypeError, NotImplementedError):
            pass  # rejected, or called with the shape of all rows and these arbitrary values
    assert not unnoticed and len(operators_that_draw()) > 50


def test_attention_without_dropout_is_deterministic():
    """Check its kernel, which may use random numbers, and is called without the probability (0)."""
    query, key, value = torch.randn(3, 2, 2, 5, 8, requires_grad=True).unbind()
    for grid in (Grid(ROWS), Grid(ROWS, TOKENS)):
        with SharedDraws(grid, Features(FEATURES)):
            local = F.scaled_dot_product_attention(query, key, value)
        assert local.equal(F.scaled_dot_product_attention(query, key, value))


def test_gradients_pass_the_mask():
    ones = torch.ones(2, 4, 7, requires_grad=True)
    with SharedDraws(Grid(ROWS, TOKENS)) as draws:
        assert current_draws() is draws
        local = F.dropout(ones, 0.4)
        set_grid(None)
        assert draws.grid is None
    assert current_draws() is None
    local.sum().backward()
    assert torch.equal(ones.grad, local.detach())
